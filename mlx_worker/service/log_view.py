"""The worker's logs as a person reads them: the last lines, and those that come.

Owns finding them across rotation, and how a line looks. Leaves writing them to logs.py. Blocking;
any thread.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

POLL_S = 0.25
APART_S = 2.0  # a capture that is this much newer than the log has what never got into it


def last_lines(path: Path, n: int) -> list[str]:
    """Also of the file before this one, where this one is shorter. Raises OSError but for none."""
    found: deque[str] = deque(maxlen=n)
    for each in (path.with_name(f"{path.name}.1"), path):
        try:
            with each.open(encoding="utf-8", errors="replace") as file:
                found.extend(line.rstrip("\n") for line in file)
        except FileNotFoundError:
            continue
    return list(found)


def is_newer(capture: Path, log: Path) -> bool:
    """Whether something was printed after the last line of the log, or instead of it."""
    try:
        printed = capture.stat()
    except OSError:
        return False
    try:
        written = log.stat()
    except OSError:
        return printed.st_size > 0
    is_later = printed.st_mtime > written.st_mtime + APART_S or not written.st_size
    return printed.st_size > 0 and is_later


def follow(path: Path, wait: Callable[[], object] = lambda: time.sleep(POLL_S)) -> Iterator[str]:
    """Lines as they are written from now on, for ever: across a new file, and a truncated one."""
    file = _opened(path)
    began = b""
    try:
        if file:
            file.seek(0, os.SEEK_END)
        while True:
            is_replaced = file is None or not _is_same(path, file)
            for piece in _new(file) if file else ():
                began += piece
                if began.endswith(b"\n"):
                    yield began.decode("utf-8", "replace").rstrip("\n")
                    began = b""
            newer = _opened(path) if is_replaced else None
            if newer is None:
                wait()
                continue
            if file:
                file.close()
            file, began = newer, b""
    finally:
        if file:
            file.close()


def _opened(path: Path) -> IO[bytes] | None:
    """None: it isn't there, or something is that can't be read; whoever follows waits."""
    try:
        return path.open("rb")
    except OSError:
        return None


def _is_same(path: Path, file: IO[bytes]) -> bool:
    try:
        return path.stat().st_ino == _stat(file).st_ino
    except OSError:
        return True  # it is being renamed; the next one will be there


def _new(file: IO[bytes]) -> Iterator[bytes]:
    if _stat(file).st_size < file.tell():
        file.seek(0)
    return iter(file.readline, b"")


def _stat(file: IO[bytes]) -> os.stat_result:
    return os.fstat(file.fileno())


# --- how a line looks -------------------------------------------------------------------------


def readable(line: str) -> str:
    """`2026-12-01 09:30:12 ERROR text`, in this machine's time; as it is where it isn't ours."""
    try:
        record = json.loads(line)
        at = datetime.fromisoformat(record["at"]).astimezone()
    except (ValueError, KeyError, TypeError):
        return line
    shown = f"{at:%Y-%m-%d %H:%M:%S}"
    if "path" in record:
        return f"{shown} {access(record)}"
    text = f"{shown} {record.get('level', ''):7} {record.get('text', '')}"
    return f"{text}\n{record['error'].rstrip()}" if record.get("error") else text


def access(record: dict[str, Any]) -> str:
    """`POST /v1/chat/completions 200 812 ms`"""
    words = [record.get(key) for key in ("method", "path", "status")]
    took = f"{record['ms']:.0f} ms" if isinstance(record.get("ms"), int | float) else ""
    return " ".join([*(str(word) for word in words if word is not None), took]).rstrip()
