"""The decision log: files of JSON lines from which every decision can be shown and replayed.

Owns the files: their names, who may write them, when a new one begins, and reading them back.
Leaves the lines to control/log.py and their looks to history.py. `hear` runs on the engine thread
and touches no file; `flush` and `close` run on any other, reading anywhere.

    <model>+<draft>-<hash>.jsonl, .jsonl.1 … .jsonl.4    a chain of files, newest first
    <model>+<draft>-<hash>.2.jsonl …                     of a second process with the same pair
    <model>+<draft>-<hash>.lock                          held by flock while its writer lives

A head begins every file, so each replays without the others. The lines hold times, counts and
settings of requests; never a prompt, a reply or an id. Files are 0600, and a folder made for them
is 0700.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import mlx_worker
from mlx_worker.config import home
from mlx_worker.control.controller import Controller
from mlx_worker.control.log import FORMAT, head, request_line
from mlx_worker.control.pacer import RequestPacer

FOLDER = "decisions"
MAX_BYTES = 8_000_000  # of a file, before the next head begins a new one
OLD_FILES = 4
OVERFULL = 4  # times MAX_BYTES: without an idle moment for a head, requests are left out from here
MAX_QUEUED = 1_000  # requests in memory for an owner that doesn't flush
MAX_WRITERS = 16  # processes that log the same pair at a time
MAX_NAME_CHARS = 60  # of a model in a file name; file systems allow 255 bytes for all of it
REQUEST_KEYS = {"number", "begun_s", "traffic", "mode", "pairs", "whole", "stops", "gain", "status"}

Line = dict[str, Any]

logger = logging.getLogger(__name__)


def default_folder() -> Path:
    return home() / FOLDER


def file_stem(model: str, draft: str | None) -> str:
    """A safe file name for a pair. The hash keeps apart what the safe characters don't."""
    names = [model, draft or "none"]
    safe = "+".join(re.sub(r"[^A-Za-z0-9._-]+", "_", name)[-MAX_NAME_CHARS:] for name in names)
    return f"{safe}-{hashlib.sha256(json.dumps(names).encode()).hexdigest()[:8]}"


def older(path: Path, n: int) -> Path:
    """The n-th older file of the chain that `path` is the newest of; 0 is `path` itself."""
    return path.with_name(f"{path.name}.{n}") if n else path


# --- writing ----------------------------------------------------------------------------------


class _Writer:
    """The newest file of a chain, locked, and open at its end. Everything may raise OSError."""

    def __init__(self, folder: Path, stem: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock, self.path = _first_free(folder, stem)
        try:
            self._file = _open_end(self.path)
        except OSError:
            os.close(self._lock)
            raise

    @property
    def n_bytes(self) -> int:
        return self._file.tell()

    def write(self, line: Line) -> None:
        left = f"{json.dumps(line, separators=(',', ':'))}\n".encode()
        while left:
            left = left[self._file.write(left) :]

    def rotate(self) -> None:
        """Go on in a new file; the oldest is dropped."""
        self._file.close()
        for n in range(OLD_FILES, 0, -1):
            with suppress(FileNotFoundError):
                older(self.path, n - 1).replace(older(self.path, n))
        self._file = _open_end(self.path)

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            os.close(self._lock)


def _first_free(folder: Path, stem: str) -> tuple[int, Path]:
    """The first chain that nobody writes: the descriptor of its lock, and its newest file."""
    for n in range(1, MAX_WRITERS + 1):
        name = stem if n == 1 else f"{stem}.{n}"
        lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock, folder / f"{name}.jsonl"
        except BlockingIOError:
            os.close(lock)
        except OSError:
            os.close(lock)
            raise
    raise OSError(errno.EBUSY, f"{MAX_WRITERS} processes log this pair already")


def _open_end(path: Path) -> FileIO:
    """To append lines; what a crash left of one is ended, so that it spoils no other."""
    file = FileIO(path, "a+", opener=lambda name, flags: os.open(name, flags, 0o600))
    os.fchmod(file.fileno(), 0o600)
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


class DecisionLog:
    """What the controller of one loaded pair decides, on its way into a file.

    facts      plain values for every head; "model" and "draft" name the pair
    now_s      unix time: the clock that the controller is given, too
    max_bytes  of a file, before the next head begins a new one

    A folder or disk that can't be written is warned of once, then nothing is logged any more.
    Next: `Controller(on_concluded=log.hear)`, `attach` it, `flush` after each reply, `close`.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        now_s: Callable[[], float] = time.time,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._folder = folder
        self._facts = {"version": mlx_worker.__version__, **facts}
        self._now_s = now_s
        self._max_bytes = max_bytes
        self._controller: Controller | None = None
        self._queue: deque[Line] = deque()
        self._has_gap = False  # a request was left out: nothing more until a head
        self._wants_head = False
        self._head: Line | None = None  # written before the next request, so that none is alone
        self._writer: _Writer | None = None
        self._is_over = False
        self._flushing = threading.Lock()

    def attach(self, controller: Controller) -> None:
        """Begin with what this controller knows; it has no request yet."""
        assert controller.is_idle, "a head stands between requests"
        self._controller = controller
        self._queue_head(controller)

    def hear(self, request: RequestPacer) -> None:
        """One request was concluded: queue its line, and a head where a file is full."""
        controller = self._controller
        assert controller is not None, "attach() the controller first"
        if self._is_over:
            return
        is_full = len(self._queue) >= MAX_QUEUED
        self._has_gap |= is_full
        if not self._has_gap:
            self._queue.append(request_line(controller, request))
        if (self._wants_head or self._has_gap) and not is_full and controller.is_idle:
            self._queue_head(controller)

    def flush(self) -> None:
        """Write what is queued. Never on the engine thread: it waits for the disk."""
        with self._flushing:
            try:
                self._write_queued()
            except OSError as failed:
                where = self._writer.path if self._writer else self._folder
                logger.warning(
                    "decision log: %s: %s; going on without it", where, failed.strerror or failed
                )
                self._end()

    def close(self) -> None:
        """Write what is queued, and let another process have the file. Safe to repeat."""
        self.flush()
        with self._flushing:
            self._end()

    def _queue_head(self, controller: Controller) -> None:
        self._queue.append(head(controller, self._facts, self._now_s()))
        self._wants_head = self._has_gap = False

    def _write_queued(self) -> None:
        while self._queue and not self._is_over:
            line = self._queue.popleft()
            if line["kind"] == "head":
                self._head, self._wants_head = line, False
                continue
            writer = self._writer or self._open()
            if self._head is not None:
                if writer.n_bytes > self._max_bytes:
                    writer.rotate()
                writer.write(self._head)
                self._head = None
            if writer.n_bytes <= OVERFULL * self._max_bytes:
                writer.write(line)
            self._wants_head = writer.n_bytes > self._max_bytes

    def _open(self) -> _Writer:
        stem = file_stem(str(self._facts.get("model")), self._facts.get("draft"))
        self._writer = _Writer(self._folder, stem)
        return self._writer

    def _end(self) -> None:
        self._is_over = True
        self._queue.clear()
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
            self._writer = None


# --- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A head and the requests after it: what control/log.py replays."""

    head: Line
    requests: list[Line] = field(default_factory=list[Line])

    @property
    def lines(self) -> list[Line]:
        return [self.head, *self.requests]


@dataclass
class History:
    """All that is kept of one pair, over loads, files and processes.

    parts      by the time of their heads, each with at least one request
    n_skipped  lines that could not be read: torn by a crash, or of another format
    """

    model: str
    draft: str | None
    parts: list[Part] = field(default_factory=list[Part])
    n_skipped: int = 0

    @property
    def latest(self) -> Part | None:
        """The part with the latest request."""
        return max(self.parts, key=lambda part: part.requests[-1]["begun_s"], default=None)


def read(folder: Path, *, has_rounds: bool = True) -> list[History]:
    """Every pair in the folder, by name; none where there is no folder.

    has_rounds  False leaves out the requests' segments, which are nearly all of the memory
    """
    found: dict[tuple[str, str | None], History] = {}
    for newest in _chains(folder):
        parts: list[Part] = []
        n_skipped = 0
        for path in (older(newest, n) for n in range(OLD_FILES, -1, -1)):
            n_skipped += _read_file(path, has_rounds, parts)
        facts = parts[0].head if parts else {}
        pair = str(facts.get("model", newest.stem)), facts.get("draft")
        history = found.setdefault(pair, History(*pair))
        history.parts += [part for part in parts if part.requests]
        history.n_skipped += n_skipped
    for history in found.values():
        history.parts.sort(key=lambda part: part.head["at_s"])
    return sorted(found.values(), key=lambda history: (history.model, history.draft or ""))


def _chains(folder: Path) -> list[Path]:
    """The newest file of every chain, also where a crash has left only older ones."""
    files = folder.glob("*.jsonl*") if folder.is_dir() else ()
    return sorted({path.with_name(re.sub(r"\.\d+$", "", path.name)) for path in files})


def _read_file(path: Path, has_rounds: bool, parts: list[Part]) -> int:
    """Add a file's parts; returns how many lines were skipped."""
    n_skipped = 0
    part: Part | None = None
    for line in _lines(path):
        if line and line.get("kind") == "head":
            part = Part(line) if line.get("format") == FORMAT and "at_s" in line else None
            parts += [part] if part else []
            n_skipped += part is None
        elif part and line and line.keys() >= REQUEST_KEYS:
            if not has_rounds:
                line.pop("segments", None)
            part.requests.append(line)
        else:
            n_skipped += 1
    return n_skipped


def _lines(path: Path) -> Iterator[Line | None]:
    """The lines of a file; None for what is none."""
    try:
        with path.open("rb") as file:
            for raw in file:
                if raw.strip():
                    yield _parsed(raw)
    except FileNotFoundError:
        return
    except OSError as failed:
        logger.warning("decision log: %s: can't be read: %s", path, failed.strerror or failed)


def _parsed(raw: bytes) -> Line | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
