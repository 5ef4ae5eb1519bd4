"""The worker's logs: JSON lines in rotating files, written by a thread of their own.

Owns where lines go and how they look. Leaves what is said to the loggers of each file, which
never log a prompt, a reply or a key.

    worker.log   what the worker did: {"at", "level", "from", "text", "error"}
    access.log   one line a request, as http/front.py writes it

On a Mac they are in ~/Library/Logs/mlx-worker, where Console.app shows them, unless MLX_WORKER_HOME
names a folder: then, and elsewhere, in logs/ of the worker's folder.

A gateway on the same machine has files of its own, gateway.log and gateway-access.log: two
processes that rotate one file would lose lines.
"""

import json
import logging
import os
import queue
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path

from mlx_worker.config import ENV_HOME, home

ACCESS = "mlx_worker.access"  # the logger of the access log
# Ours, and those whose warnings would else fill a pipe that nobody reads, which stops the process.
HEARD = ("mlx_worker", "asyncio", "aiohttp")
FOLDER = "logs"
OF_WORKER = ("worker.log", "access.log")
OF_GATEWAY = ("gateway.log", "gateway-access.log")
MAX_BYTES = 5_000_000  # of a file, before a new one begins
OLD_FILES = 4
CAPTURE = "service.log"  # what a supervisor keeps of what the worker prints


def default_folder(system: str = sys.platform) -> Path:
    """Of this user's worker. It may not exist yet."""
    if system == "darwin" and not os.environ.get(ENV_HOME):
        return Path("~/Library/Logs/mlx-worker").expanduser()
    return home() / FOLDER


class JsonLines(logging.Formatter):
    """One line a record; an access line, which is JSON already, gets its time in front."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        if record.name == ACCESS:
            return json.dumps({"at": at, **json.loads(record.getMessage())})
        line = {"at": at, "level": record.levelname, "from": record.name}
        line["text"] = record.getMessage()
        if record.exc_text:
            line["error"] = record.exc_text
        return json.dumps(line, ensure_ascii=False)


class Hand(QueueHandler):
    """Hands records over as they are to be written, so that no thread waits for a file."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        if record.exc_info:
            record.exc_text = "".join(traceback.format_exception(*record.exc_info))
            record.exc_info = None
        record.msg, record.args = record.getMessage(), None
        return record


class LogFile(RotatingFileHandler):
    """A disk that takes no more is said once, on standard error, and stops nothing."""

    is_failing = False

    def emit(self, record: logging.LogRecord) -> None:
        self._has_failed = False
        super().emit(record)
        self.is_failing = self._has_failed

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._has_failed = True
        if not self.is_failing:
            with suppress(OSError):  # that may be a file on the same disk
                print(f"{self.baseFilename}: can't be written: {error.strerror}", file=sys.stderr)
        self._let_go()

    def close(self) -> None:
        self._let_go()
        super().close()

    def _let_go(self) -> None:
        """Of the file, and of what it didn't take, which would else be tried at each line."""
        stream, self.stream = self.stream, None  # pyright: ignore[reportAttributeAccessIssue]
        if stream:
            with suppress(OSError):
                stream.close()


@contextmanager
def written_to(
    folder: Path, level: int = logging.INFO, names: tuple[str, str] = OF_WORKER
) -> Iterator[None]:
    """Write the package's logs into this folder while it lasts. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    worker, access = (_file(folder / name) for name in names)
    access.addFilter(lambda record: record.name == ACCESS)
    worker.addFilter(lambda record: record.name != ACCESS)
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    listener = QueueListener(records, worker, access)
    loggers, hand = [logging.getLogger(name) for name in HEARD], Hand(records)
    before = loggers[0].level
    for logger in loggers:
        logger.addHandler(hand)
    loggers[0].setLevel(level)
    listener.start()
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(hand)
        loggers[0].setLevel(before)
        listener.stop()
        for handler in (worker, access):
            handler.close()


def _file(path: Path) -> LogFile:
    path.touch(mode=0o600, exist_ok=True)
    handler = LogFile(
        path, maxBytes=MAX_BYTES, backupCount=OLD_FILES, encoding="utf-8", errors="backslashreplace"
    )  # not every folder's name is UTF-8
    handler.setFormatter(JsonLines())
    return handler
