"""One reply under a grammar: what may come next, after any drafts, from its first id to its last.

Owns when the grammar holds: not while the reply thinks, and no more once it calls a tool by itself.
Leaves compiled grammars and masks to grammar.py, picking to sample.py. Engine thread only.

    before    nothing is written: the grammar, or the marker that opens thinking or a tool call
    thinking  anything, until the marker that closes it, or opens a tool call where one may come
    content   the grammar from its beginning, or the marker that opens a tool call
    watching  anything; from a marker that opens a tool call on, the grammar
    active    the grammar
    calling   the grammar of tool calls that stand in its place
    free      anything, to the reply's end: such calls where nothing holds them
    ended     nothing
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from llguidance import LLMatcher

from mlx_worker.engine.grammar import Bits, GrammarTables, bits_of, has
from mlx_worker.engine.structure import first_line
from mlx_worker.errors import GenerationFailed
from mlx_worker.records import Grammar

Place = Literal["before", "thinking", "content", "watching", "active", "calling", "free", "ended"]
HELD: tuple[Place, ...] = ("active", "calling")
ANYTHING: tuple[Place, ...] = ("thinking", "watching", "free", "ended")


class Constraint:
    """Follows one reply."""

    def __init__(
        self,
        tables: GrammarTables,
        grammar: Grammar,
        *,
        think_open: int | None = None,
        think_close: int | None = None,
        call_open: int | None = None,
        is_thinking: bool = False,
        may_think: bool = False,
    ) -> None:
        """
        think_open, think_close, call_open  ids of the markers; None: the model has none
        is_thinking  the prompt left thinking open
        may_think    the reply may open it

        Raises RequestError where the grammar can't be followed with this tokenizer.
        """
        self._tables = tables
        self._matcher = tables.matcher(grammar.text)
        self._calls = None if grammar.calls is None else tables.matcher(grammar.calls)
        may_open = (may_think or grammar.is_optional) and think_close is not None
        self._think_open = think_open if may_open else None
        self._think_close = think_close
        self._call_open = call_open if grammar.may_call or grammar.is_optional else None
        self._opens_call = call_open if grammar.is_call else self._call_open  # in thinking, too
        self._ended_whole = False
        self._unheld: Place = "watching" if grammar.is_optional else "content"
        self._place: Place = self._unheld
        if self._think_open is not None and not grammar.is_optional:
            self._place = "before"
        if is_thinking and think_close is not None:
            self._place = "thinking"

    @property
    def is_complete(self) -> bool:
        """Whether the reply is whole if it ends here; of one that has ended, whether it was."""
        if self._place == "ended":
            return self._ended_whole
        if self._place in HELD:
            return self._matcher_at(self._place).is_accepting()
        return self._place in ("free", "watching")

    @property
    def may_go_on(self) -> bool:
        """Whether the document could still be another one, such as a number with more digits."""
        return self._place == "active" and not self._matcher.is_stopped()

    def rows(self, draft_ids: Sequence[int] = ()) -> tuple[int, Bits | None]:
        """What may follow the reply, and follow it with each of its drafts; nothing is kept.

        Returns (n, bits): the first n drafts are legal, the last of them perhaps an end; bits
        (n + 1, words) has in row j what may follow draft_ids[:j], None where that is anything in
        each row. Raises GenerationFailed where the grammar ran into a limit.
        """
        place = self._place
        fed: list[LLMatcher] = []  # the same one each time: of the two, one is at its beginning
        found = [self._row(place)]
        for id in draft_ids:
            if not has(self._tables.all_ids if found[-1] is None else found[-1], id):
                break
            place, matcher = self._after(place, id)
            fed += [matcher] if matcher is not None else []
            found.append(self._row(place))
            if place == "ended":
                break
        if fed:
            _check(fed[0], fed[0].rollback(len(fed)))
        if all(row is None for row in found):
            return len(found) - 1, None
        free = self._tables.all_ids
        return len(found) - 1, np.stack([free if row is None else row for row in found])

    def advance(self, ids: Iterable[int]) -> None:
        """The ids were kept. Raises GenerationFailed for one that the grammar doesn't allow."""
        for id in ids:
            was_whole = self.is_complete
            self._place, _ = self._after(self._place, id)
            self._ended_whole = was_whole

    def forced(self, most: int) -> list[int]:
        """Up to `most` ids that are all the grammar leaves, as its text is tokenized; no end."""
        is_bound = self._place in HELD or (self._place == "content" and self._call_open is None)
        matcher = self._matcher_at(self._place)
        if not is_bound or most < 1 or matcher.is_stopped():
            return []
        ids = matcher.compute_ff_tokens()[:most]
        _check(matcher, not matcher.is_error())
        ends = [n for n, id in enumerate(ids) if id in self._tables.eos_ids]
        return ids[: ends[0]] if ends else ids

    def _row(self, place: Place) -> Bits | None:
        """(words,) what may come next; None: anything."""
        if place in ANYTHING:
            return None
        matcher = self._matcher_at(place)
        row = self._tables.mask(matcher)
        _check(matcher, not matcher.is_error())
        also = [self._think_open] if place == "before" else []
        also += [self._call_open] if place in ("before", "content") else []
        ids = [id for id in also if id is not None]
        return row | bits_of(ids, self._tables.vocab_size) if ids else row

    def _matcher_at(self, place: Place) -> LLMatcher:
        if place == "calling":
            assert self._calls is not None
            return self._calls
        return self._matcher

    def _after(self, place: Place, id: int) -> tuple[Place, LLMatcher | None]:
        """Where an id leads, and the matcher that was given it."""
        following = self._next_place(place, id)
        if following not in HELD:
            return following, None
        matcher = self._matcher_at(following)
        _check(matcher, matcher.consume_token(id))
        return following, matcher

    def _next_place(self, place: Place, id: int) -> Place:
        if place == "thinking" and id == self._think_close:
            return self._unheld
        if place == "thinking" and id == self._opens_call:
            return self._next_place(self._unheld, id)
        if place in ("before", "watching") and id == self._think_open:
            return "thinking"
        if place in ("before", "content") and id == self._call_open:
            return "free" if self._calls is None else "calling"
        if id in self._tables.eos_ids or place == "ended":
            return "ended"
        if place in ANYTHING and not (place == "watching" and id == self._call_open):
            return place
        return "calling" if place == "calling" else "active"


def _check(matcher: LLMatcher, is_fine: bool) -> None:
    """Raises GenerationFailed with the matcher's own complaint."""
    if not is_fine:
        message = first_line(matcher.get_error())
        raise GenerationFailed(
            f"the reply can't be held to its grammar: {message or 'an id it does not allow'}",
            hint="simplify the schema",
        )
