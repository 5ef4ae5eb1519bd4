"""One draft-and-verify round, and the plain step beside it. Read this first.

Owns the inner loop: draft, verify, accept; and the pipelined plain path, which is the baseline
that every verdict rests on. Leaves ending a reply (EOS, stop, max_tokens), text and timing to
session.py, which also rewinds the caches to the ids it kept. Engine thread only.

A round at depth k:
    draft    k lazy steps, no host read
    verify   ONE target pass over [bonus, d1 … dk] → hidden (k+1, H) → ONE head projection (k+1, V)
    accept   the leading run of drafts that the target chose itself, on device
    read     ONE host read: the k+1 chosen ids and how many of them count

A grammar takes one more read: the drafts, while the target pass runs, for the masks that its rows
are chosen under. Ids that it leaves no choice about are the first drafts, and cost no drafting.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx
import numpy as np

from mlx_worker.engine import accept
from mlx_worker.engine.arrays import ints
from mlx_worker.engine.cache import Timelines
from mlx_worker.engine.constraint import Constraint
from mlx_worker.engine.draft import Drafter, Drafts, certain
from mlx_worker.engine.grammar import unpacked
from mlx_worker.engine.sample import Sampler, SamplerState
from mlx_worker.engine.target import Target
from mlx_worker.records import Acceptance, TokenLogprob


@dataclass(frozen=True)
class Cursor:
    """Where decoding stands between two rounds.

    bonus     the last chosen id; its keys and values are not cached yet
    hidden    (1, 1, H) the target's final hidden state at the last cached position
    position  index of the next id to choose, counted from the first of the reply
    state     what the penalties know, bonus included
    """

    bonus: int
    hidden: mx.array
    position: int
    state: SamplerState


@dataclass(frozen=True)
class Chosen:
    """Ids the target chose, in order, and where each leaves decoding.

    ids         1..k+1 of them; all but the last are accepted drafts; -1 where the model gave no
                usable distribution
    n_drafted   how many were proposed
    n_forced    how many of those, the first, a grammar left no choice about
    hidden      (rows, H): row i is the hidden state that ids[i] was chosen from
    position    index of ids[0] in the reply
    state       what the penalties knew when ids[0] was chosen
    logprobs    one for each id, when asked for
    """

    ids: list[int]
    n_drafted: int
    hidden: mx.array
    position: int
    state: SamplerState
    logprobs: list[TokenLogprob] | None
    n_forced: int = 0

    def first(self, n: int) -> "Chosen":
        """The first n ids alone: what is left when a reply ends inside a round."""
        return replace(self, ids=self.ids[:n])

    def cursor(self, sampler: Sampler) -> Cursor:
        """Where decoding stands once all ids are kept."""
        n = len(self.ids)
        state = sampler.advance(self.state, self.ids)
        return Cursor(self.ids[-1], self.hidden[None, n - 1 : n], self.position + n, state)


@dataclass(frozen=True)
class Pending:
    """A round or step that is built but not read; the device works on it once it is started."""

    n_drafted: int
    hidden: mx.array
    position: int
    state: SamplerState
    chosen: mx.array  # (rows,) int32
    n_kept: mx.array | None  # () int32, how many drafts were kept; None: nothing was drafted
    logprobs: tuple[mx.array, mx.array, mx.array] | None
    best: mx.array | None = None  # (1,) the chosen id's logit, where `chosen` was not checked yet
    n_forced: int = 0

    def start(self) -> "Pending":
        """Give the device everything that `read` will want."""
        wanted = [self.chosen, self.hidden, *(self.logprobs or ()), self.n_kept, self.best]
        mx.async_eval([array for array in wanted if array is not None])
        return self

    def read(self) -> Chosen:
        """Wait for the device: the round's one host read."""
        ids = ints(self.chosen)
        if self.n_kept is not None:
            del ids[ints(self.n_kept[None])[0] + 1 :]
        if self.best is not None and not math.isfinite(cast(float, self.best.item())):
            ids = [-1]
        return Chosen(
            ids,
            self.n_drafted,
            self.hidden,
            self.position,
            self.state,
            _logprobs(ids, self.logprobs),
            self.n_forced,
        )


def launch(
    target: Target,
    drafter: Drafter | None,
    timelines: Timelines,
    sampler: Sampler,
    cursor: Cursor,
    depth: int,
    acceptance: Acceptance = "coupled",
    constraint: Constraint | None = None,
) -> Pending:
    """Queue a whole round on the device and return at once; under a constraint, once it drafted.

    Next: `read` it, then commit what is kept and settle the timelines, before the next launch.
    """
    standard = acceptance == "standard" and not sampler.is_greedy
    forced = constraint.forced(depth) if constraint else []
    law_size = sampler.vocab_size if standard else None
    drafts = _drafts(drafter, depth, cursor, forced, law_size)
    bonus = mx.array([cursor.bonus])
    if drafts.ids is None:
        row = bonus
    else:
        mx.async_eval(drafts.ids)  # the device drafts while the host builds the verify pass
        row = mx.concatenate([bonus, drafts.ids])
    hidden = target.hidden(row[None], timelines.layers)[0]
    logits = target.head(hidden)
    n_drafted, mask = drafts.n, None
    if constraint is not None:
        mx.async_eval(logits, hidden)  # the device verifies while the host works out the masks
        drafts, mask = _allowed(constraint, drafts, sampler, standard)
        logits, hidden = logits[: drafts.n + 1], hidden[: drafts.n + 1]
    choose = _choose_standard if standard and drafts.n else _choose_coupled
    chosen, n_kept = choose(logits, drafts, sampler, cursor, mask)
    pending = _pending(sampler, logits, hidden, cursor.position, cursor.state, chosen, n_kept)
    return replace(pending, n_drafted=n_drafted, n_forced=len(forced)).start()


def _drafts(
    drafter: Drafter | None,
    depth: int,
    cursor: Cursor,
    forced: Sequence[int],
    law_size: int | None,
) -> Drafts:
    """Up to `depth` ids: those that are forced, then the drafter's own.

    law_size  of the vocabulary, where their laws are wanted too
    """
    if drafter is None or depth <= len(forced):
        return certain(forced, law_size)
    return drafter.propose(depth, cursor, with_laws=law_size is not None, forced=forced)


def _allowed(
    constraint: Constraint, drafts: Drafts, sampler: Sampler, standard: bool = False
) -> tuple[Drafts, mx.array | None]:
    """The drafts up to the first that the grammar forbids, and (rows, V) what may stand where.

    standard  keep that one: its rule must reject it itself, or what is drawn in its place would
              come from p, not from the residual of p and q. The row behind it is never used
    """
    n, bits = constraint.rows([] if drafts.ids is None else ints(drafts.ids))
    mask = None if bits is None else unpacked(bits, sampler.vocab_size)
    if standard and n < drafts.n:
        n += 1
        if mask is not None:
            mask = mx.concatenate([mask, mx.ones((1, sampler.vocab_size), mx.bool_)])
    return drafts.first(n), mask


def _choose_coupled(
    logits: mx.array, drafts: Drafts, sampler: Sampler, cursor: Cursor, mask: mx.array | None
) -> tuple[mx.array, mx.array | None]:
    """The target's own id for each row; drafts equal to it are kept. (rows,), ()."""
    chosen = sampler.pick(logits, cursor.state, drafts.ids, cursor.position, mask)
    if drafts.ids is None:
        return chosen, None
    return chosen, accept.coupled(drafts.ids, chosen)


def _choose_standard(
    logits: mx.array, drafts: Drafts, sampler: Sampler, cursor: Cursor, mask: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Kept drafts, then one id from the residual or the last row. (rows,), ()."""
    assert drafts.ids is not None
    assert drafts.laws is not None
    target_probs = sampler.distribution(logits, cursor.state, drafts.ids, mask)
    uniforms = sampler.uniforms(drafts.n, cursor.position)
    n_kept, law = accept.standard(drafts.ids, drafts.laws, target_probs, uniforms)
    last = sampler.draw(law, "residual", cursor.position)
    padded = mx.concatenate([drafts.ids, last[None]])
    return mx.where(mx.arange(drafts.n + 1) == n_kept, last, padded), n_kept


def queues_ahead() -> bool:
    """Whether giving the device the next step leaves the reading of this one undisturbed.

    On a GPU it does. The CPU backend takes a step in only when it is nearly through with it, so
    this one would be handed over a whole step late. See docs/LOG.md, 2026-11-30.
    """
    return mx.default_device() != mx.Device(mx.cpu)


def plain_steps(
    target: Target, timelines: Timelines, sampler: Sampler, cursor: Cursor, n_steps: int
) -> Generator[Chosen, None, None]:
    """Plain decoding, pipelined: the next step is built, and on a GPU started, before this is read.

    On the CPU backend it is started once the caller asks on, who closes this where a reply ends.
    After the last of n_steps nothing is built. Closed early, one step may be left in the timelines
    for `settle` to rewind.
    """
    ahead = queues_ahead()
    token, state = mx.array([cursor.bonus]), cursor.state
    following = _plain_step(target, timelines, sampler, token, state, cursor.position).start()
    for i in range(1, n_steps + 1):
        current, is_last = following, i == n_steps
        if not is_last:
            token, state = current.chosen, sampler.advance(state, current.chosen)
            following = _plain_step(target, timelines, sampler, token, state, cursor.position + i)
            if ahead:
                following.start()
        yield current.read()
        if not is_last and not ahead:
            following.start()


def _plain_step(
    target: Target,
    timelines: Timelines,
    sampler: Sampler,
    token: mx.array,
    state: SamplerState,
    position: int,
) -> Pending:
    """Build one step after `token` (1,), itself perhaps not computed yet."""
    hidden = target.hidden(token[None], timelines.layers)[0]
    logits = target.head(hidden)
    if sampler.is_argmax and sampler.n_logprobs is None:
        # The baseline of every verdict: sampler.pick's check is left to the host, which saves a
        # chain of small operations, 2 % of a step of the demo pair on the CPU backend.
        chosen = mx.argmax(logits, axis=-1).astype(mx.int32)
        return Pending(0, hidden, position, state, chosen, None, None, mx.max(logits, axis=-1))
    chosen = sampler.pick(logits, state, None, position)
    return _pending(sampler, logits, hidden, position, state, chosen, None)


def constrained_steps(
    target: Target,
    timelines: Timelines,
    sampler: Sampler,
    cursor: Cursor,
    n_steps: int,
    constraint: Constraint,
) -> Generator[Chosen, None, None]:
    """Plain decoding under a grammar, whose next mask depends on this id: nothing is built ahead.

    Next: advance the constraint by the id before asking on.
    """
    for _ in range(n_steps):
        chosen = launch(target, None, timelines, sampler, cursor, 0, constraint=constraint).read()
        yield chosen
        cursor = chosen.cursor(sampler)


def first_step(
    target: Target,
    timelines: Timelines,
    sampler: Sampler,
    ids: mx.array,
    constraint: Constraint | None = None,
) -> Pending:
    """Queue the pass over the prompt's last ids (L,), which chooses the reply's first id."""
    state = sampler.start
    hidden = target.hidden(ids[None], timelines.layers)[0, -1:]
    logits = target.head(hidden)
    mask = None
    if constraint is not None:
        mx.async_eval(logits, hidden)
        _, mask = _allowed(constraint, Drafts(None), sampler)
    chosen = sampler.pick(logits, state, None, 0, mask)
    return _pending(sampler, logits, hidden, 0, state, chosen, None).start()


def _pending(
    sampler: Sampler,
    logits: mx.array,
    hidden: mx.array,
    position: int,
    state: SamplerState,
    chosen: mx.array,
    n_kept: mx.array | None,
) -> Pending:
    logprobs = None if sampler.n_logprobs is None else sampler.logprobs(logits, chosen)
    return Pending(0, hidden, position, state, chosen, n_kept, logprobs)


def _logprobs(
    ids: list[int], arrays: tuple[mx.array, mx.array, mx.array] | None
) -> list[TokenLogprob] | None:
    if arrays is None:
        return None
    chosen, top_ids, top = (np.array(array) for array in arrays)
    return [
        TokenLogprob(id, float(chosen[row]), _rivals(top_ids[row], top[row]))
        for row, id in enumerate(ids)
    ]


def _rivals(ids: np.ndarray, logprobs: np.ndarray) -> tuple[tuple[int, float], ...]:
    return tuple((int(id), float(logprob)) for id, logprob in zip(ids, logprobs, strict=True))
