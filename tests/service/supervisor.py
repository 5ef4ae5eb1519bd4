"""A supervisor for tests that runs jobs for real: launchd's rules, systemd's rules, and logins.

Owns when a job starts, starts again, is told to end and is killed. Leaves what launchctl may be
told to launchctl.py. It runs in a thread of its own, and is told over a socket by the programs
`launchctl` and `systemctl` in its folder, as launchd and systemd are by theirs.

    launchd   RunAtLoad; KeepAlive {SuccessfulExit: false}; ThrottleInterval from start to start;
              ExitTimeOut from SIGTERM to SIGKILL
    systemd   Restart=on-failure; RestartSec from an end to the next start; TimeoutStopSec

The pauses between starts are `scale` times as long as a unit says; what a job gets to end never is.
"""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mlx_worker.service.commands import Answer
from tests.service.launchctl import DOMAIN, Domain, check_program, checked

T = TypeVar("T")
UNIT = "mlx-worker.service"
CANT_START = 78  # EX_CONFIG
WORKS_S = 60.0
CLEAN = {0, -signal.SIGHUP, -signal.SIGINT, -signal.SIGTERM, -signal.SIGPIPE}  # for systemd
PASSED_ON = ("PYTHONPATH", "HF_HUB_OFFLINE")  # so that the job runs the code that is tested


# --- jobs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """restarts: whether an end with this code is followed by a start; pause_s: from the time that
    it ran for to the time until the next start."""

    program: list[str]
    environment: dict[str, str]
    folder: str
    capture: str
    exit_s: float
    restarts: Callable[[int], bool]
    pause_s: Callable[[float], float]


def kill(pid: int, number: int) -> None:
    """One that has just ended by itself needs none."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class Running:
    """One job: its process, whenever it has one."""

    def __init__(self, spec: Spec, home: Path) -> None:
        self.spec = spec
        self._home = home
        self.pid: int | None = None
        self.last_exit: int | None = None
        self.starts: list[float] = []
        self._is_leaving = False
        self._now, self.has_begun = asyncio.Event(), asyncio.Event()
        self.ended = asyncio.create_task(self._run())

    def is_there(self) -> bool:
        return not self.ended.done() or not self._is_leaving

    def kickstart(self, *, kills: bool) -> None:
        if kills and self.pid:
            kill(self.pid, signal.SIGKILL)
        self._now.set()
        if self.ended.done():
            self.ended = asyncio.create_task(self._run())

    def leave(self) -> None:
        self._is_leaving = True
        self._now.set()
        if self.pid:
            kill(self.pid, signal.SIGTERM)

    async def _run(self) -> None:
        while not self._is_leaving:
            self._now.clear()
            began = time.monotonic()
            self.last_exit = code = await self._once()
            if self._is_leaving or not self.spec.restarts(code):
                return
            with suppress(TimeoutError):
                pause_s = self.spec.pause_s(time.monotonic() - began)
                await asyncio.wait_for(self._now.wait(), pause_s)

    async def _once(self) -> int:
        self.starts.append(time.monotonic())
        try:
            with open(self.spec.capture, "ab") as capture:  # noqa: ASYNC230
                process = await asyncio.create_subprocess_exec(
                    *self.spec.program, cwd=self.spec.folder, env=self._environment(),
                    stdin=subprocess.DEVNULL, stdout=capture, stderr=capture,
                )  # fmt: skip
        except OSError:
            self.has_begun.set()
            return CANT_START
        self.pid = process.pid
        self.has_begun.set()
        if self._is_leaving:
            process.terminate()
        try:
            return await self._awaited(process)
        finally:
            self.pid = None

    async def _awaited(self, process: asyncio.subprocess.Process) -> int:
        """Its code; once it is told to end, it has so long."""
        over = asyncio.create_task(process.wait())
        while not self._is_leaving and not over.done():
            now = asyncio.create_task(self._now.wait())
            await asyncio.wait([over, now], return_when=asyncio.FIRST_COMPLETED)
            now.cancel()
            if not self._is_leaving:
                self._now.clear()
        await asyncio.wait([over], timeout=self.spec.exit_s)
        if not over.done():
            process.kill()
        return await over

    def _environment(self) -> dict[str, str]:
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        return {"HOME": str(self._home), **passed, **self.spec.environment}


# --- launchd ----------------------------------------------------------------------------------


def of_plist(keys: dict[str, Any], scale: float) -> Spec:
    assert keys["RunAtLoad"] is True
    assert keys["KeepAlive"] == {"SuccessfulExit": False}
    return Spec(
        keys["ProgramArguments"],
        keys["EnvironmentVariables"],
        keys["WorkingDirectory"],
        keys["StandardOutPath"],
        keys["ExitTimeOut"],
        restarts=lambda code: code != 0,
        pause_s=lambda ran_s: max(0.0, keys["ThrottleInterval"] * scale - ran_s),
    )


# --- systemd ----------------------------------------------------------------------------------

KNOWN = {
    "Description", "StartLimitIntervalSec", "Type", "ExecStart", "Environment", "Restart",
    "RestartSec", "TimeoutStopSec", "KillMode", "UMask", "StandardOutput", "StandardError",
    "WorkingDirectory", "WantedBy",
}  # fmt: skip


def words_of(text: str) -> list[str]:
    """As systemd splits and unquotes; a lone % would name something of the machine's."""
    words = [word.replace("%%", "\0") for word in shlex.split(text)]
    assert not any("%" in word for word in words), text
    return [word.replace("\0", "%") for word in words]


def of_unit(path: Path, scale: float) -> Spec:
    """Raises AssertionError for one that systemd wouldn't take, or takes with a warning."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("=", 1) for line in lines if line and not line.startswith("[")]
    assert {key for key, _ in pairs} <= KNOWN
    named = dict(pairs)
    words = words_of(named["ExecStart"].removeprefix(":"))
    assert named["ExecStart"].startswith(":"), "$ in an argument would be replaced"
    assert not set("\"'\\") & set(words[0]), "Executable name contains special characters"
    check_program(words)
    capture = named["StandardOutput"].removeprefix("append:").replace("%%", "%")
    assert (named["Type"], named["Restart"]) == ("exec", "on-failure")
    pairs_of_it = [words_of(text)[0].split("=", 1) for key, text in pairs if key == "Environment"]
    return Spec(
        words,
        {name: value for name, value in pairs_of_it},
        named["WorkingDirectory"],
        capture,
        float(named["TimeoutStopSec"]),
        restarts=lambda code: code not in CLEAN,
        pause_s=lambda _: float(named["RestartSec"]) * scale,
    )


class Units:
    """What `systemctl --user` is answered about the one unit."""

    def __init__(self, folder: Path, start: Callable[[Spec], Running], scale: float) -> None:
        self._path = folder / UNIT
        self._wanted = folder / "default.target.wants" / UNIT
        self._start, self._scale = start, scale
        self._loaded: str | None = None
        self.job: Running | None = None

    async def command(self, words: list[str]) -> tuple[int, str, str]:
        if words[:1] != ["--user"]:
            return 1, "", "misuse: without --user it is the system's manager\n"
        does = getattr(self, f"do_{words[1].replace('-', '_')}", None)
        if does is None:
            return 1, "", f"Unknown command verb '{words[1]}'.\n"
        runs = self.job is not None and not self.job.ended.done()
        is_of_what_runs = words[1] == "stop" and runs  # whatever became of its file
        if words[1] not in ("daemon-reload", "show", "disable") and not is_of_what_runs:
            if not self._path.exists():
                return 5, "", f"Failed: Unit {UNIT} not found.\n"
            if self._loaded != self._path.read_text(encoding="utf-8"):
                return 1, "", f"misuse: {UNIT} changed on disk, and no daemon-reload\n"
        if words[2:3] != ([] if words[1] == "daemon-reload" else [UNIT]):
            return 1, "", f"misuse: {words}\n"
        return await does()

    async def do_daemon_reload(self) -> tuple[int, str, str]:
        there = self._path.exists()
        self._loaded = self._path.read_text(encoding="utf-8") if there else None
        return 0, "", ""

    async def do_enable(self) -> tuple[int, str, str]:
        self._wanted.parent.mkdir(exist_ok=True)
        if not self._wanted.is_symlink():
            self._wanted.symlink_to(self._path)
        return 0, "", "Created symlink\n"

    async def do_disable(self) -> tuple[int, str, str]:
        self._wanted.unlink(missing_ok=True)
        return 0, "", ""

    async def do_start(self) -> tuple[int, str, str]:
        if self.job is None or self.job.ended.done():
            self.job = self._start(of_unit(self._path, self._scale))
            await self.job.has_begun.wait()  # Type=exec
        return 0, "", ""

    async def do_stop(self) -> tuple[int, str, str]:
        if self.job:
            self.job.leave()
            await self.job.ended
        return 0, "", ""

    async def do_restart(self) -> tuple[int, str, str]:
        await self.do_stop()
        return await self.do_start()

    async def do_show(self) -> tuple[int, str, str]:
        job = self.job
        is_over = job is None or job.ended.done()
        ended = job.last_exit if job and not job.pid else None
        failed = "failed" if ended not in (None, *CLEAN) else "inactive"
        active = "active" if job and job.pid else "activating"
        return 0, (
            f"ActiveState={failed if is_over else active}\n"
            f"MainPID={job.pid or 0 if job else 0}\n"
            f"ExecMainCode={0 if ended is None else 1 if ended >= 0 else 2}\n"
            f"ExecMainStatus={abs(ended or 0)}\n"
            f"UnitFileState={'enabled' if self._wanted.is_symlink() else 'disabled'}\n"
        ), ""  # fmt: skip

    async def log_in(self) -> None:
        if self._wanted.exists():
            await self.do_daemon_reload()
            await self.do_start()


# --- the process ------------------------------------------------------------------------------


class Supervisor:
    def __init__(self, home: Path, scale: float) -> None:
        self._home, self._scale = home, scale
        self._agents = home / "Library" / "LaunchAgents"
        self.domain = Domain(lambda keys: self._start(of_plist(keys, scale)))
        self.units = Units(home / ".config" / "systemd" / "user", self._start, scale)

    def _start(self, spec: Spec) -> Running:
        return Running(spec, self._home)

    async def answer(self, words: list[str]) -> tuple[int, str, str]:
        program, *rest = words
        if program == "launchctl":
            return self.domain.command(rest)
        if program == "systemctl":
            return await self.units.command(rest)
        return await (self._log_out() if program == "logout" else self._log_in())

    async def _log_out(self) -> tuple[int, str, str]:
        """Everything of the user's ends."""
        jobs = [*self.domain.jobs.values(), *([self.units.job] if self.units.job else [])]
        for job in jobs:
            job.leave()
        for job in jobs:
            assert isinstance(job, Running)
            await job.ended
        self.domain.jobs.clear()
        self.units.job = None
        return 0, "", ""

    async def _log_in(self) -> tuple[int, str, str]:
        """Everything that isn't disabled starts."""
        for path in sorted(self._agents.glob("*.plist")):
            if checked(path)["Label"] not in self.domain.disabled:
                self.domain.do_bootstrap(DOMAIN, str(path))
        await self.units.log_in()
        return 0, "", ""

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One command, from one of the programs."""
        try:
            answer = await self.answer(json.loads(await reader.readline()))
        except Exception as error:  # what a unit must not have, shown to the test
            answer = 1, "", f"misuse: {type(error).__name__}: {error}\n"
        writer.write(json.dumps(answer).encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def close(self) -> None:
        """Nothing of it is left, whatever it was doing."""
        jobs = [job for job in (*self.domain.jobs.values(), self.units.job) if job]
        for job in jobs:
            assert isinstance(job, Running)
            job.leave()
            if job.pid:
                kill(job.pid, signal.SIGKILL)
            await job.ended


PROGRAM = """\
#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as told:
    told.connect({socket!r})
    told.sendall(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]).encode() + b"\\n")
    code, out, err = json.loads(b"".join(iter(lambda: told.recv(65536), b"")))
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


class Supervised:
    """A supervisor that runs in a thread of its own, and its programs."""

    def __init__(self, folder: Path, home: Path, scale: float) -> None:
        self.folder = folder
        self._supervisor = Supervisor(home, scale)
        socket = str(folder / "socket")
        text = PROGRAM.format(python=os.path.realpath(sys.executable), socket=socket)
        for name in ("launchctl", "systemctl"):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._call(asyncio.start_unix_server(self._supervisor.hear, socket))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=WORKS_S)

    def ask(self, command: Sequence[str]) -> Answer:
        """What its program would answer, without starting one."""
        words = [Path(command[0]).name, *command[1:]]
        return Answer(*self._call(self._supervisor.answer(words)))

    def close(self) -> None:
        self._call(self._supervisor.close())
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def supervising(home: Path, *, scale: float) -> Iterator[Supervised]:
    """One that is gone afterwards, with its jobs. Its socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="supervisor-") as name:
        supervised = Supervised(Path(name), home, scale)
        try:
            yield supervised
        finally:
            supervised.close()
