"""What a reply's text is made of once its markers are read: content, thinking, tool calls.

Owns the parts and the protocol of whoever tells them apart; gemma.py and marked.py do. Pure; any
thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Content:
    """What the reply says."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """What the model thought before it said it."""

    text: str


@dataclass(frozen=True)
class CallOpened:
    """A tool call began: `index` counts the reply's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A further piece of a call's arguments; all pieces of one call are one JSON object."""

    index: int
    json: str


Part = Content | Reasoning | CallOpened | CallArguments


class ReplyParser(Protocol):
    """Reads one choice's text as it comes.

    push    the parts that this text completes. marks: where in it a control token begins; None:
            wherever one is spelled, and what may become one is held back
    finish  what was held back, once the reply has ended. is_cut: not by itself, so that a call
            which is open then is not whole
    """

    def push(self, text: str, marks: Sequence[int] | None = None) -> list[Part]: ...

    def finish(self, is_cut: bool = True) -> list[Part]: ...
