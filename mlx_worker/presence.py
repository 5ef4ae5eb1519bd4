"""One `serve` as others on this machine see it: its lock, its logs, its state, its exit code.

Owns that a folder has one worker, and what becomes of an error that ends it. Leaves the file to
state.py, the serving to worker.py. Blocking; main thread, say() any thread.

What ends it                             At a terminal        Under a supervisor
  it is told to stop                     0                    0
  an error that a restart can't mend     2, by the caller     0, or it would be started for ever
  its engine is lost                     70, by worker.py     70
  a bug                                  a traceback, 1       a traceback, 1, also in the log
"""

import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import FrameType
from typing import IO, Any, NoReturn

from mlx_worker import __version__, logs
from mlx_worker.config import ENV_HOME, home
from mlx_worker.errors import ConfigError, ModelError
from mlx_worker.files import try_lock, write_whole
from mlx_worker.state import Phase, WorkerState, default_path, is_alive, lock_path, own, read, write

log = logging.getLogger(__name__)

UNWRITABLE = f"make it writable, free its disk, or name another folder with {ENV_HOME}"
LOCK_S = 0.5  # whoever looks holds the lock for a moment
POLL_S = 0.05
MAX_CAPTURE_BYTES = 1_000_000
KEPT_BYTES = 250_000  # of its end, in service.log.1
# A disk or a folder that no restart mends. EIO isn't here: it may pass.
LASTING = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG),
    *(errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
)


def attended(
    work: Callable[["Presence"], int], *, is_supervised: bool, talk: Callable[[str], None]
) -> int:
    """Do the work of a worker; returns the exit code.

    Raises ConfigError, ModelError where nobody supervises it.
    """
    presence = Presence(is_supervised=is_supervised)
    try:
        with presence.taken(), logged(presence):
            code = _worked(work, presence)
        if presence.is_stuck:
            os._exit(code)
        return code
    except (ConfigError, ModelError) as error:
        if not is_supervised:
            raise
        talk(f"mlx-worker: {error}")
        return 0


def _worked(work: Callable[["Presence"], int], presence: "Presence") -> int:
    try:
        with told_to_stop():
            code = work(presence)
    except (ConfigError, ModelError, OSError) as error:
        lasting = lasting_error(error)
        if lasting is None:
            _say_bug(presence, error)
            raise
        log.error("ended: %s", lasting)
        presence.say("refused", error=str(lasting))
        raise lasting from None
    except (KeyboardInterrupt, SystemExit):
        presence.say("stopped")
        raise
    except Exception as bug:
        _say_bug(presence, bug)
        raise
    presence.say("stopped")
    return code


def _say_bug(presence: "Presence", bug: Exception) -> None:
    log.critical("ended by a bug", exc_info=bug)
    what = f"ended by a bug: {type(bug).__name__}: {bug}"
    if isinstance(bug, MemoryError):
        what = "ended for lack of memory: a smaller model, or fewer other programs, would help"
    presence.say("lost", error=what)


def lasting_error(error: Exception) -> ConfigError | ModelError | None:
    """The error in words, if it is one that a restart can't mend."""
    if isinstance(error, ConfigError | ModelError):
        return error
    if isinstance(error, OSError) and error.errno in LASTING:
        where = str(error.filename or home())
        return ConfigError(f"{where}: can't be used: {error.strerror}", hint=UNWRITABLE)
    return None


def unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path}: can't be written: {error.strerror}", hint=UNWRITABLE)


@contextmanager
def logged(presence: "Presence") -> Iterator[None]:
    """Write the logs meanwhile. Raises ConfigError."""
    folder = logs.default_folder()
    with ExitStack() as stack:
        try:
            stack.enter_context(logs.written_to(folder))
            bound_capture(folder / logs.CAPTURE)
        except OSError as error:
            refused = unwritable(folder, error)
            presence.say("refused", error=str(refused))
            raise refused from None
        yield


@contextmanager
def told_to_stop() -> Iterator[None]:
    """SIGTERM ends it cleanly also before worker.py listens: the model library takes its time."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)


def bound_capture(file: Path) -> None:
    """Shorten what a supervisor kept of earlier starts, in place: it goes on writing there.

    Raises OSError.
    """
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        return
    if size <= MAX_CAPTURE_BYTES:
        return
    with file.open("rb") as opened:
        opened.seek(size - KEPT_BYTES)
        kept = opened.read().partition(b"\n")[2]
    write_whole(file.with_name(f"{file.name}.1"), kept.decode("utf-8", "replace"))
    os.truncate(file, 0)


class Presence:
    """The worker of this folder as others see it: its lock, and what it says in state.json.

    A folder that can't be written later on stops nothing but the saying.

    is_failing  what was said last could not be written
    is_stuck    the process must not wait for its threads
    """

    def __init__(self, *, is_supervised: bool = False) -> None:
        self._said = own("starting", __version__, is_supervised=is_supervised)
        self._lock: IO[str] | None = None
        self.is_failing = False
        self._saying = Lock()
        self.is_stuck = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Be the worker of the folder meanwhile.

        Raises ConfigError: a worker runs here already, or nothing can be written here.
        """
        with self._locked() as self._lock:
            before = read()
            if before is not None and before.phase == "lost":  # why it is started again
                self._said = replace(self._said, error=before.error)
            try:
                write(self._said)
            except OSError as error:
                raise unwritable(default_path(), error) from None
            try:
                yield
            finally:
                self._lock = None

    def _locked(self) -> IO[str]:
        self._check_unlocked()
        until_s = time.monotonic() + LOCK_S
        while (lock := self._try_lock()) is None:
            if time.monotonic() >= until_s:
                raise _taken(read())
            time.sleep(POLL_S)
        return lock

    def _check_unlocked(self) -> None:
        """That no worker runs whose lock somebody removed. Raises ConfigError."""
        said = read()
        if said is None or said.pid == os.getpid() or lock_path().exists():
            return
        if is_alive(said):
            raise _taken(said)

    def _try_lock(self) -> IO[str] | None:
        try:
            return try_lock(lock_path())
        except OSError as error:
            raise unwritable(lock_path(), error) from None

    def say(self, phase: Phase | None = None, **fields: Any) -> None:
        """Write it down, if this is the worker of the folder.

        phase   None: as it was said
        fields  of WorkerState that changed; the others stay as they were said
        """
        with self._saying:
            if self._lock is None:
                return
            phase = phase or self._said.phase
            self._said = replace(self._said, phase=phase, at_s=time.time(), **fields)
            self._write()

    def _write(self) -> None:
        try:
            write(self._said)
            self.is_failing = False
        except OSError as error:
            if not self.is_failing:
                log.error("%s: can't be written: %s", default_path(), error.strerror)
            self.is_failing = True


def _taken(said: WorkerState | None) -> ConfigError:
    who = ""
    if said is not None and is_alive(said):
        who = f": pid {said.pid}" + (f", {said.address}" if said.address else "")
    how = "`mlx-worker service stop`" if said and said.is_supervised else "Ctrl-C where it runs"
    return ConfigError(
        f"{home()}: a worker runs here already{who}",
        hint=f"mlx-worker status shows it; end it with {how}, "
        f"or name another folder with {ENV_HOME}",
    )
