"""Small files that are written whole or not at all, and locks between processes.

Leaves what is in them to whoever owns the file. Blocking; any thread.
"""

import fcntl
import os
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
        target = path.resolve()  # a link is kept, and the file that it names replaced
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
