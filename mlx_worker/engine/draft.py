"""Drafters: where a round's proposals come from.

Owns the protocol every drafter follows and the kinds: the assistant that reads the target's keys
and values, a smaller model of the same vocabulary, and prompt lookup. A drafter proposes; it never
decides: whatever it says, the target's own choice is what the client gets. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import mlx.core as mx

from mlx_worker.engine.assistant import Assistant
from mlx_worker.engine.cache import Timelines
from mlx_worker.engine.sample import Sampler
from mlx_worker.engine.target import Target

if TYPE_CHECKING:
    from mlx_worker.engine.round import Cursor

DraftKind = Literal["assistant", "model", "lookup"]
Position = Literal["last_cached", "newest"]  # where an assistant's query stands; see gemma4 notes
PREFILL_CHUNK_TOKENS = 512
INSEPARABLE_TOKENS = 16  # logits of so many rows are built for the last one's, in a single pass
LOOKUP_LONGEST = 4  # ids of context matched first; longer matches are rarer and no surer
LOOKUP_SHORTEST = 2  # a single id matches nearly everywhere and is nearly always wrong


@dataclass(frozen=True)
class Drafts:
    """What a drafter proposes for the next positions.

    ids     (K,) int32, possibly not computed yet; K may be below the depth asked for, even 0
    laws    (K, V) float32, the distributions they were drawn from; only under the standard rule
    """

    ids: mx.array | None
    laws: mx.array | None = None

    @property
    def n(self) -> int:
        return 0 if self.ids is None else self.ids.shape[0]

    def first(self, n: int) -> Drafts:
        """The first n alone."""
        if self.ids is None or n >= self.n:
            return self
        return Drafts(self.ids[:n] if n else None, None if self.laws is None else self.laws[:n])


def certain(ids: Sequence[int], vocab_size: int | None) -> Drafts:
    """These ids and no others; with laws where vocab_size is given."""
    if not ids:
        return Drafts(None)
    array = mx.array(list(ids))
    if vocab_size is None:
        return Drafts(array)
    one_hot = array[:, None] == mx.arange(vocab_size)[None]
    return Drafts(array, one_hot.astype(mx.float32))


class Drafter(Protocol):
    """One conversation's proposer. Called in the order: begin, then (propose, commit) for ever.

    `commit` also follows plain segments, without a `propose` before it.
    """

    kind: DraftKind

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a reply; prompt_ids are the whole prompt."""
        ...

    def propose(
        self,
        depth: int,
        cursor: Cursor,
        *,
        with_laws: bool = False,
        forced: Sequence[int] = (),
    ) -> Drafts:
        """Propose up to `depth` ids to follow the cursor's bonus id, without reading the device.

        forced  fewer than `depth` ids that are known to come next: the first proposals are these
        """
        ...

    def commit(self, ids: Sequence[int], n_accepted: int) -> None:
        """Hear the ids the target chose; the first n_accepted were this drafter's own."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes this drafter holds for the conversation, its weights not counted."""
        ...


def _chosen(
    logits: mx.array, ids: mx.array | None, position: int, sampler: Sampler, with_laws: bool
) -> tuple[mx.array, mx.array | None]:
    """One drafted id () and, under the standard rule, the law (V,) it was drawn from."""
    if not with_laws:
        return sampler.pick_draft(logits, ids, position), None
    law = sampler.draft_distribution(logits, ids)
    return sampler.draw(law, "draft", position), law


def _stacked(ids: list[mx.array], laws: list[mx.array | None]) -> Drafts:
    if not ids:
        return Drafts(None)
    rows = [law for law in laws if law is not None]
    return Drafts(mx.stack(ids), mx.stack(rows) if rows else None)


def _after(forced: Sequence[int], drafts: Drafts, vocab_size: int) -> Drafts:
    """What a drafter proposes behind ids that are known."""
    if not forced:
        return drafts
    first = certain(forced, None if drafts.laws is None else vocab_size)
    assert first.ids is not None
    if drafts.ids is None:
        return first
    laws = None
    if drafts.laws is not None and first.laws is not None:
        laws = mx.concatenate([first.laws, drafts.laws])
    return Drafts(mx.concatenate([first.ids, drafts.ids]), laws)


class AssistantDrafter:
    """The family's own draft: queries over the target's keys and values. No state, no prefill."""

    kind: DraftKind = "assistant"

    def __init__(
        self,
        assistant: Assistant,
        target: Target,
        timelines: Timelines,
        sampler: Sampler,
        position: Position = "last_cached",
    ) -> None:
        self._assistant = assistant
        self._target = target
        self._layers = {
            kind: timelines.layers[index] for kind, index in target.donor_layers.items()
        }
        self._sampler = sampler
        self._ahead = 1 if position == "newest" else 0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        pass

    def propose(
        self,
        depth: int,
        cursor: Cursor,
        *,
        with_laws: bool = False,
        forced: Sequence[int] = (),
    ) -> Drafts:
        """Chain `depth` steps at one constant position over the cached context."""
        shared_kv, n_cached = self._shared_kv()
        offset = mx.array(n_cached - 1 + self._ahead)
        token, hidden = mx.array([[cursor.bonus]]), cursor.hidden
        ids: list[mx.array] = []
        laws: list[mx.array | None] = []
        for i in range(depth):
            embedded = self._target.embed(token)
            state, hidden = self._assistant.step(embedded, hidden, shared_kv, offset)
            if i < len(forced):
                token = mx.array([[forced[i]]])
                continue
            logits, candidates = self._assistant.candidates(state)
            id, law = _chosen(logits, candidates, cursor.position + i, self._sampler, with_laws)
            ids.append(id)
            laws.append(law)
            token = id.reshape(1, 1)
        return _after(forced, _stacked(ids, laws), self._target.vocab_size)

    def commit(self, ids: Sequence[int], n_accepted: int) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return 0

    def _shared_kv(self) -> tuple[dict[str, tuple[mx.array, mx.array]], int]:
        window = self._assistant.window
        shared = {
            kind: layer.recent(window if kind == "sliding_attention" else None)
            for kind, layer in self._layers.items()
        }
        return shared, next(iter(self._layers.values())).offset


class ModelDrafter:
    """A smaller model of the same vocabulary, with its own caches and prefill."""

    kind: DraftKind = "model"

    def __init__(self, model: Target, sampler: Sampler, timelines: Timelines | None = None) -> None:
        """timelines: the small model's caches, which may hold a part of the prompt already."""
        self._model = model
        self._sampler = sampler
        self._timelines = timelines or Timelines(model.model)
        self._known: list[int] = []

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._known = list(prompt_ids)

    def propose(
        self,
        depth: int,
        cursor: Cursor,
        *,
        with_laws: bool = False,
        forced: Sequence[int] = (),
    ) -> Drafts:
        """Catch up with what is known, then chain greedy or sampled steps of the small model."""
        logits = self._catch_up()
        if forced:
            logits = self._forward(mx.array([list(forced)]))
        ids: list[mx.array] = []
        laws: list[mx.array | None] = []
        for position in range(len(forced), depth):
            if ids:
                logits = self._forward(ids[-1].reshape(1, 1))
            place = cursor.position + position
            id, law = _chosen(logits, None, place, self._sampler, with_laws)
            ids.append(id)
            laws.append(law)
        return _after(forced, _stacked(ids, laws), self._model.vocab_size)

    def commit(self, ids: Sequence[int], n_accepted: int) -> None:
        self._known.extend(ids)
        # A proposal also cached the id before it. The last id known is what the next one follows.
        n_cached = len(self._timelines.committed)
        n_new = len(self._known) - 1 - n_cached
        n_kept = min(1 + n_accepted, self._timelines.n_pending, n_new)
        self._timelines.commit(self._known[n_cached : n_cached + n_kept])
        self._timelines.settle()

    @property
    def nbytes(self) -> int:
        return self._timelines.nbytes

    def _catch_up(self) -> mx.array:
        """Cache every known id, the last one uncommitted; return the logits (V,) after it."""
        missing = self._known[len(self._timelines.committed) :]
        n_last = PREFILL_CHUNK_TOKENS if self._model.is_separable else INSEPARABLE_TOKENS
        while len(missing) > n_last:
            size = min(PREFILL_CHUNK_TOKENS, len(missing) - 1)
            chunk, missing = missing[:size], missing[size:]
            self._model.hidden(mx.array([chunk]), self._timelines.layers)
            self._timelines.evaluate()
            self._timelines.commit(chunk)
        logits = self._forward(mx.array([missing]))
        self._timelines.commit(missing[:-1])
        return logits

    def _forward(self, ids: mx.array) -> mx.array:
        hidden = self._model.hidden(ids, self._timelines.layers)
        return self._model.head(hidden[0, -1:])[0]


class LookupDrafter:
    """Copies what followed the same few ids earlier in the prompt or the reply. No weights."""

    kind: DraftKind = "lookup"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._ids: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}  # a run of ids → where its successor stands

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._ids, self._follows = [], {}
        self._learn(prompt_ids)

    def propose(
        self,
        depth: int,
        cursor: Cursor,
        *,
        with_laws: bool = False,
        forced: Sequence[int] = (),
    ) -> Drafts:
        """The ids after the latest earlier occurrence of the longest matching end."""
        ids = [*forced, *self.copy(depth - len(forced), forced)]
        return certain(ids, self._vocab_size if with_laws else None)

    def commit(self, ids: Sequence[int], n_accepted: int) -> None:
        self._learn(ids)

    @property
    def nbytes(self) -> int:
        return 0

    def copy(self, depth: int, after: Sequence[int] = ()) -> list[int]:
        """Up to `depth` ids copied from after the match; a copy may run into itself and repeat.

        after  ids that will follow those known, which aren't learnt from yet
        """
        end = [*self._ids[-LOOKUP_LONGEST:], *after]
        for size in range(min(LOOKUP_LONGEST, len(end)), LOOKUP_SHORTEST - 1, -1):
            at = self._follows.get(tuple(end[-size:]))
            if at is not None:
                period = len(self._ids) - at
                return [self._ids[at + i % period] for i in range(depth)]
        return []

    def _learn(self, ids: Sequence[int]) -> None:
        """Append ids; index the runs that now have a successor."""
        for id in ids:
            end = len(self._ids)
            for size in range(LOOKUP_SHORTEST, min(LOOKUP_LONGEST, end) + 1):
                self._follows[tuple(self._ids[end - size :])] = end
            self._ids.append(id)
