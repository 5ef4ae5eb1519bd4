"""Ids → text pieces: whole characters only, and nothing after a stop string.

Owns the text side of one reply. Emits raw text, markers included; what the markers mean is the
wire's business. Engine thread only, no arrays.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


class TextStream:
    """Turns ids into text as they come; bytes of an unfinished character wait for the rest.

    Uses the `tokenizers` library's DecodeStream, and the tokenizer's own `decode` once at the end
    for what is still waiting then.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._emitted = ""

    def push(self, id: int) -> str:
        """The text that this id completed; often "" or several characters."""
        self._ids.append(id)
        if self._fast is None:
            return self._slow_push()
        piece = self._stream.step(self._fast, id) or ""
        self._emitted += piece
        return piece

    def finish(self) -> str:
        """What was still waiting for more bytes, as the tokenizer decodes it."""
        whole = self._decode()
        rest = whole[len(self._emitted) :] if whole.startswith(self._emitted) else ""
        self._emitted += rest
        return rest

    def _slow_push(self) -> str:
        whole = self._decode().rstrip(REPLACEMENT)
        piece = whole[len(self._emitted) :]
        self._emitted += piece
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(
            self._ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


class StopCutter:
    """Lets text through up to the earliest stop string, holding back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """The part of the text that is safe to show; nothing once a stop was hit."""
        if self.hit or not self._stops:
            return "" if self.hit else piece
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)]
        n_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def finish(self) -> str:
        """What was held back although no stop came of it."""
        held, self._held = self._held, ""
        return "" if self.hit else held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
