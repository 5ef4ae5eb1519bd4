"""What is seen of a worker: while it runs, loads, hangs, wants a key, and once it is gone.

A small server of this process plays the worker's local API; tests/test_serve.py has a real one.
"""

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_worker import local, state
from mlx_worker.errors import NotSignedIn, WorkerError
from mlx_worker.local import ask, look
from mlx_worker.presence import Presence
from tests.answering import KEY, STATUS, answering

NOBODY = "http://127.0.0.1:9/"


def said(phase: state.Phase, **fields: Any) -> None:
    """By this process, which is alive."""
    state.write(state.own(phase, "1", **fields))


def said_by_one_that_is_gone(phase: state.Phase, **fields: Any) -> None:
    own = state.own(phase, "1", **fields)
    state.write(replace(own, process_s=own.process_s - 60))


# --- it is there ------------------------------------------------------------------------------


@pytest.mark.parametrize("condition", ["ready", "failing", "draining"])
def test_a_worker_that_answers_says_how_it_is(home: Path, condition: str):
    """With all that it says."""
    answer = {**STATUS, "state": condition}
    with answering(answer=answer) as server:
        said("ready", address=server.address)
        seen = look()
    assert (seen.condition, seen.pid, seen.status) == (condition, os.getpid(), answer)
    assert seen.is_running


def test_why_it_fails_is_the_error(home: Path):
    """In its own words."""
    with answering(answer={**STATUS, "state": "failing", "why": "the engine is stuck"}) as server:
        said("ready", address=server.address)
        assert look().error == "the engine is stuck"


def test_a_worker_that_loads_is_starting(home: Path):
    """It answers that it can't serve yet, which is no failure; before, it has no address."""
    said("starting")
    assert look().condition == "starting"
    with answering(answer={**STATUS, "state": "failing", "why": "no model yet"}) as server:
        said("starting", address=server.address)
        seen = look()
    assert (seen.condition, seen.error) == ("starting", None)


def test_one_that_could_not_write_that_it_is_ready_is_ready(home: Path):
    """What it answers counts."""
    with answering() as server:
        said("starting", address=server.address)
        assert look().condition == "ready"


def test_one_that_hangs_is_silent(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Its process is there, its port open, and nothing comes."""
    monkeypatch.setattr(local, "ANSWERS_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        said("ready", address=f"http://127.0.0.1:{hung.getsockname()[1]}/")
        seen = look()
    assert seen.condition == "silent"
    assert seen.is_running
    assert seen.error is not None
    assert "no answer" in seen.error


@pytest.mark.parametrize(
    ("phase", "condition"),
    [("ready", "silent"), ("draining", "draining"), ("stopped", "stopped"), ("refused", "refused")],
)
def test_one_that_listens_no_more_is_as_it_said(home: Path, phase: state.Phase, condition: str):
    """Its process is there, on its way out."""
    said(phase, address=NOBODY)
    assert look().condition == condition


def test_the_key_of_the_configuration_is_used(home: Path):
    """As any client's."""
    (home / ".mlx-worker").mkdir()
    (home / ".mlx-worker" / "config.yaml").write_text(f"server: {{api_key: {KEY}}}\n")
    with answering(key=KEY) as server:
        said("ready", address=server.address)
        assert look().status == STATUS


def test_a_key_that_isnt_known_here_hides_only_the_rest(home: Path):
    """It runs: as when the key stands in another shell's variable."""
    with answering(key=KEY) as server:
        said("ready", address=server.address, models=(("demo", "On, +24%"),))
        seen = look()
    assert (seen.condition, seen.status, seen.models) == ("ready", None, (("demo", "On, +24%"),))
    assert seen.error is not None
    assert "hint: set MLX_WORKER_SERVER__API_KEY here too" in seen.error


def test_a_broken_configuration_hides_nothing(home: Path):
    """It stops the next start, not whoever looks."""
    (home / ".mlx-worker").mkdir()
    (home / ".mlx-worker" / "config.yaml").write_text("server: [\n")
    with answering() as server:
        said("ready", address=server.address)
        assert look().condition == "ready"


def test_a_broken_state_hides_no_worker(home: Path):
    """It holds the lock, and answers where config.yaml says."""
    with answering() as server, Presence().taken():
        text = f"server: {{port: {server.server_port}}}\n"
        (home / ".mlx-worker" / "config.yaml").write_text(text)
        state.default_path().write_text("{")
        seen = look()
        assert (seen.condition, seen.address) == ("ready", server.address)
        (home / ".mlx-worker" / "config.yaml").write_text("server: {port: 9}\n")
        assert look().condition == "silent"


# --- it is gone -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "condition"),
    [
        ("starting", "crashed"),
        ("ready", "crashed"),
        ("draining", "crashed"),
        ("lost", "crashed"),
        ("stopped", "stopped"),
        ("refused", "refused"),
    ],
)
def test_what_it_said_last_tells_how_it_ended(home: Path, phase: state.Phase, condition: str):
    """Its number is another's now, and at its address a stranger listens: neither is asked."""
    with answering() as server:
        said_by_one_that_is_gone(phase, address=server.address, error="why")
        seen = look()
    assert (seen.condition, seen.error, seen.pid) == (condition, "why", None)
    assert (seen.status, seen.is_running) == (None, False)


def test_without_a_folder_none_ever_ran(home: Path):
    """And looking makes none."""
    assert (look().condition, look().error) == ("never", None)
    assert not (home / ".mlx-worker").exists()


def test_a_state_that_cant_be_read_is_said(home: Path):
    """Where no worker is known of."""
    state.default_path().mkdir(parents=True)
    seen = look()
    assert seen.condition == "never"
    assert seen.error is not None
    assert "state.json: can't be read" in seen.error


# --- asking -----------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["", "http://[", "http://a:b/", "http://x y/", "nonsense"])
def test_an_address_that_is_none_is_said(home: Path, address: str):
    """It may stand in a file that somebody changed."""
    with pytest.raises(WorkerError):
        ask(address, "/status")


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"", b"\xff"])
def test_what_is_no_workers_answer_is_said(home: Path, answer: bytes):
    """A stranger may listen there."""
    with answering(answer=answer) as server, pytest.raises(WorkerError, match="no worker"):
        ask(server.address, "/status")


def test_a_refusal_is_said_in_the_workers_words(home: Path):
    """With its number."""
    refusal = {"error": {"message": "busy"}}
    with answering(answer=refusal, code=503) as server:
        with pytest.raises(WorkerError, match="answers 503: busy"):
            ask(server.address, "/status")
        server.key = KEY
        with pytest.raises(NotSignedIn):
            ask(server.address, "/status")


def test_a_proxy_is_not_asked(home: Path, monkeypatch: pytest.MonkeyPatch):
    """The worker is on this machine."""
    monkeypatch.setenv("http_proxy", NOBODY)
    with answering() as server:
        assert ask(server.address, "/status") == STATUS
