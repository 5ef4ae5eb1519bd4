"""A reply's items → content and thinking; what all families of models have in common.

Owns what is told of a reply, in order, and which white space of it: none before, between and after
calls that stands alone there, no line ends around thinking. Leaves the reading of calls to
gemma.py and marked.py, and which text is a marker to markers.py. Pure; any thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from mlx_worker.records import TextProtocol, Tools
from mlx_worker.wire.markers import Item, Splitter
from mlx_worker.wire.parts import CallArguments, CallOpened, Content, Part, Reasoning

Mode = Literal["content", "thinking", "call", "ignored"]


class Told:
    """The parts of one reply, as they become certain.

    may_call   calls may come, so white space waits until it is known to be between visible texts
    max_calls  further ones are dropped; None: there may be any number
    """

    def __init__(self, may_call: bool, max_calls: int | None = None) -> None:
        self._may_call = may_call
        self._max_calls = max_calls
        self._parts: list[Part] = []
        self._n_calls = 0
        self._kept: list[str] = []  # white space after content that a call followed
        self._space: list[str] = []  # white space since visible content, or since the last call
        self._is_visible = False  # something was, since the last call
        self._after_thinking = False
        self._n_line_ends = 0  # at the end of the thinking so far
        self._has_thought = False

    def say(self, text: str) -> None:
        """Content."""
        if self._after_thinking:
            text = text.lstrip("\n")
            self._after_thinking = not text
        visible = text.rstrip() if self._may_call else text
        if visible:
            self._parts.append(Content("".join((*self._kept, *self._space, visible))))
            self._kept, self._space, self._is_visible = [], [], True
        if len(visible) < len(text):
            self._space.append(text[len(visible) :])

    def think(self, text: str) -> None:
        """Thinking; line ends wait until more of it follows."""
        text = text if self._has_thought else text.lstrip("\n")
        visible = text.rstrip("\n")
        if visible:
            self._parts.append(Reasoning("\n" * self._n_line_ends + visible))
            self._n_line_ends, self._has_thought = 0, True
        self._n_line_ends += len(text) - len(visible)

    def open_thinking(self) -> None:
        """A further thought is on the line after the last."""
        self._n_line_ends = int(self._has_thought)

    def close_thinking(self) -> None:
        self._after_thinking = True

    def open_call(self, name: str) -> None:
        if self._is_visible:
            self._kept += self._space
        self._space, self._is_visible, self._after_thinking = [], False, False
        self._n_calls += 1
        if not self._is_surplus:
            self._parts.append(CallOpened(self._n_calls - 1, name))

    def argue(self, json: str) -> None:
        """A further piece of the last call's arguments."""
        if json and not self._is_surplus:
            self._parts.append(CallArguments(self._n_calls - 1, json))

    @property
    def _is_surplus(self) -> bool:
        return self._max_calls is not None and self._n_calls > self._max_calls

    def take(self) -> list[Part]:
        """What is new."""
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """What is new now that nothing follows."""
        if self._space and not self._n_calls:
            self._parts.append(Content("".join(self._space)))
        self._kept, self._space = [], []
        return self.take()

    def forget(self) -> None:
        """The same state, but as if nothing had been said."""
        self._parts, self._kept, self._space, self._n_line_ends = [], [], [], 0


class ChannelReader(ABC):
    """Reads one reply; a kind of it says how its calls are written.

    tools  that were offered; None: there are none, so nothing is a call
    """

    def __init__(
        self, protocol: TextProtocol, tools: Tools | None, further_markers: Iterable[str] = ()
    ) -> None:
        self._thinking = protocol.thinking or ("", "")
        self._call = protocol.call or ("", "")
        self._can_call = tools is not None and bool(self._call[0])
        self._told = Told(self._can_call, None if tools is None or tools.is_parallel else 1)
        self._mode: Mode = "content"
        self._splitter = Splitter(
            (*self._thinking, *self._call, *protocol.others, *further_markers)
        )

    def open(self, opening: str) -> None:
        """Read what the prompt leaves open; before the reply, which it is no part of."""
        self._read(self._splitter.split(opening))
        self._read(self._splitter.finish())
        self._told.forget()

    def push(self, text: str, marks: Sequence[int] | None = None) -> list[Part]:
        self._read(self._splitter.split(text, marks))
        return self._told.take()

    def finish(self, is_cut: bool = True) -> list[Part]:
        self._read(self._splitter.finish())
        if is_cut:
            self._cut()
        else:
            self._leave()
        return self._told.finish()

    def _read(self, items: Iterator[Item]) -> None:
        for is_marker, piece in items:
            if is_marker:
                self._read_marker(piece)
            else:
                self._read_text(piece)

    def _read_marker(self, marker: str) -> None:
        """A marker that means nothing here is dropped."""
        if marker == self._thinking[0]:
            self._enter("thinking")
            self._told.open_thinking()
        elif marker == self._thinking[1] and self._mode == "thinking":
            self._enter("content")
            self._told.close_thinking()
        elif marker == self._call[0] and self._can_call:
            self._enter("call")
        elif marker == self._call[1] and self._mode == "call":
            self._enter("content")

    def _enter(self, mode: Mode) -> None:
        self._leave()
        self._mode = mode

    def _read_text(self, text: str) -> None:
        at = 0
        while at < len(text):
            at = self._step(text, at)

    def _step(self, text: str, at: int) -> int:
        """Read on from there; how far that went, in the mode that the text before it left."""
        match self._mode:
            case "content":
                return self._read_content(text, at)
            case "thinking":
                return self._read_thinking(text, at)
            case "call":
                return self._read_call(text, at)
            case "ignored":
                return len(text)

    def _read_content(self, text: str, at: int) -> int:
        self._told.say(text[at:])
        return len(text)

    def _read_thinking(self, text: str, at: int) -> int:
        self._told.think(text[at:])
        return len(text)

    @abstractmethod
    def _read_call(self, text: str, at: int) -> int: ...

    @abstractmethod
    def _leave(self) -> None:
        """The mode ends: tell what it held back."""

    def _cut(self) -> None:
        """The reply was cut off: tell what its mode held back."""
        self._leave()
