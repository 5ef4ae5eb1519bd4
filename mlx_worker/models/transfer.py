"""One file from the hub into the cache, whole or not at all, going on from whatever is there.

Owns resuming, waiting, checking and putting in place. A file is only ever seen under its name once
its bytes have the digest that the hub lists. Whoever stops in between, by Ctrl-C, a closed
generator or a lost machine, leaves a partial file that the next one goes on from. Blocking; any
thread, any process: two who want the same file take turns, and the second finds it there.

Every generator here yields how many bytes came (less than 0: some were no good), and 0 now and then
while it waits, so that whoever iterates can stop.
"""

import errno
import hashlib
import os
import time
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from filelock import Timeout
from huggingface_hub.utils import WeakFileLock

from mlx_worker.errors import HubError, HubUnreachable, NoSpace
from mlx_worker.models.cache import Cache, RepoFile, Snapshot, free_bytes, size_of
from mlx_worker.models.hub import Hub, TransferBroken

Bytes = Generator[int, None, None]

TRIES = 6  # in a row that bring nothing
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0  # between tries, doubled each time
MOST_PATIENCE_S = 300.0  # that a hub may ask for
WAKE_S = 0.25  # between two zeros while waiting
PIECE = 1 << 20  # bytes hashed at a time
SHA256_DIGITS = 64


def fetch(hub: Hub, cache: Cache, snapshot: Snapshot, file: RepoFile) -> Bytes:
    """Bring a file into its snapshot. One that is there is checked, and mended if it is broken.

    Raises NoSpace, HubUnreachable, HubError, GatedModel, ModelNotFound.
    """
    blob = cache.blob(snapshot.repo, file)
    try:
        with ExitStack() as stack:
            yield from _taken(stack, cache.lock(snapshot.repo, file))
            if not (yield from is_right(blob, file)):
                partial = cache.partial(snapshot.repo, file)
                yield min(size_of(partial) or 0, file.size) - cache.n_bytes(snapshot.repo, file)
                yield from _download(hub, snapshot, file, partial)
                partial.replace(blob)  # only now: whatever is there may be in use
            cache.link(snapshot, file)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        left = file.size - cache.n_bytes(snapshot.repo, file)
        raise NoSpace(cache.folder, need_bytes=left, free_bytes=free_bytes(cache.folder)) from error


def _taken(stack: ExitStack, lock: Path) -> Bytes:
    """Wait for the lock that every program takes for the same file."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            stack.enter_context(WeakFileLock(lock, timeout=WAKE_S))
        except Timeout:
            yield 0
        else:
            return


def _download(hub: Hub, snapshot: Snapshot, file: RepoFile, partial: Path) -> Bytes:
    """Fill the partial file, check it, and once more from its start if it is not what is listed."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.is_symlink():  # not one of ours: what it names isn't either
        partial.unlink()
    for _ in range(2):
        with partial.open("ab", buffering=0) as out:
            yield from _fill(hub, snapshot, file, out)
            os.fsync(out.fileno())
        if (yield from is_right(partial, file)):
            return
        partial.unlink()
        yield -file.size
    raise HubError(
        f"{snapshot.repo}: {file.name} came twice with other bytes than the hub lists",
        hint="a proxy may change what passes it; try another network",
    )


def _fill(hub: Hub, snapshot: Snapshot, file: RepoFile, out: BinaryIO) -> Bytes:
    """Append what is missing. Raises HubUnreachable after TRIES that brought nothing."""
    n_fruitless = 0
    if out.tell() > file.size:
        yield from _cut(out, 0)
    while (have := out.tell()) < file.size:
        try:
            yield from _append(hub, snapshot, file, out)
            broken = TransferBroken("it ended too soon")
        except TransferBroken as error:
            broken = error
        except HubUnreachable as error:
            broken = TransferBroken(error.message)
        if out.tell() >= file.size:
            return
        n_fruitless = 0 if out.tell() > have else n_fruitless + 1
        if n_fruitless == TRIES:
            raise HubUnreachable(
                f"{snapshot.repo}: {file.name} stays at {have:,} of {file.size:,} bytes: {broken}",
                hint="the same command goes on from there",
            ) from broken
        yield from _wait(broken.wait_s, n_fruitless)


def _append(hub: Hub, snapshot: Snapshot, file: RepoFile, out: BinaryIO) -> Bytes:
    have = out.tell()
    with hub.open(snapshot, file, have) as reply:
        if reply.first < have:
            yield from _cut(out, reply.first)
        for piece in reply.pieces:
            piece = piece[: file.size - out.tell()]
            while piece:  # a disk that is nearly full takes less than it is given
                n = out.write(piece)
                yield n
                piece = piece[n:]
            if out.tell() >= file.size:
                return


def _cut(out: BinaryIO, size: int) -> Bytes:
    """Forget bytes that are no good or come again."""
    gone = out.tell() - size
    out.truncate(size)
    out.seek(size)
    yield -gone


def _wait(asked_s: float | None, n_fruitless: int) -> Bytes:
    wait_s = min(FIRST_WAIT_S * 2**n_fruitless, LONGEST_WAIT_S) if n_fruitless else 0.0
    if asked_s is not None:
        wait_s = max(wait_s, min(asked_s, MOST_PATIENCE_S))
    until = time.monotonic() + wait_s
    while (left := until - time.monotonic()) > 0:
        yield 0
        time.sleep(min(left, WAKE_S))


def is_right(path: Path, file: RepoFile) -> Generator[int, None, bool]:
    """Whether it is there, and its bytes have the digest that the hub lists."""
    try:
        return (yield from _has_digest(path, file))
    except FileNotFoundError:  # a removal of another model took it along meanwhile
        return False


def _has_digest(path: Path, file: RepoFile) -> Generator[int, None, bool]:
    """Raises FileNotFoundError where it vanishes."""
    if size_of(path) != file.size:
        return False
    if len(file.digest) == SHA256_DIGITS:
        found = hashlib.sha256()
    else:
        found = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as content:
        while piece := content.read(PIECE):
            found.update(piece)
            yield 0
    return found.hexdigest() == file.digest
