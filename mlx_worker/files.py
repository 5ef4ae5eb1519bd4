"""Small files that are written whole or not at all, and locks between processes.

Leaves what is in them to whoever owns the file. Blocking; any thread.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkstemp
from typing import IO


def write_whole(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace a file by one with this text; whatever happens on the way, it is the old or the new.

    mode  of a file that is not there yet; an existing one keeps its own

    Raises OSError; the file is as it was then.
    """
    draft = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = _target(path)
        number, draft = mkstemp(".new", target.stem, target.parent)  # nobody else's
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(draft, target.stat().st_mode & 0o777 if target.exists() else mode)
        os.replace(draft, target)
    finally:
        if draft is not None:
            Path(draft).unlink(missing_ok=True)


def _target(path: Path) -> Path:
    """What is replaced: a link is kept, and the file that it names replaced. Raises OSError."""
    try:
        return path.resolve()
    except RuntimeError:  # before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None


def expanded(path: str | Path) -> Path:
    """With ~ and ~name as the folders that they mean; as it is where no such user is known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def read_small(path: Path, max_bytes: int) -> bytes:
    """A file's content, without waiting: of what is no file, or too long for one, there is none.

    Raises OSError.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(path))
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that `path` stands for, waiting for whoever holds it; it ends with its holder.

    Raises OSError where the file can't be made.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def try_lock(path: Path) -> IO[str] | None:
    """The same lock without waiting: None where someone holds it. Closing what is returned ends it.

    Raises OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def is_locked(path: Path) -> bool:
    """Whether its holder is alive. Those who ask don't see each other."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
