"""What the commands of the command line share: talking, and reading what they are given.

Standard output carries data, standard error the talk. Main thread.
"""

import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from mlx_worker.errors import ConfigError


def talk(line: str) -> None:
    """One line on standard error, whatever line breaks it came with.

    Where that can't be written, as in a file on a full disk, nobody can be told of it either.
    """
    with suppress(OSError):
        print(" ".join(line.split()), file=sys.stderr, flush=True)


def speak_anyhow() -> None:
    """What the terminal's encoding doesn't have is written as an escape, and ends no command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def load_config() -> Any:
    from mlx_worker.config import load

    return load()


def words(text: str | None) -> list[str] | None:
    """`a, b` → [a, b]; None stays None."""
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def check_writable(flag: str, file: Path | None) -> None:
    """Fail before the minutes of measuring, not after them; leaves no file that was not there."""
    if file is None:
        return
    is_new = not file.exists()
    try:
        file.open("ab").close()
    except OSError as error:
        raise ConfigError(
            f"{flag}: {file} can't be written: {error.strerror}", hint="name another file"
        ) from error
    if is_new:
        file.unlink()
