"""`mlx-worker status`: one screen for people, one object for programs, whether a worker runs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_worker import cli, state
from mlx_worker.history import local_time
from mlx_worker.local import Condition, Seen
from mlx_worker.service.manager import ServiceState
from mlx_worker.status_cli import duration, facts, next_step, state_line, unmeasured_words
from tests.answering import answering

LOGS = Path("/logs")
AWAY = ServiceState("worker", Path("/unit"), is_installed=False)
INSTALLED = replace(AWAY, is_installed=True, is_enabled=True)
SERVED = replace(INSTALLED, is_loaded=True, pid=41)
MODEL = {
    "id": "org/large",
    "is_loaded": True,
    "draft": "org/small",
    "speculation": "On, +24%",
    "measured": {"speedup": 0.24, "depth": 4, "acceptance": 0.712},
}
STATUS: dict[str, Any] = {
    "version": "1.2",
    "uptime_s": 11_100,
    "state": "ready",
    "why": "",
    "queue": {"running": 1, "waiting": 2, "limit": 32},
    "memory": {"active_bytes": 521_000_000, "cache_bytes": 0, "peak_bytes": 6_000_000_000},
    "power": {"is_on_battery": True, "thermal": "fair", "is_low_power": True},
    "settings_problem": "policies.json: can't be read",
    "models": [{**MODEL, "id": "first", "is_loaded": False}, MODEL],
    "recent": [{"tokens_per_s": 20.0}, {"tokens_per_s": 58.4}, {"tokens_per_s": None}],
    "link": {
        "url": "wss://host", "state": "connected", "since_s": 61.0, "why": "",
        "name": "mac", "organisation": "org",
    },
}  # fmt: skip
READY = Seen(
    "ready", LOGS, pid=12, address="http://127.0.0.1:8321/", version="1.2", at_s=5.0, status=STATUS
)


def down(condition: Condition, **fields: Any) -> Seen:
    return Seen(condition, LOGS, version="1.2", at_s=1_796_000_000.0, **fields)


def test_the_state_line_has_a_fixed_order():
    """Of the model in memory, else of the first; the last speed that is known."""
    assert state_line(READY) == (
        "ready · org/large · On, +24% · depth 4 · accept 0.71 · 58 tok/s · 1 running · 2 waiting"
    )


def test_what_isnt_known_is_left_out():
    """As before anything was measured."""
    fresh = {"models": [{"id": "m", "speculation": None, "measured": None}], "recent": []}
    assert state_line(replace(READY, status=fresh)) == "ready · m · 0 running"
    assert state_line(replace(READY, status=None)) == "ready"
    off = {**MODEL, "speculation": "Off", "measured": {"speedup": None, "depth": None}}
    assert (
        state_line(replace(READY, status={"models": [off]}))
        == "ready · org/large · Off · 0 running"
    )


def test_a_worker_that_is_gone_is_shown_as_it_was_last_seen():
    """With when."""
    seen = down("crashed", models=(("m", "On, +24%"), ("n", None)))
    assert seen.at_s is not None
    assert state_line(seen) == f"crashed after {local_time(seen.at_s)} · m · On, +24%"


def test_a_running_worker_says_all_it_knows():
    """In a fixed order."""
    assert dict(facts(READY, SERVED)) == {
        "address": "http://127.0.0.1:8321/",
        "process": "pid 12, up 3 h 5 min, version 1.2",
        "service": "running, pid 41; starts at login",
        "gateway": "connected: wss://host as mac, for 1 min",
        "power": "battery · low power mode · heat fair",
        "memory": "521 MB in use, at most 6.0 GB",
        "settings": "policies.json: can't be read",
        "logs": "/logs",
    }


def test_an_older_workers_answer_is_enough():
    """It may lack whole sections."""
    assert dict(facts(replace(READY, status={}), AWAY))["logs"] == "/logs"
    assert state_line(replace(READY, status={})) == "ready · 0 running"


def test_a_model_that_could_not_be_loaded_is_told():
    """As one that needs more memory than there is."""
    status = {"models": [{"id": "big", "load_problem": "big: its weights take 54,000 MB"}]}
    found = dict(facts(replace(READY, status=status), SERVED))
    assert found["not loaded"] == "big: its weights take 54,000 MB"


def test_one_that_is_gone_shows_its_last_error_and_the_next_step():
    """No address that nobody is at."""
    found = dict(facts(down("refused", error="port: taken", address="http://x/"), INSTALLED))
    assert found["last error"] == "port: taken"
    assert found["next"] == "mend that, then mlx-worker service start"
    assert "address" not in found


def test_one_that_ended_without_a_word_is_said():
    """As kill -9 ends it."""
    assert "killed" in dict(facts(down("crashed"), AWAY))["last error"]


@pytest.mark.parametrize(
    ("seen", "service", "step"),
    [
        (READY, SERVED, None),
        (down("starting"), AWAY, None),
        (down("stopped"), AWAY, "mlx-worker serve"),
        (down("stopped"), INSTALLED, "mlx-worker service start"),
        (down("stopped"), replace(INSTALLED, problem="no systemd"), "mlx-worker serve"),
        (down("crashed"), SERVED, None),
        (down("never"), INSTALLED, "mlx-worker service start"),
        (down("silent", pid=7), AWAY, "kill 7, then mlx-worker serve"),
        (down("silent", pid=7), SERVED, "mlx-worker service restart"),
        (down("failing"), SERVED, "mlx-worker service logs"),
    ],
)
def test_the_next_step_is_what_helps(seen: Seen, service: ServiceState, step: str | None):
    """One command, or none."""
    assert next_step(seen, service) == step


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(41.2, "41 s"), (60, "1 min"), (3599, "59 min"), (11_100, "3 h 5 min"), (198_000, "2 d 7 h")],
)
def test_a_duration_is_read_at_a_glance(seconds: float, text: str):
    """Two units at most."""
    assert duration(seconds) == text


def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> str:
    monkeypatch.setattr(sys, "argv", ["mlx-worker", "status", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


def test_the_screen_has_the_worker_and_its_models(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Those too of which nothing is measured yet."""
    model = {"id": "m", "is_loaded": True, "speculation": "Automatic", "measured": None}
    with answering(answer={**STATUS, "models": [model]}) as server:
        state.write(state.own("ready", "1.2", address=server.address))
        lines = printed(capsys, monkeypatch).splitlines()
    assert lines[0] == "ready · m · Automatic · 58 tok/s · 1 running · 2 waiting"
    assert lines[1].split() == ["address", server.address]
    assert [line.strip() for line in lines[-2:]] == ["m", "Automatic"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"is_loaded": True, "speculation": "Automatic"}, "Automatic"),
        ({"is_loaded": True, "draft_problem": "its draft is another's"}, "its draft is another's"),
        ({"is_loaded": True, "speculation": None}, "nothing measured yet"),
        ({"is_loaded": False, "speculation": None}, "not in memory: its first request loads it"),
    ],
)
def test_a_draft_isnt_denied_before_one_is_known(model: dict[str, Any], words: str):
    """A worker says nothing of its models in the first moment, nor before they are loaded."""
    assert unmeasured_words(model) == words


def test_before_the_first_start_the_screen_says_so(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """With how to start it and where its log will be, in no more than 80 columns."""
    lines = [line.rstrip() for line in printed(capsys, monkeypatch).splitlines()]
    assert lines[0] == "never started"
    assert "  next     mlx-worker serve" in lines
    assert "  Replies measure as they are written, where the model has a draft and" in lines


def test_a_program_gets_one_object(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """What is seen, its supervisor's word, and what is measured."""
    state.write(replace(state.own("refused", "1.2", error="port: taken"), pid=2**22 + 1))
    (line,) = printed(capsys, monkeypatch, "--json").splitlines()
    found = json.loads(line)
    assert found["worker"]["condition"] == "refused"
    assert found["worker"]["error"] == "port: taken"
    assert found["worker"]["log"] == str(home / ".mlx-worker" / "logs")
    assert found["worker"]["is_running"] is False
    assert found["service"]["is_installed"] is False
    assert found["models"] == []


def test_a_broken_folder_is_said(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Instead of that none ever ran."""
    state.default_path().mkdir(parents=True)
    assert "state.json: can't be read" in " ".join(printed(capsys, monkeypatch).split())


def test_a_folder_that_cant_be_looked_into_is_said(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """As one of another user; a name that is too long fails in the same places, for root too."""
    monkeypatch.setenv("MLX_WORKER_HOME", str(home / ("x" * 300)))
    found = json.loads(printed(capsys, monkeypatch, "--json"))
    assert found["worker"]["error"].endswith("state.json: can't be read: File name too long")
    monkeypatch.setattr(sys, "argv", ["mlx-worker", "config", "show"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "config.yaml: File name too long" in capsys.readouterr().err


def test_it_answers_at_once_without_the_model_library(home: Path):
    """Under a second of the processor, also of a worker that is gone."""
    state.write(replace(state.own("ready", "1"), pid=2**22 + 1))
    script = (
        "import sys, time\n"
        "from mlx_worker.cli import app\n"
        "app(['status'], standalone_mode=False)\n"
        "print(time.process_time() < 1, sorted({'mlx', 'mlx_lm', 'numpy'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], env=dict(os.environ), capture_output=True, text=True
    )
    assert ran.stdout.splitlines()[-1] == "True []", ran.stderr
