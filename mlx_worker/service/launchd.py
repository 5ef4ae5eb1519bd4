"""The service as a LaunchAgent of this user on a Mac: its plist, and what launchctl is told.

Owns both, and launchctl's ways: that a bootout goes on after it returned, and that a bootstrap
soon after it fails with 5. Leaves what is run to job.py. Blocking, as long as the worker needs to
finish its requests; any thread.

A restart is a bootout and a bootstrap: `kickstart -k` is reported to send SIGKILL at once, which
would cut replies short, and it would go on with the plist of before an update.
"""

import os
import plistlib
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

import psutil

from mlx_worker.config import ENV_HOME
from mlx_worker.errors import ConfigError, ServiceError
from mlx_worker.files import write_whole
from mlx_worker.service.commands import MISSING, Answer, ask
from mlx_worker.service.job import (
    DRAIN_S,
    THROTTLE_S,
    Job,
    cant_write,
    check_program,
    folders,
    job,
    make_log_folder,
)
from mlx_worker.service.manager import Part, ServiceState

LAUNCHCTL = "/bin/launchctl"
LABELS: dict[Part, str] = {
    "worker": "io.github.mlx-worker.worker",
    "menubar": "io.github.mlx-worker.menubar",
}
GONE_S = DRAIN_S + 10.0  # for a job to end after a bootout
SETTLES_S = 20.0  # in which a label that was booted out can't be bootstrapped yet: about 5 s seen
POLL_S = 0.2
TRIES = 3
OWNER_ONLY = 0o077

# launchctl's codes
NO_PROCESS, IO_ERROR, IN_PROGRESS, ALREADY = 3, 5, 36, 37
NO_DOMAIN, NO_SERVICE, DISABLED, UNSUPPORTED = 112, 113, 119, 125
NOT_THERE = {NO_PROCESS, NO_SERVICE}
NOT_YET = {IO_ERROR, IN_PROGRESS, ALREADY}

ALLOW = "see that it is allowed under System Settings, General, Login Items & Extensions"

# Which launchd may not read for an agent: macOS asks the user for each, and an agent can't be asked
GUARDED = (
    "Documents",
    "Desktop",
    "Downloads",
    "Library/Mobile Documents",
    "Library/CloudStorage",
)


def plist(job: Job) -> bytes:
    """Its LaunchAgent. KeepAlive: again after a crash, not after an exit with 0."""
    keys: dict[str, Any] = {
        "Label": LABELS[job.part],
        "ProgramArguments": list(job.program),
        "EnvironmentVariables": dict(job.environment),
        "WorkingDirectory": "/",
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": THROTTLE_S,
        "ExitTimeOut": DRAIN_S,
        "ProcessType": "Interactive",
        "StandardOutPath": str(job.capture),
        "StandardErrorPath": str(job.capture),
        "Umask": OWNER_ONLY,
    }
    if job.part == "menubar":
        keys["LimitLoadToSessionType"] = "Aqua"
    return plistlib.dumps(keys, sort_keys=False)


class Launchd:
    """agents: the folder of this user's LaunchAgents."""

    name = "launchd"
    parts: tuple[Part, ...] = ("worker", "menubar")

    def __init__(
        self,
        *,
        launchctl: str = LAUNCHCTL,
        uid: int | None = None,
        agents: Path | None = None,
        poll_s: float = POLL_S,
        asked: Callable[[Sequence[str]], Answer] = ask,
    ) -> None:
        self._launchctl = launchctl
        self._ask = asked
        self._domain = f"gui/{os.getuid() if uid is None else uid}"
        self._agents = agents or Path("~/Library/LaunchAgents").expanduser()
        self._poll_s = poll_s

    # --- the verbs ---

    def install(self, part: Part) -> ServiceState:
        if self._domain.endswith("/0"):
            hint = "run it without sudo"
            raise ConfigError("the service is of one user, not of root", hint=hint)
        check_places()
        made = job(part, "darwin")
        make_log_folder(made)
        self._write(part, plist(made))
        self._enable(part)
        self._end(part)
        self._bootstrap(part)
        return self.state(part)

    def uninstall(self, part: Part) -> bool:
        state = self.state(part)
        if state.problem is None:
            self._end(part)
            if not state.is_enabled:
                self._tell("enable", self._target(part))  # no trace of a stop --disable stays
        try:
            state.unit.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{state.unit}: can't be removed: {error.strerror}") from None
        return state.is_installed or state.is_loaded

    def start(self, part: Part) -> ServiceState:
        state = self._installed(part)
        check_program(program_of(state.unit))
        self._enable(part)
        if not state.is_loaded:
            self._bootstrap(part)
        elif not state.is_running:
            self._kickstart(part)
        return self.state(part)

    def stop(self, part: Part, *, is_lasting: bool = False) -> ServiceState:
        self._installed(part, or_loaded=True)
        if is_lasting:
            self._done("disable", self._target(part))
        self._end(part)
        return self.state(part)

    def restart(self, part: Part) -> ServiceState:
        check_program(program_of(self._installed(part).unit))
        self._enable(part)
        if self._boot_out(part):
            self._bootstrap(part)
        return self.state(part)

    def state(self, part: Part) -> ServiceState:
        unit = self._unit(part)
        answer = self._tell("print", self._target(part))
        said = printed(answer.out) if answer.is_ok else {}
        is_known = answer.is_ok or answer.code in NOT_THERE
        is_installed = unit.is_file()
        return ServiceState(
            part,
            unit,
            is_installed,
            is_enabled=is_installed and not self._is_disabled(part),
            is_loaded=answer.is_ok,
            pid=number(said.get("pid")),
            last_exit=last_exit(said),
            problem=None if is_known else str(self._failure("print", answer)),
            home=home_of(unit),
        )

    # --- what they are made of ---

    def _unit(self, part: Part) -> Path:
        return self._agents / f"{LABELS[part]}.plist"

    def _target(self, part: Part) -> str:
        return f"{self._domain}/{LABELS[part]}"

    def _tell(self, verb: str, *arguments: str) -> Answer:
        return self._ask([self._launchctl, verb, *arguments])

    def _done(self, verb: str, *arguments: str) -> None:
        answer = self._tell(verb, *arguments)
        if not answer.is_ok:
            raise self._failure(verb, answer)

    def _installed(self, part: Part, *, or_loaded: bool = False) -> ServiceState:
        """Raises ServiceError where there is nothing to run, or nobody to ask.

        or_loaded  one whose unit was removed while it runs is there as well
        """
        state = self.state(part)
        if not (state.is_installed or (or_loaded and state.is_loaded)):
            hint = f"mlx-worker service install{' --part menubar' * (part == 'menubar')}"
            raise ServiceError(f"the {part} isn't installed: no {state.unit}", hint=hint)
        if state.problem:
            raise ServiceError(state.problem)
        return state

    def _write(self, part: Part, text: bytes) -> None:
        unit = self._unit(part)
        try:
            write_whole(unit, text.decode("utf-8"), mode=0o644)
            unit.chmod(0o644)  # launchd refuses one that others may write
        except OSError as error:
            raise cant_write(unit, error) from None

    def _enable(self, part: Part) -> None:
        self._done("enable", self._target(part))

    def _is_disabled(self, part: Part) -> bool:
        """Newer ones print disabled, older ones true."""
        answer = self._tell("print-disabled", self._domain)
        line = rf'"{re.escape(LABELS[part])}"\s*=>\s*(disabled|true)\b'
        return re.search(line, answer.out) is not None

    def _is_loaded(self, part: Part) -> bool:
        return self._tell("print", self._target(part)).is_ok

    def _end(self, part: Part) -> None:
        """End it for good, also where another command starts it again meanwhile."""
        for _ in range(TRIES):
            if self._boot_out(part):
                return
        hint = "see that no other command of the service runs, and try again"
        raise ServiceError(f"the {part} is started again and again", hint=hint)

    def _boot_out(self, part: Part) -> bool:
        """End it and wait until it is gone, which may take as long as its requests.

        False: another command has started it again since.
        """
        before = self.state(part)
        if not before.is_loaded:
            return True
        answer = self._tell("bootout", self._target(part))
        if answer.code not in {0} | NOT_THERE | NOT_YET:
            raise self._failure("bootout", answer)

        def is_gone() -> bool:
            is_over = before.pid is None or not psutil.pid_exists(before.pid)
            return is_over and (not self._is_loaded(part) or self._is_another(part, before.pid))

        if not self._wait(is_gone, GONE_S):
            hint = "try again in a minute, or log out and in"
            raise ServiceError(f"the {part} was told to end, and is still there", hint=hint)
        return not self._is_another(part, before.pid)

    def _is_another(self, part: Part, pid: int | None) -> bool:
        """Whether it runs as another process than that."""
        now = number(printed(self._tell("print", self._target(part)).out).get("pid"))
        return now not in (None, pid)

    def _bootstrap(self, part: Part) -> None:
        """Load it, which starts it; again while launchd isn't done with the one before."""
        answer = Answer(MISSING, "", "")

        def is_settled() -> bool:
            nonlocal answer
            answer = self._tell("bootstrap", self._domain, str(self._unit(part)))
            return answer.code not in NOT_YET or self._is_loaded(part)

        self._wait(is_settled, SETTLES_S)
        if answer.code in NOT_YET and self._is_loaded(part):
            self._kickstart(part)  # someone else loaded it meanwhile
        elif not answer.is_ok:
            raise self._failure("bootstrap", answer)

    def _kickstart(self, part: Part) -> None:
        answer = self._tell("kickstart", self._target(part))
        if not answer.is_ok and answer.code != ALREADY:
            raise self._failure("kickstart", answer)

    def _wait(self, is_so: Callable[[], bool], within_s: float) -> bool:
        until_s = time.monotonic() + within_s
        while not is_so():
            if time.monotonic() > until_s:
                return False
            time.sleep(self._poll_s)
        return True

    def _failure(self, verb: str, answer: Answer) -> ServiceError:
        if answer.code in (NO_DOMAIN, UNSUPPORTED):
            return ServiceError(
                "nobody is logged in at this Mac's screen, which an agent needs",
                hint="log in there once, or let this Mac log in by itself; what is installed "
                "starts then. Until then, `mlx-worker serve` runs it in this terminal",
            )
        if answer.code == MISSING:
            return ServiceError(answer.line, hint="mlx-worker serve runs it without launchd")
        hints = {
            IO_ERROR: f"{ALLOW}; if it is, log out and in, then `mlx-worker service install`",
            DISABLED: ALLOW,
        }
        return ServiceError(f"launchctl {verb}: {answer.line}", hint=hints.get(answer.code))


# --- reading what it says ---------------------------------------------------------------------


def printed(text: str) -> dict[str, str]:
    """`launchctl print`'s own lines of a job, without those of its parts, whose names recur."""
    found: dict[str, str] = {}
    depth = 0
    for line in (line.strip() for line in text.splitlines()):
        if line.endswith("{"):
            depth += 1
        elif line == "}":
            depth -= 1
        elif depth == 1 and " = " in line:
            key, _, value = line.partition(" = ")
            found.setdefault(key, value)
    return found


def number(text: str | None) -> int | None:
    """The first in `123`, in `78: EX_CONFIG` and in `(never exited)`, which has none."""
    found = re.search(r"-?\d+", text or "")
    return int(found[0]) if found else None


def last_exit(said: dict[str, str]) -> int | None:
    """A signal, printed as `Killed: 9`, is negative; 0 of one that was never started is none."""
    signal = re.search(r"(\d+)\s*$", said.get("last terminating signal", ""))
    return -int(signal[1]) if signal else number(said.get("last exit code"))


def home_of(unit: Path) -> Path | None:
    """The worker's folder that it names."""
    return _path_in(unit, "EnvironmentVariables", ENV_HOME)


def program_of(unit: Path) -> Path | None:
    """None: it can't be read."""
    return _path_in(unit, "ProgramArguments", 0)


def _path_in(unit: Path, *keys: Any) -> Path | None:
    try:
        found = plistlib.loads(unit.read_bytes())
        for key in keys:
            found = found[key]
    except (OSError, LookupError, TypeError, ValueError, ExpatError):
        return None
    return Path(found) if isinstance(found, str) else None


# --- where an agent can't read ----------------------------------------------------------------


def check_places() -> None:
    """Raises ConfigError for a folder that macOS would keep from an agent."""
    for name, folder in folders().items():
        for path in {folder.absolute(), folder.resolve()}:
            if guard := guard_of(path):
                raise ConfigError(
                    f"{name} is in {path}: macOS keeps ~/{guard} from services",
                    hint="move it elsewhere in your home folder, e.g. `uv tool install mlx-worker`",
                )


def guard_of(path: Path) -> str | None:
    """The guarded folder that it is in; names on a Mac's disk differ by more than their case."""
    home = Path.home()
    for guard in GUARDED:
        for place in {home / guard, (home / guard).resolve()}:
            parts = [part.casefold() for part in place.parts]
            if [part.casefold() for part in path.parts][: len(parts)] == parts:
                return guard
    return None
