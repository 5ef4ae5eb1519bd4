"""One line of what was looked at, and looking without ever failing or hanging.

Owns the record, and that what fails or takes too long becomes a warning. Leaves what is looked at
to the files beside it. Any thread.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Level = Literal["ok", "warning", "fault"]
ASIDE = "the other lines don't depend on it; run this again"


@dataclass(frozen=True)
class Check:
    """next_step: what to do about it; None where there is nothing to do."""

    name: str
    level: Level
    value: str
    next_step: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "level": self.level,
            "value": self.value,
            "next_step": self.next_step,
        }


def ok(name: str, value: str) -> Check:
    return Check(name, "ok", value)


def warning(name: str, value: str, next_step: str) -> Check:
    return Check(name, "warning", value, next_step)


def fault(name: str, value: str, next_step: str) -> Check:
    return Check(name, "fault", value, next_step)


@dataclass(frozen=True)
class Question:
    """name: of the line where looking fails; within_s: that it may take."""

    name: str
    look: Callable[[], Sequence[Check]]
    within_s: float = 10.0


class Looking:
    """A question that is being looked at by a thread of its own, which nobody waits for at exit."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._found: Sequence[Check] | None = None
        self._thread = threading.Thread(target=self._look, name=question.name, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        try:
            self._found = self._question.look()
        except Exception as error:  # whatever it is, it is one line
            what = f"{type(error).__name__}: {error}"
            self._found = [warning(self._question.name, f"can't be told: {what}", ASIDE)]

    def checks(self) -> Sequence[Check]:
        name, within_s = self._question.name, self._question.within_s
        self._thread.join(within_s)
        if self._found is None:
            return [warning(name, f"can't be told: no answer within {within_s:g} s", ASIDE)]
        return self._found


def within(seconds: float, look: Callable[[], T], otherwise: T) -> T:
    """What look finds; otherwise, where that takes too long or fails. Nobody waits for it at exit.

    A file of a network that is gone, or a pipe in a file's place, is never read to its end.
    """
    found: list[T] = []
    question = Question("", lambda: found.append(look()) or [], seconds)
    Looking(question).checks()
    return found[0] if found else otherwise


def ask(questions: Iterable[Question]) -> Iterator[Check]:
    """All at once, so that slow ones wait together; the answers in order."""
    for looking in [Looking(question) for question in questions]:
        yield from looking.checks()
