"""The service's commands with the real worker, run by a supervisor that keeps launchd's rules.

As on a Mac, and, in the long tier, as on Linux. The tests of this module share one service, and
each begins by starting it.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mlx_worker.files import write_whole
from tests.service.supervisor import Supervised, supervising
from tests.workers import ANSWERS_S, COUNT, STARTS_S, wait_until

SCALE = 0.05  # 10 s between starts are half a second
CONFIG = "server:\n  port: 0\n"
ROOT = Path(__file__).resolve().parents[2]


class Service:
    """`mlx-worker service …` in processes of their own, for one home folder."""

    def __init__(self, kind: str, home: Path, supervised: Supervised) -> None:
        self.home = home / ".mlx-worker ü"
        self.home.mkdir()
        self.configure(CONFIG)
        is_mac = kind == "launchd"
        script = str(Path(__file__).with_name("as_mac.py"))
        self._command = [sys.executable, *([script] if is_mac else ["-m", "mlx_worker"])]
        self._environment = {
            **{name: text for name, text in os.environ.items() if name != "XDG_CONFIG_HOME"},
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "HOME": str(home),
            "MLX_WORKER_HOME": str(self.home),
            "PATH": f"{supervised.folder}:{os.environ['PATH']}",
            "LAUNCHCTL": str(supervised.folder / "launchctl"),
        }

    def configure(self, text: str) -> None:
        write_whole(self.home / "config.yaml", text)

    def begin(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, "service", *words],
            env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *words: str) -> tuple[int, str]:
        """Exit code and what was said."""
        process = self.begin(*words)
        out, err = process.communicate(timeout=STARTS_S)
        return process.returncode, out + err

    def worker(self) -> dict[str, Any]:
        """As `service status --json` has it."""
        return json.loads(self.run("status", "--json")[1])["parts"][0]

    def printed(self) -> str:
        """By the worker, whenever it ran."""
        path = self.home / "logs" / "service.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def consoles(self) -> list[str]:
        """Of each start that got ready."""
        return re.findall(r"^console: (http://\S+)/$", self.printed(), re.MULTILINE)

    def wait_until_ready(self, n_starts: int) -> None:
        wait_until(lambda: len(self.consoles()) >= n_starts, STARTS_S)

    def started(self) -> None:
        """A worker runs and is ready."""
        if not self.worker()["is_running"]:
            n = len(self.consoles())
            assert self.run("start")[0] == 0
            self.wait_until_ready(n + 1)


@pytest.fixture(scope="module", params=["launchd", pytest.param("systemd", marks=pytest.mark.long)])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    home = tmp_path_factory.mktemp("home of ü")
    with supervising(home, scale=SCALE) as supervised:
        service = Service(request.param, home, supervised)
        code, said = service.run("install", "--part", "worker")
        assert code == 0, said
        service.wait_until_ready(1)
        yield service


def test_an_installed_worker_runs(service: Service):
    """It is this user's, from now on and at each login."""
    service.started()
    assert re.search(r"worker   running, pid \d+; starts at login", service.run("status")[1])


def test_logs_show_what_the_service_did(service: Service):
    """In lines that a person reads."""
    service.started()
    assert "INFO    serving on http://127.0.0.1:" in service.run("logs")[1]


def test_a_worker_that_is_killed_comes_back(service: Service):
    """With kill -9, as the system does when memory is short."""
    service.started()
    n, pid = len(service.consoles()), service.worker()["pid"]
    os.kill(pid, signal.SIGKILL)
    service.wait_until_ready(n + 1)
    assert service.worker()["pid"] not in (None, pid)


def test_a_stop_finishes_a_reply(service: Service):
    """`service stop` in the middle of a stream: it ends whole, and nothing runs afterwards."""
    service.started()
    base = f"{service.consoles()[-1]}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=ANSWERS_S) as client:
        stream = client.chat.completions.create(
            model="demo", messages=COUNT, stream=True, temperature=0
        )
        pieces = [next(stream).choices[0].delta.content]
        stopping = service.begin("stop")
        chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    pieces += [choice.delta.content for choice in chunks]
    said = stopping.communicate(timeout=STARTS_S)[1]
    assert "".join(piece or "" for piece in pieces).startswith("3, 7, 11, 15, 19")
    assert chunks[-1].finish_reason == "stop"
    assert (stopping.returncode, "is stopped" in said) == (0, True)
    assert service.worker()["pid"] is None


def test_an_error_of_the_settings_isnt_looped(service: Service):
    """It is said once, by the worker and by the command, and nothing runs until it is mended."""
    service.run("stop")
    service.configure("server:\n  prot: 0\n")
    before = service.printed().count("prot")
    try:
        code, said = service.run("start")
        wait_until(lambda: service.worker()["last_exit"] == 0)
        assert service.printed().count("prot") == before + 1
        assert code == 1
        assert "prot" in said
    finally:
        service.configure(CONFIG)
