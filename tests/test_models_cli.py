"""models, pull and remove as commands, against a hub of the test's own; then a worker offline."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mlx_worker.engine.checkpoint import DEMO_FOLDER
from tests.hub import LocalHub
from tests.models.shelf import E2B, E2B_DRAFT, WEIGHTS
from tests.workers import COUNT, Worker, wait_until

COMMAND = [sys.executable, "-m", "mlx_worker"]
N_WEIGHTS = (DEMO_FOLDER / "target" / WEIGHTS).stat().st_size


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalHub]:
    """gemma-4-e2b and its draft are the demo pair."""
    with LocalHub(tmp_path / "served") as hub:
        hub.add(E2B, DEMO_FOLDER / "target")
        hub.add(E2B_DRAFT, DEMO_FOLDER / "assistant")
        yield hub


@pytest.fixture
def environ(local: LocalHub, home: Path) -> dict[str, str]:
    hub = {"HF_ENDPOINT": local.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home / "hf")}
    return {**os.environ, **hub, "HF_HUB_CACHE": str(home / "hf" / "hub")}


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(environ: dict[str, str]) -> Run:
    def run(*arguments: str, **changes: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*COMMAND, *arguments], env={**environ, **changes}, capture_output=True, text=True
        )

    return run


def listed(run: Run) -> list[dict[str, Any]]:
    return json.loads(run("models", "--json").stdout)["models"]


def test_from_nothing_to_a_served_model_and_then_offline(run: Run, home: Path, local: LocalHub):
    """One name; the worker needs no flag, no network, and no restart for a newer revision."""
    assert run("models").stdout.startswith("no model is here yet")
    pulled = run("pull", "gemma-4-e2b")
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.startswith("gemma-4-e2b is here: 11 MB in 9 files, checked")
    assert "100 % 11 MB of 11 MB" in pulled.stderr
    assert pulled.stderr.splitlines()[-1] == "next: mlx-worker serve"
    hub = {"HF_HOME": str(home / "hf"), "HF_HUB_CACHE": str(home / "hf" / "hub")}
    worker = Worker(home / ".mlx-worker", HF_HUB_OFFLINE="1", **hub)
    try:
        assert [model.id for model in worker.client.models.list()] == ["gemma-4-e2b"]
        reply = worker.client.chat.completions.create(
            model=E2B, messages=COUNT, temperature=0, extra_body={"speculation": "on"}
        )
        assert reply.choices[0].message.content == "3, 7, 11, 15, 19, 23, 27, 31, 35, 39"
        assert reply.pendra["timing"]["draft_acceptance_rate"] > 0.5  # type: ignore[attr-defined]
        port = str(worker.address[1])
        shown = run("models", MLX_WORKER_SERVER__PORT=port).stdout
        assert "in use" in shown
        assert f"  draft: {E2B_DRAFT}, 2 MB" in shown.splitlines()
        target = DEMO_FOLDER / "target"
        files = {path.name: path.read_bytes() for path in target.iterdir() if path.is_file()}
        newer = local.add(E2B, {**files, "README.md": b"A newer revision."})
        assert run("pull", "gemma-4-e2b").stdout.startswith("gemma-4-e2b is here")
        wait_until(lambda: newer in served_from(worker), 20)
    finally:
        worker.process.kill()
        worker.ended()


def served_from(worker: Worker) -> str:
    """The folder of the model that answers now."""
    worker.client.chat.completions.create(model="gemma-4-e2b", messages=COUNT, max_tokens=1)
    return worker.status()["models"][0]["path"]


def test_ctrl_c_in_a_pull_is_one_line_and_the_same_command_goes_on(
    run: Run, local: LocalHub, environ: dict[str, str]
):
    """Meanwhile `models` shows it, here and afterwards."""
    gate = local.gate(WEIGHTS, 3_000_000, repo=E2B)
    command = [*COMMAND, "pull", "gemma-4-e2b"]
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert gate.reached.wait(30)
    assert listed(run)[0]["state"] == "downloading"
    process.send_signal(signal.SIGINT)
    _, talk = process.communicate()
    gate.release()
    assert process.returncode == 130
    assert talk.splitlines()[-1] == "mlx-worker: interrupted"
    assert "Traceback" not in talk
    found = listed(run)[0]
    assert found["state"] == "incomplete"
    assert WEIGHTS in found["missing"]
    assert "this goes on: mlx-worker pull gemma-4-e2b" in run("models").stdout
    local.forget()
    assert run("pull", "gemma-4-e2b").returncode == 0
    assert listed(run)[0]["state"] == "ready"
    starts = {one.range_start for one in local.requests if one.file == WEIGHTS and one.repo == E2B}
    assert len(starts) == 1
    assert 2_900_000 < starts.pop() <= 3_000_000  # type: ignore[operator]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_pull_that_is_killed_again_and_again_ends_whole(
    run: Run, local: LocalHub, environ: dict[str, str], home: Path
):
    """SIGKILL, SIGTERM or Ctrl-C, whenever: each goes on from where the last one was."""
    random = Random(1)
    local.rate = 3_000_000
    for _ in range(40):
        process = subprocess.Popen(
            [*COMMAND, "pull", "gemma-4-e2b"],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(random.uniform(0.3, 1.6))  # any moment will do
        process.send_signal(random.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        process.wait()
    assert run("pull", "gemma-4-e2b").returncode == 0
    assert listed(run)[0]["state"] == "ready"
    starts = [
        one.range_start or 0
        for one in local.requests
        if one.file == WEIGHTS and one.repo == E2B and one.is_cdn
    ]
    assert starts == sorted(starts)
    assert len(starts) > 2
    assert not list((home / "hf").rglob("*.incomplete"))
    assert run("pull", "gemma-4-e2b").stdout.startswith("gemma-4-e2b was here already")


def test_a_model_that_is_removed_is_gone_with_its_draft(run: Run, home: Path):
    run("pull", E2B)
    removed = run("remove", E2B)
    assert removed.stdout == "gemma-4-e2b is gone; freed 11 MB\n"
    assert listed(run) == []
    assert not list((home / "hf" / "hub").glob("models--*"))
    again = run("remove", E2B)
    assert (again.returncode, again.stdout) == (2, "")
    assert "was not pulled. hint: pulled: none" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["gema-4-e2b"], 2, "did you mean gemma-4-e2b?"),
        (["someone/nothing"], 2, "check the spelling; a private one needs `hf auth login` first"),
        (["someone/gated"], 2, "run `hf auth login` with a token of the same account"),
        (["/a/folder"], 2, "a folder is served as it is"),
        (["gemma-4-e2b", "--draft", "x/y", "--no-draft"], 2, "only one of them"),
        (["gemma-4-e2b", "--revision", "nowhere"], 2, "a branch, a tag or a whole commit"),
    ],
)
def test_what_can_not_be_pulled_is_said_in_one_line(
    run: Run, local: LocalHub, arguments: list[str], code: int, message: str
):
    local.add("someone/gated", DEMO_FOLDER / "target", gated=True, token="hf_right")
    ran = run("pull", *arguments)
    assert (ran.returncode, ran.stdout) == (code, "")
    assert len(ran.stderr.splitlines()) == 1
    assert message in ran.stderr


def test_without_a_network_the_exit_code_says_that_nothing_was_wrong_with_the_command(
    run: Run, local: LocalHub
):
    local.stop()
    ran = run("pull", "gemma-4-e2b")
    local.start()
    assert ran.returncode == 1
    assert "can't be reached" in ran.stderr
    assert "check the network" in ran.stderr
    ran = run("pull", "gemma-4-e2b", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in ran.stderr


def test_a_repositorys_programs_are_never_run(
    run: Run, local: LocalHub, home: Path, tmp_path: Path
):
    """Its config asks for them in every way that the libraries know; none is fetched or run."""
    trap = tmp_path / "trap"
    program = f"open({str(trap)!r}, 'w')\n".encode()
    files = {
        path.name: path.read_bytes()
        for path in (DEMO_FOLDER / "target").iterdir()
        if path.is_file()
    }
    asked = {"AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tokenizer", None]}
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads(files[name]) | {"auto_map": asked, "model_file": "evil.py"}
        files[name] = json.dumps(content).encode()
    local.add("someone/evil", {**files, "evil.py": program, "tokenizer.py": program})
    assert run("pull", "someone/evil").returncode == 0
    assert not list((home / "hf").rglob("*.py"))
    ran = run("generate", "--model", "someone/evil", "--max-tokens", "2", "Hello")
    assert not trap.exists()
    assert "Traceback" not in ran.stderr
