"""Ids → text pieces: whole characters only, and nothing after a stop string.

Owns the text side of one reply, and the bytes of a single id. Emits raw text, markers included, and
where in it they stand; what is between them is the wire's business. Engine thread only, no arrays.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from mlx_worker.engine.markers import Follower, Kind, Markers

REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 sequence decodes to
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece spells a single byte
MAX_WAITING_IDS = 64  # no character needs so many; bounds the work that broken bytes can cause


class TextStream:
    """Turns ids into text as they come; bytes of an unfinished character wait for the rest.

    Decodes the latest few ids together with those whose text was shown last, which give them their
    context, and shows what is new. The `tokenizers` library's own DecodeStream is as fast but
    raises on bytes that are no UTF-8, or loses them, where a tokenizer falls back on byte ids.
    There such bytes change how their neighbours decode; what was shown stays.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = _decoder(tokenizer)
        self._ids: list[int] = []  # a few that were shown, then those that wait
        self._n_known = 0
        self._n_chars = 0  # of the text of self._ids, already shown

    def push(self, id: int) -> str:
        """The text that this id completed; often "" or several characters."""
        self._ids.append(id)
        text = self._decode(self._ids)
        if len(self._ids) - self._n_known < MAX_WAITING_IDS:
            whole = text.rstrip(REPLACEMENT)
        else:
            whole = text
        return self._show(whole, is_complete=whole == text)

    def finish(self) -> str:
        """What was still waiting for more bytes, as the tokenizer decodes it."""
        return self._show(self._decode(self._ids), is_complete=True)

    def _show(self, text: str, is_complete: bool) -> str:
        piece = text[self._n_chars :]
        self._n_chars += len(piece)
        if piece and is_complete:
            del self._ids[: self._n_known]
            self._n_known = len(self._ids)
            self._n_chars = len(self._decode(self._ids))
        return piece


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """The tokenizer's own decode with nothing skipped or tidied; without its wrapping if it can."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    is_plain = getattr(tokenizer.decode, "__func__", None) is PreTrainedTokenizerBase.decode
    if fast is not None and is_plain:
        return lambda ids: fast.decode(ids, skip_special_tokens=False)
    return lambda ids: tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


class ReplyText:
    """The text of one reply as its ids come; stop strings are looked for in its content alone.

    is_hit  a stop string is complete: the reply ends before it

    A stop string is never found across a marker.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], markers: Markers, is_thinking: bool = False
    ) -> None:
        self._stream = TextStream(tokenizer)
        self._cutter = StopCutter(stops)
        self._markers = markers
        self.follower = Follower(markers, is_thinking)
        self._piece = ""
        self._marks: list[int] = []

    @property
    def is_hit(self) -> bool:
        return self._cutter.hit

    def push(self, id: int) -> Kind:
        """Take the next id in; returns what it is part of."""
        is_content = self.follower.is_content
        kind = self.follower.kind(id)
        text, marker = self._stream.push(id), self._markers.texts.get(id, "")
        before = text.removesuffix(marker)
        if before or not marker:  # before a marker only bytes that were no character
            self._add(before, is_content if marker else kind == "content")
        if marker:
            self._piece += self._cutter.flush()
            self._marks.append(len(self._piece))
            self._piece += marker
        return kind

    def finish(self) -> None:
        """The reply has ended: what was held back is shown too."""
        self._add(self._stream.finish(), self.follower.is_content)
        self._piece += self._cutter.flush()

    def take(self) -> tuple[str, tuple[int, ...]]:
        """What came since the last time, and where in it a marker begins."""
        taken = self._piece, tuple(self._marks)
        self._piece, self._marks = "", []
        return taken

    def _add(self, text: str, is_content: bool) -> None:
        self._piece += self._cutter.push(text) if is_content else text


class TokenBytes:
    """The bytes that one id stands for, alone; of a control token, those of its name.

    Joined, they are the reply's text, but for a space that a tokenizer drops before the first word.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = _decoder(tokenizer)
        self._token: Callable[[int], str | None] = tokenizer.convert_ids_to_tokens
        self._known: dict[int, bytes] = {}

    def __call__(self, id: int) -> bytes:
        if id not in self._known:
            self._known[id] = self._bytes(id)
        return self._known[id]

    def _bytes(self, id: int) -> bytes:
        token = self._token(id) or ""
        if spelled := BYTE_TOKEN.fullmatch(token):
            return bytes([int(spelled[1], 16)])
        # Beside itself, because a tokenizer may drop the space before the first id of a text.
        once, twice = self._decode([id]), self._decode([id, id])
        text = twice[len(once) :]
        if REPLACEMENT in text and all(char in _byte_letters() for char in token):
            return bytes(_byte_letters()[char] for char in token)
        return text.encode()


@lru_cache(maxsize=1)
def _byte_letters() -> dict[str, int]:
    """Letter → the byte that byte-level tokenizers write with it (GPT-2's table).

    Printable bytes of Latin-1 stand for themselves, the others for the letters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + n): byte for n, byte in enumerate(others)}


class StopCutter:
    """Lets text through up to the stop string that is complete first, however the text is cut.

    Of two that end at the same character the longer one counts. What may become one is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """The part of the text that is safe to show; nothing once a stop was hit."""
        if self.hit or not self._stops:
            return "" if self.hit else piece
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)[1]]
        n_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """What was held back although no stop came of it."""
        held, self._held = self._held, ""
        return "" if self.hit else held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
