"""What a reply has said so far, so that nothing is said twice, and that its end is a whole one.

Owns that each choice begins and ends once, and that the figures of the last frame, which are those
of the usage, are the ones that the client was told. Leaves the form of each object to relay.py.
Pure; any thread.
"""

from collections.abc import Sequence
from typing import Protocol

from mlx_worker.wire.link import BrokenLink, DoneFrame, TimingPart


class BrokenReply(BrokenLink):
    """A worker wrote what is no reply; the message shows no text of it."""


class Details(Protocol):
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def reasoning_tokens(self) -> int: ...


class Turn(Protocol):
    """What one object says of one choice. is_opening: it says that the choice begins."""

    @property
    def index(self) -> int: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def is_opening(self) -> bool: ...


class Tally:
    """Of one reply with n choices. Next: take what comes, then end."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._opened: set[int] = set()
        self._ends: dict[int, str] = {}
        self._usage: tuple[int, int, int, int] | None = None
        self._timing: TimingPart | None = None

    def take(self, turns: Sequence[Turn], usage: Details | None, timing: TimingPart | None) -> None:
        """Raises BrokenReply."""
        for turn in turns:
            self._turn(turn)
        if usage is not None:
            if self._usage is not None:
                raise BrokenReply("no reply: its usage came twice")
            self._usage = figures(usage)
        if timing is not None:
            self._timing = timing

    def _turn(self, turn: Turn) -> None:
        if turn.index in self._ends:
            raise BrokenReply(f"no reply: choice {turn.index} goes on after its end")
        if turn.is_opening:
            if turn.index in self._opened:
                raise BrokenReply(f"no reply: choice {turn.index} begins twice")
            self._opened.add(turn.index)
        if turn.finish_reason is not None:
            self._ends[turn.index] = turn.finish_reason

    def end(self, done: DoneFrame) -> None:
        """Raises BrokenReply: it can't end here, or not so."""
        if len(self._ends) < self._n:
            raise BrokenReply(f"no reply: {len(self._ends)} of {self._n} choices came to an end")
        if self._usage is None or self._timing is None:
            raise BrokenReply("no reply: it says nothing of its usage or its timing")
        said = self._ends[0], self._usage, self._timing
        if said != (done.finish_reason, figures(done.usage), done.timing):
            raise BrokenReply("no reply: its last frame has other figures than the reply")


def figures(usage: Details) -> tuple[int, int, int, int]:
    return (
        usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens,
    )  # fmt: skip
