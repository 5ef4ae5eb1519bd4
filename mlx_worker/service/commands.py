"""Running a supervisor's own command and hearing what it says. Blocking; any thread."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

ANSWERS_S = 60.0
LOOKS_S = 5.0  # for one that only tells how things are: whoever waits for that looks at a screen
LOOKS = {"show", "print", "print-disabled"}
AS_ROOT = "Try re-running the command as root for richer errors."  # a user's agent isn't root's
MISSING = 127  # as a shell has it


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def is_ok(self) -> bool:
        return self.code == 0

    @property
    def line(self) -> str:
        """What it said, in one line, without the advice that helps nobody."""
        said = (self.err.strip() or self.out.strip()).replace(AS_ROOT, "")
        return " ".join(said.split()).rstrip(".") or f"it ended with {self.code}"


def ask(command: Sequence[str], within_s: float | None = None) -> Answer:
    """Run it without a shell, in English. Never raises for what it does."""
    within_s = within_s or (LOOKS_S if LOOKS.intersection(command) else ANSWERS_S)
    environ = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        ran = subprocess.run(
            command, capture_output=True, timeout=within_s, env=environ, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return Answer(MISSING, "", f"{command[0]} didn't answer within {within_s:g} s")
    except OSError as error:
        return Answer(MISSING, "", f"{command[0]}: {error.strerror}")
    out, err = (text.decode("utf-8", "replace") for text in (ran.stdout, ran.stderr))
    return Answer(ran.returncode, out, err)
