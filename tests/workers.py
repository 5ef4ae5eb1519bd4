"""Real worker processes on the demo pair, for the tests that meet one as its users do."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from mlx_worker import state
from mlx_worker.state import WorkerState

COUNT: Any = [{"role": "user", "content": "Count from 3 in steps of 4, 10 numbers."}]
TELL: Any = [{"role": "user", "content": "Tell me a story about a lamp."}]
STARTS_S = 60
ANSWERS_S = 30.0


class Worker:
    """A running worker, and ways to ask it.

    program   what Python runs: the package, or a script that runs it
    settings  of the environment
    """

    def __init__(
        self,
        home: Path,
        *arguments: str,
        program: Sequence[str] = ("-m", "mlx_worker"),
        **settings: str,
    ) -> None:
        self.home = home
        environ = {**os.environ, "MLX_WORKER_HOME": str(home), **settings}
        command = [sys.executable, *program, "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"console: (http://127\.0\.0\.1:\d+)/\n", line)
        assert found, self.process.communicate()[1]
        self.url = found[1]
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=ANSWERS_S
        )

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=ANSWERS_S) as reply:
            return reply.read().decode()

    def status(self) -> dict[str, Any]:
        return json.loads(self.get("/status"))

    def metric(self, name: str) -> float:
        """Its value; 0 for one that was never counted."""
        lines = self.get("/metrics").splitlines()
        return float(next((line for line in lines if line.startswith(name)), "0").split()[-1])

    def state(self) -> WorkerState:
        """What it said of itself last."""
        found = state.read(self.home / state.FILE)
        assert found is not None
        return found

    def chat(self, messages: Any = COUNT, **options: Any) -> Any:
        extra = {k: options.pop(k) for k in ("speculation",) if k in options}
        return self.client.chat.completions.create(
            model="demo", messages=messages, extra_body=extra, **options
        )

    def text(self, **options: Any) -> str:
        """Of a whole reply or of a stream's pieces."""
        reply = self.chat(**options)
        if not options.get("stream"):
            return reply.choices[0].message.content
        pieces = [chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices]
        return "".join(pieces)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> int:
        """Its exit code, once it has ended; nothing of it is left open."""
        self.process.communicate(timeout=STARTS_S)
        self.client.close()
        return self.process.returncode


@contextmanager
def running(home: Path, *arguments: str) -> Iterator[Worker]:
    """A worker that is gone afterwards, whatever happened."""
    worker = Worker(home, *arguments)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.ended()


def wait_until(is_so: Callable[[], bool], within_s: float = 10.0) -> None:
    """Poll another process, which has no event to wait for."""
    until = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until, "not within the time"
        time.sleep(0.02)
