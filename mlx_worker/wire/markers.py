"""Text as it comes → the control tokens in it, and the text between them.

Owns what counts as a marker: a control token that was written as one, or, where nobody can tell,
every text that spells one. Leaves what they mean to channels.py and its kinds. Pure; any thread.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

Item = tuple[bool, str]  # (is a marker, its letters); never empty
NOTHING = re.compile(r"(?!)")


class Splitter:
    """Tells the markers of one reply from its text, however that is cut."""

    def __init__(self, markers: Iterable[str]) -> None:
        self._marker, self._spelled = patterns(frozenset(filter(None, markers)))
        self._held = ""

    def split(self, text: str, marks: Sequence[int] | None = None) -> Iterator[Item]:
        """The items of a further piece of text.

        marks  where in it a control token begins; None: wherever one is spelled, and what may
               become one is held back
        """
        if marks is None:
            return self._split_spelled(self._spelled, self._take_held() + text)
        return self._split_marked(text, marks)

    def finish(self) -> Iterator[Item]:
        """The items of what was held back, once nothing follows."""
        return self._split_spelled(self._marker, self._take_held())

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held

    def _split_spelled(self, pattern: re.Pattern[str], text: str) -> Iterator[Item]:
        at = 0
        for found in pattern.finditer(text):
            if found.start() > at:
                yield False, text[at : found.start()]
            at = found.end()
            if found.lastgroup == "begun":
                self._held = found[0]
            else:
                yield True, found[0]
        if at < len(text):
            yield False, text[at:]

    def _split_marked(self, text: str, marks: Sequence[int]) -> Iterator[Item]:
        if held := self._take_held():
            yield False, held
        at = 0
        for mark in marks:
            found = self._marker.match(text, mark)
            if found:
                if mark > at:
                    yield False, text[at:mark]
                yield True, found[0]
                at = found.end()
        if at < len(text):
            yield False, text[at:]


@lru_cache(maxsize=64)
def patterns(markers: frozenset[str]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """(a marker, a marker or at the text's end the beginning of one); the longest counts."""
    if not markers:
        return NOTHING, NOTHING
    longest_first = sorted(markers, key=lambda marker: (-len(marker), marker))
    whole = "|".join(map(re.escape, longest_first))
    begun = "|".join(beginnings(marker) for marker in longest_first if len(marker) > 1) or "(?!)"
    return re.compile(whole), re.compile(rf"(?P<begun>(?:{begun})\Z)|{whole}")


def beginnings(marker: str) -> str:
    """A pattern of all that it may begin with, itself excepted: `abc` → `a(?:b)?`."""
    pattern = ""
    for letter in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(letter)}{pattern})?"
    return re.escape(marker[0]) + pattern
