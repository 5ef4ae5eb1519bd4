"""state.json: what the worker of this folder last said of itself, for whoever looks, also later.

Owns the file, and that a process which is gone isn't taken for one that runs. Leaves to worker.py
when something is said, to local.py what is true now. Blocking; any thread.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from mlx_worker.config import home
from mlx_worker.files import is_locked, read_small, write_whole

FILE = "state.json"
LOCK = "worker.lock"  # held by the worker of this folder as long as it lives
MAX_BYTES = 1_000_000
LATEST_S = 4e9  # after which no clock of today is; dates end somewhere
SAME_S = 2.0  # by which two readings of when a process began may differ

Phase = Literal["starting", "ready", "draining", "stopped", "refused", "lost"]
PHASES: tuple[str, ...] = get_args(Phase)


@dataclass(frozen=True)
class WorkerState:
    """phase: refused: an error that a restart can't mend; lost: it ended by a failure of its own.

    pid, process_s  of the process, and when it began (unix seconds), since numbers are used again
    at_s            when this was said, unix seconds
    address         of the console: http://127.0.0.1:8321/
    error           what ended it or refused its start; while it is starting, what ended the one
                    before by a failure; None: nothing did
    models          (id, text of its speculation or None) as last seen
    """

    phase: Phase
    pid: int
    process_s: float
    at_s: float
    version: str
    address: str | None = None
    error: str | None = None
    is_supervised: bool = False
    models: tuple[tuple[str, str | None], ...] = ()


def default_path() -> Path:
    return home() / FILE


def lock_path() -> Path:
    return home() / LOCK


def own(phase: Phase, version: str, **fields: Any) -> WorkerState:
    """What this process says of itself now."""
    pid = os.getpid()
    return WorkerState(phase, pid, began_s(pid) or 0.0, time.time(), version, **fields)


def write(state: WorkerState, path: Path | None = None) -> None:
    """Raises OSError; the file is as it was then."""
    write_whole(path or default_path(), json.dumps(asdict(state), indent=2) + "\n")


def read(path: Path | None = None) -> WorkerState | None:
    """None: nothing was said yet, or it can't be understood. Keys of a later version are left."""
    return look_up(path)[0]


def look_up(path: Path | None = None) -> tuple[WorkerState | None, str | None]:
    """What was said, and, where something is there that can't be understood, why."""
    file = path or default_path()
    try:
        return _state(json.loads(read_small(file, MAX_BYTES))), None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{file}: can't be read: {error.strerror}"
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None, f"{file}: can't be understood; the next start of the worker writes it anew"


def _state(values: Mapping[str, Any]) -> WorkerState:
    """Raises ValueError, TypeError, KeyError, OverflowError.

    A phase of a later version counts as stopped: while its process is there, that is asked.
    """
    phase = values["phase"]
    return WorkerState(
        phase if phase in PHASES else "stopped",
        int(values["pid"]),
        _seconds(values["process_s"]),
        _seconds(values["at_s"]),
        str(values["version"]),
        _text(values.get("address")),
        _text(values.get("error")),
        bool(values.get("is_supervised", False)),
        _models(values.get("models")),
    )


def _seconds(value: Any) -> float:
    if not 0 <= (seconds := float(value)) <= LATEST_S:  # nor NaN
        raise ValueError(value)
    return seconds


def _models(value: object) -> tuple[tuple[str, str | None], ...]:
    """Of another version's form: none."""
    try:
        return tuple((str(id), _text(speculation)) for id, speculation in value)  # type: ignore
    except (TypeError, ValueError):
        return ()


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def began_s(pid: int) -> float | None:
    """When this process began, unix seconds; None: there is none, or it isn't told."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except (psutil.Error, ValueError, OverflowError):
        return None


def is_alive(state: WorkerState) -> bool:
    """Whether the very process that said this is still there, as the worker of this folder.

    The lock tells, also where a clock was set meanwhile, which moves every process's beginning, and
    where this is the copy of another folder. Without a lock to look at, the beginning does.
    """
    began = began_s(state.pid)
    if began is None:
        return False
    held = _lock_says()
    return abs(began - state.process_s) < SAME_S if held is None else held


def is_held() -> bool:
    """Whether a worker of this folder lives, whatever it said of itself."""
    return _lock_says() is True


def _lock_says() -> bool | None:
    """Whether it is held; None: somebody removed it, or it can't be looked at."""
    try:
        return is_locked(lock_path()) or (False if lock_path().exists() else None)
    except OSError:
        return None
