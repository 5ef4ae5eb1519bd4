"""What a supervisor is to run: the program, its environment, where its output goes.

Owns that it is this environment's Python by its absolute path, without a shell, and that no key is
in it. Leaves how a supervisor is told to launchd.py and systemd.py. Blocking; any thread.
"""

import errno
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx_worker
from mlx_worker import logs
from mlx_worker.config import ENV_HOME, ENV_PREFIX, home
from mlx_worker.errors import ConfigError, ServiceError, shown
from mlx_worker.files import expanded
from mlx_worker.service.manager import Part

DRAIN_S = 30  # after SIGTERM, before SIGKILL; the worker's own limit is below it
THROTTLE_S = 10  # from one start to the next
PATHS = "/usr/bin:/bin:/usr/sbin:/sbin"
# Where the worker's files and the pulled models are, without which it would look elsewhere.
KEPT = (ENV_HOME, "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")
SUBCOMMANDS: Mapping[Part, tuple[str, ...]] = {
    "worker": ("serve", "--supervised"),
    "menubar": ("menubar",),
}
CAPTURES: Mapping[Part, str] = {"worker": logs.CAPTURE, "menubar": "menubar.log"}


@dataclass(frozen=True)
class Job:
    """program: absolute, then its arguments; capture: the file of what it prints."""

    part: Part
    program: tuple[str, ...]
    environment: Mapping[str, str]
    capture: Path


def job(part: Part, system: str = sys.platform) -> Job:
    """Of this environment and user. Raises ConfigError for a path that no unit can hold."""
    program = (os.path.abspath(sys.executable), "-m", "mlx_worker", *SUBCOMMANDS[part])
    capture = Path(os.path.abspath(logs.default_folder(system) / CAPTURES[part]))
    made = Job(part, program, {"PATH": PATHS, "PYTHONUNBUFFERED": "1", **kept()}, capture)
    for text in (*made.program, *made.environment.values(), str(capture)):
        if not text.isprintable():
            hint = "rename that folder"
            raise ConfigError(f"{shown(text)}: has a character that no unit can hold", hint=hint)
    return made


def kept() -> dict[str, str]:
    """The variables of this shell that a service needs as well, their paths absolute."""
    found = {name: os.environ[name] for name in KEPT if os.environ.get(name)}
    return {name: os.path.abspath(expanded(path)) for name, path in found.items()}


def left_out() -> list[str]:
    """The names of settings in this shell that a service won't have: one may hold a key."""
    return sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in KEPT)


def folders() -> dict[str, Path]:
    """What a service must be able to read, by what each is called."""
    named = {name: Path(path) for name, path in kept().items()}
    return {
        "this environment": Path(sys.prefix),
        "the package": Path(mlx_worker.__file__).parent,
        ENV_HOME: home(),
        **named,
    }


def check_program(program: Path | None) -> None:
    """Raises ServiceError for a unit of an environment that was removed since."""
    if program and not program.exists():
        hint = "mlx-worker service install makes it start the one of this command"
        raise ServiceError(f"what the service starts is gone: {program}", hint=hint)


def cant_write(unit: Path, error: OSError) -> ConfigError:
    """Of a folder that often isn't the user's own, since installers run as root made it."""
    folder = shlex.quote(str(unit.parent))
    hints = {
        errno.EACCES: f"if it isn't yours: sudo chown $USER {folder}",
        errno.EPERM: f"if it isn't yours: sudo chown $USER {folder}",
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some space",
    }
    hint = hints.get(error.errno or 0, f"see what is at {folder}")
    return ConfigError(f"{unit}: can't be written: {error.strerror}", hint=hint)


def make_log_folder(job: Job) -> None:
    """No supervisor does, and one whose file can't be opened starts nothing. Raises ConfigError."""
    folder = job.capture.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        job.capture.touch(mode=0o600)
    except OSError as error:
        hint = "free its disk, make it writable, or name another folder with MLX_WORKER_HOME"
        raise ConfigError(f"{folder}: can't be written: {error.strerror}", hint=hint) from None
