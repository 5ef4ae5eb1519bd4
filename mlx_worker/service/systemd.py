"""The service as a systemd unit of this user on Linux: its file, and what systemctl is told.

Owns both. Leaves what is run to job.py. Where no user manager can be reached, as in a container,
the unit is written and enabled all the same, and its state says so. Blocking, as long as the worker
needs to finish its requests; any thread.
"""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

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
    job,
    make_log_folder,
)
from mlx_worker.service.manager import Part, ServiceState

SYSTEMCTL = "systemctl"
UNIT = "mlx-worker.service"
WANTS = "default.target.wants"
SHOWN = "ActiveState,MainPID,ExecMainCode,ExecMainStatus,UnitFileState"
IDLE = {"inactive", "failed", ""}
REFUSED = set("\"'\\")  # in the program's path
EXITED, KILLED, DUMPED = "1", "2", "3"  # of ExecMainCode, as waitid() has them
HOME = re.compile(rf'^Environment="{ENV_HOME}=(.*)"$', re.MULTILINE)
PROGRAM = re.compile(r'^ExecStart=:"((?:[^"\\]|\\.)*)"', re.MULTILINE)

TEMPLATE = """\
[Unit]
Description=mlx-worker
StartLimitIntervalSec=0

[Service]
Type=exec
WorkingDirectory=/
ExecStart=:{program}
{environment}
Restart=on-failure
RestartSec={restart_s}
TimeoutStopSec={drain_s}
KillMode=mixed
UMask=0077
StandardOutput=append:{capture}
StandardError=append:{capture}

[Install]
WantedBy=default.target
"""


def unit_text(job: Job) -> str:
    """Its unit file. StartLimitIntervalSec=0: it is never given up.

    The colon before the program keeps $ in its arguments as it is. Raises ConfigError for a program
    that systemd doesn't take.
    """
    if bad := REFUSED.intersection(job.program[0]):
        raise ConfigError(
            f"{job.program[0]}: has {min(bad)} in it, which systemd takes of no program",
            hint="install it in another folder",
        )
    named = job.environment.items()
    return TEMPLATE.format(
        program=" ".join(quoted(word) for word in job.program),
        environment="\n".join(f"Environment={quoted(f'{name}={text}')}" for name, text in named),
        restart_s=THROTTLE_S,
        drain_s=DRAIN_S,
        capture=str(job.capture).replace("%", "%%"),
    )


def quoted(word: str) -> str:
    """As one word of a unit file: in quotes, % doubled, which would name something."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def unquoted(text: str) -> str:
    """What `quoted` had between its quotes."""
    return re.sub(r"\\(.)", r"\1", text.replace("%%", "%"))


class Systemd:
    """units: the folder of this user's unit files."""

    name = "systemd"
    parts: tuple[Part, ...] = ("worker",)

    def __init__(
        self,
        *,
        systemctl: str = SYSTEMCTL,
        units: Path | None = None,
        asked: Callable[[Sequence[str]], Answer] = ask,
    ) -> None:
        self._systemctl = systemctl
        self._ask = asked
        config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        self._units = units or Path(config).expanduser() / "systemd" / "user"

    # --- the verbs ---

    def install(self, part: Part) -> ServiceState:
        check_part(part)
        made = job(part, "linux")
        make_log_folder(made)
        self._write(unit_text(made))
        answer = self._tell("daemon-reload")
        if is_unreachable(answer):
            self._link()
            return self.state(part)
        self._check("daemon-reload", answer)
        self._done("enable", UNIT)
        self._done("restart", UNIT)  # starts one that doesn't run
        return self.state(part)

    def uninstall(self, part: Part) -> bool:
        check_part(part)
        state = self.state(part)
        is_there = state.is_installed or state.is_loaded
        if state.problem is None and is_there:
            self._done("stop", UNIT)
        if state.problem is None and state.is_installed:
            self._done("disable", UNIT)
        try:
            self._wanted().unlink(missing_ok=True)
            state.unit.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{state.unit}: can't be removed: {error.strerror}") from None
        if state.problem is None:
            self._done("daemon-reload")
        return is_there

    def start(self, part: Part) -> ServiceState:
        check_program(named_in(self._installed(part).unit, PROGRAM))
        self._enable()
        self._done("start", UNIT)
        return self.state(part)

    def stop(self, part: Part, *, is_lasting: bool = False) -> ServiceState:
        if not self._installed(part, or_loaded=True).is_installed:
            is_lasting = False  # without a unit, no login starts it
        self._done("stop", UNIT)
        if is_lasting:
            self._done("disable", UNIT)
        return self.state(part)

    def restart(self, part: Part) -> ServiceState:
        check_program(named_in(self._installed(part).unit, PROGRAM))
        self._enable()
        self._done("restart", UNIT)
        return self.state(part)

    def state(self, part: Part) -> ServiceState:
        check_part(part)
        unit = self._units / UNIT
        answer = self._tell("show", UNIT, f"--property={SHOWN}")
        lines = (line.partition("=") for line in answer.out.splitlines())
        said = {key: value for key, _, value in lines} if answer.is_ok else {}
        pid = int(said.get("MainPID") or 0)
        return ServiceState(
            part,
            unit,
            is_installed=unit.is_file(),
            is_enabled=said.get("UnitFileState") == "enabled" or self._wanted().is_symlink(),
            is_loaded=said.get("ActiveState", "") not in IDLE,
            pid=pid or None,
            last_exit=last_exit(said),
            problem=None if answer.is_ok else str(failure("show", answer)),
            home=named_in(unit, HOME),
        )

    # --- what they are made of ---

    def _tell(self, verb: str, *arguments: str) -> Answer:
        return self._ask([self._systemctl, "--user", verb, *arguments])

    def _check(self, verb: str, answer: Answer) -> None:
        if not answer.is_ok:
            raise failure(verb, answer)

    def _done(self, verb: str, *arguments: str) -> None:
        self._check(verb, self._tell(verb, *arguments))

    def _enable(self) -> None:
        """As the unit is now: somebody may have edited it."""
        self._done("daemon-reload")
        self._done("enable", UNIT)

    def _installed(self, part: Part, *, or_loaded: bool = False) -> ServiceState:
        """Raises ServiceError where there is nothing to run, or nobody to ask.

        or_loaded  one whose unit was removed while it runs is there as well
        """
        state = self.state(part)
        if not (state.is_installed or (or_loaded and state.is_loaded)):
            hint = "mlx-worker service install"
            raise ServiceError(f"the {part} isn't installed: no {state.unit}", hint=hint)
        if state.problem:
            raise ServiceError(state.problem)
        return state

    def _wanted(self) -> Path:
        return self._units / WANTS / UNIT

    def _write(self, text: str) -> None:
        unit = self._units / UNIT
        try:
            write_whole(unit, text, mode=0o644)
        except OSError as error:
            raise cant_write(unit, error) from None

    def _link(self) -> None:
        """What enable does, where nobody can be told to do it."""
        with suppress(OSError):
            self._wanted().parent.mkdir(exist_ok=True)
            if not self._wanted().is_symlink():
                self._wanted().symlink_to(self._units / UNIT)


def check_part(part: Part) -> None:
    if part != "worker":
        hint = "the console has all of it: mlx-worker status says where"
        raise ConfigError(f"--part: {part!r}, there is one on macOS alone", hint=hint)


def is_unreachable(answer: Answer) -> bool:
    """No user manager, or no systemd at all."""
    return answer.code == MISSING or "Failed to connect to" in answer.err


def failure(verb: str, answer: Answer) -> ServiceError:
    if is_unreachable(answer):
        return ServiceError(
            f"no systemd of this user can be asked: {answer.line}",
            hint="`loginctl enable-linger` starts one without a login; where there is no systemd, "
            "as in a container, run `mlx-worker serve` itself",
        )
    return ServiceError(f"systemctl --user {verb}: {answer.line}")


def last_exit(said: dict[str, str]) -> int | None:
    status = int(said.get("ExecMainStatus") or 0)
    kinds = {EXITED: status, KILLED: -status, DUMPED: -status}
    return kinds.get(said.get("ExecMainCode", ""))


def named_in(unit: Path, what: re.Pattern[str]) -> Path | None:
    """A path in it; None: there is none."""
    try:
        found = what.search(unit.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Path(unquoted(found[1])) if found else None
