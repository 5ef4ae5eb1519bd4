"""Exactness: speculative streams equal plain ones, and both rules keep the target's joint law.

The toy: target and draft are order-2 Markov tables over a few ids, so every context has its own
random row. A law test draws 100,000 replies of three ids with the engine's own functions, batched
by mx.vmap, each reply at positions of its own, and compares all 64 continuations with their
probabilities worked out in numpy. The negative controls make one well-known mistake each and must
fail the same test, which shows that it can see them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from scipy import stats

from mlx_worker.engine.accept import coupled, leading_run, standard
from mlx_worker.engine.sample import Sampler
from mlx_worker.records import Sampling
from tests.engine.test_sample import reference_probs, values

VOCAB = 4
LENGTH = 3
DEPTH = 2
PROMPT = (1, 2)
DRAWS = 100_000
CHUNK = 10_000  # arrays that stay in the processor's cache
ROOM = 16  # positions set apart for each reply of a batch
LIMIT = 1e-6

Proposal = tuple[mx.array, mx.array]  # what a rule kept: ids (K+1,), and how many of them, less 1
Rule = Callable[["Toy", mx.array, mx.array, mx.array | None], Proposal]


class Toy:
    """A target, a draft that is roughly like it, and a sampler."""

    def __init__(self, sampling: Sampling, *, vocab: int = VOCAB, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        table = rng.normal(0, 1.2, (vocab, vocab, vocab))
        self.sampling = sampling
        self.sampler = Sampler(sampling, vocab, PROMPT)
        self.table = mx.array(table, mx.float32)
        self.draft_table = mx.array(table + rng.normal(0, 0.7, table.shape), mx.float32)

    def propose(self, context: mx.array, choose: Callable[[mx.array, int], mx.array], k: int):
        """Draft k ids after context (2,) → ids (k,) and the draft's logits (k, V)."""
        before, last = context[0], context[1]
        ids, logits = [], []
        for i in range(k):
            logits.append(self.draft_table[before, last])
            before, last = last, choose(logits[-1], i)
            ids.append(last)
        return mx.stack(ids), mx.stack(logits)

    def rows(self, context: mx.array, draft_ids: mx.array) -> mx.array:
        """The target's pass (K+1, V) over a draft."""
        seen = mx.concatenate([context, draft_ids])
        return self.table[seen[:-1], seen[1:]]


def by_coupling(toy: Toy, context: mx.array, position: mx.array, state: mx.array | None):
    """One round as the engine does it under acceptance: coupled."""
    pick = toy.sampler.pick_draft
    drafts, _ = toy.propose(context, lambda row, i: pick(row, None, position + i), DEPTH)
    chosen = toy.sampler.pick(toy.rows(context, drafts), state, drafts, position)
    return chosen, coupled(drafts, chosen)


def by_ratio(toy: Toy, context: mx.array, position: mx.array, state: mx.array | None):
    """One round as the engine does it under acceptance: standard."""
    return ratio_round(toy, context, position, state, toy.sampler)


def ratio_round(toy, context, position, state, draft_sampler, streams=("draft", "residual")):
    """by_ratio; draft_sampler is who says what q was, streams where the draws come from."""
    sampler = toy.sampler

    def choose(row: mx.array, i: int) -> mx.array:
        return sampler.draw(sampler.draft_distribution(row, None), streams[0], position + i)

    drafts, logits = toy.propose(context, choose, DEPTH)
    draft_probs = mx.stack([draft_sampler.draft_distribution(row, None) for row in logits])
    target_probs = sampler.distribution(toy.rows(context, drafts), state, drafts)
    u = sampler.uniforms(DEPTH, position)
    n, law = standard(drafts, draft_probs, target_probs, u)
    last = sampler.draw(law, streams[1], position + n)
    return mx.where(mx.arange(DEPTH + 1) < n, mx.pad(drafts, (0, 1)), last), n


def plainly(toy: Toy, context: mx.array, position: mx.array, state: mx.array | None):
    """One plain step."""
    chosen = toy.sampler.pick(toy.table[context[0], context[1]][None], state, None, position)
    return chosen, mx.array(0)


# Mistakes


def with_shared_noise(toy, context, position, state):
    """The standard rule fed with one stream for draft and redraw."""
    return ratio_round(toy, context, position, state, toy.sampler, ("choose", "choose"))


def with_untempered_q(toy, context, position, state):
    """The draft is drawn at the request's temperature, and q said to be its softmax at 1."""
    untempered = Sampler(replace(toy.sampling, temperature=1.0), VOCAB, PROMPT)
    return ratio_round(toy, context, position, state, untempered)


def with_argmax_acceptance(toy, context, position, state):
    """A draft is kept if it is the target's likeliest id, whatever the temperature."""
    pick = toy.sampler.pick_draft
    drafts, _ = toy.propose(context, lambda row, i: pick(row, None, position + i), DEPTH)
    rows = toy.rows(context, drafts)
    n = coupled(drafts, mx.argmax(rows, axis=-1).astype(mx.int32))
    chosen = toy.sampler.pick(rows, state, drafts, position)
    return mx.where(mx.arange(DEPTH + 1) < n, mx.pad(drafts, (0, 1)), chosen), n


def with_stale_penalties(toy, context, position, state):
    """Every row of a pass gets the penalties of its first."""
    pick = toy.sampler.pick
    drafts, _ = toy.propose(
        context, lambda row, i: toy.sampler.pick_draft(row, None, position + i), DEPTH
    )
    rows = toy.rows(context, drafts)
    chosen = [pick(rows[j : j + 1], state, None, position + j) for j in range(DEPTH + 1)]
    chosen = mx.concatenate(chosen)
    return chosen, coupled(drafts, chosen)


def with_a_repeated_key(toy, context, position, state):
    """Off by one: every round after the first begins with the noise of the id before it."""
    return by_coupling(toy, context, position - (position % ROOM > 0), state)


def with_a_repeated_key_plainly(toy, context, position, state):
    """The same without a draft."""
    return plainly(toy, context, position - position % 2, state)


# Laws


def draw_replies(toy: Toy, rule: Rule, n_draws: int, seed: int = 0) -> np.ndarray:
    """(n_draws, LENGTH) ids, as many rounds each as LENGTH ids can need."""
    sampler, room = toy.sampler, len(PROMPT) + LENGTH + DEPTH + 1
    slots = mx.arange(room)

    def reply(start: mx.array) -> mx.array:
        ids = mx.concatenate([mx.array(PROMPT, mx.int32), mx.zeros(room - 2, mx.int32)])
        length, state = mx.array(2), sampler.start
        for _ in range(LENGTH):
            context = ids[mx.stack([length - 2, length - 1])]
            chosen, n = rule(toy, context, start + length - 2, state)
            new = chosen[mx.clip(slots - length, 0, len(chosen) - 1)]
            ids = mx.where(mx.logical_and(slots >= length, slots <= length + n), new, ids)
            if state is not None:
                after = [sampler.advance(state, chosen[:j]) for j in range(len(chosen) + 1)]
                state = mx.stack([counts for counts in after if counts is not None])[n + 1]
            length = mx.minimum(length + n + 1, len(PROMPT) + LENGTH)
        return ids[2 : 2 + LENGTH]

    chunks = []
    for first in range(0, n_draws, CHUNK):
        starts = (mx.arange(first, first + CHUNK) + seed * n_draws) * ROOM
        chunks.append(np.array(mx.vmap(reply)(starts)))
    return np.concatenate(chunks)


def joint_law(toy: Toy) -> np.ndarray:
    """Probability of every continuation, in the order of itertools.product."""
    table, law = np.array(toy.table, np.float64), []
    for reply in itertools.product(range(VOCAB), repeat=LENGTH):
        p, seen = 1.0, PROMPT + reply
        for i, chosen in enumerate(reply):
            row = table[seen[i], seen[i + 1]]
            p *= reference_probs(toy.sampling, row, PROMPT, reply[:i])[chosen]
        law.append(p)
    return np.array(law)


def joint_p_value(toy: Toy, rule: Rule, n_draws: int = DRAWS, seed: int = 0) -> float:
    """Chi-square of the drawn continuations; rare ones pooled; 0 if an impossible one came."""
    replies = draw_replies(toy, rule, n_draws, seed)
    cells = replies @ (VOCAB ** np.arange(LENGTH)[::-1])
    observed = np.bincount(cells, minlength=VOCAB**LENGTH)
    expected = joint_law(toy) * n_draws
    if observed[expected == 0].any():
        return 0.0
    is_rare = expected < 5
    observed = np.append(observed[~is_rare], observed[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    keep = expected > 0
    return float(stats.chisquare(observed[keep], expected[keep]).pvalue)


SAMPLINGS = {
    "plain softmax": Sampling(temperature=1.0, seed=11),
    "temperature and top-k": Sampling(temperature=0.7, top_k=3, seed=12),
    "top-p": Sampling(temperature=1.3, top_p=0.8, seed=13),
    "min-p and bias": Sampling(
        temperature=1.0, min_p=0.15, logit_bias={2: 0.8}, suppress_ids=(0,), seed=14
    ),
    "penalties": Sampling(
        temperature=0.9,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        seed=15,
    ),
}
DEFAULT_TIER = {
    (by_coupling, "plain softmax"),
    (by_coupling, "temperature and top-k"),
    (by_coupling, "penalties"),
    (by_ratio, "plain softmax"),
    (by_ratio, "top-p"),
    (by_ratio, "penalties"),
    (plainly, "min-p and bias"),
    (plainly, "penalties"),
}


def tiers():
    for rule, name in itertools.product([by_coupling, by_ratio, plainly], SAMPLINGS):
        marks = () if (rule, name) in DEFAULT_TIER else pytest.mark.long
        yield pytest.param(rule, name, id=f"{rule.__name__}-{name}", marks=marks)


@pytest.mark.parametrize(("rule", "name"), list(tiers()))
def test_the_joint_law_is_the_targets(rule, name):
    """All 64 continuations come as often as the target alone would write them."""
    assert joint_p_value(Toy(SAMPLINGS[name]), rule) > LIMIT


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("rule", [by_coupling, by_ratio])
def test_the_joint_law_holds_for_a_million_draws(rule, name, seed):
    """Ten times the draws, on other toys."""
    toy = Toy(replace(SAMPLINGS[name], seed=-seed), seed=seed + 1)
    assert joint_p_value(toy, rule, 10 * DRAWS) > LIMIT


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        (with_shared_noise, "plain softmax"),
        (with_untempered_q, "temperature and top-k"),
        (with_argmax_acceptance, "plain softmax"),
        (with_stale_penalties, "penalties"),
        (with_a_repeated_key, "plain softmax"),
        (with_a_repeated_key_plainly, "plain softmax"),
    ],
)
def test_the_joint_law_test_sees(mistake, name):
    """Negative control: a known mistake fails the test that the rules pass."""
    assert joint_p_value(Toy(SAMPLINGS[name]), mistake) < LIMIT


@pytest.mark.parametrize("rule", [by_coupling, by_ratio])
def test_batched_replies_are_the_single_ones(rule):
    """What the law tests draw in batches is what one reply at a time gives."""
    toy = Toy(SAMPLINGS["penalties"])
    context, positions = mx.array([2, 3], mx.int32), mx.arange(40) * ROOM
    state = toy.sampler.advance(toy.sampler.start, [3, 3])
    ids, n = mx.vmap(lambda position: rule(toy, context, position, state))(positions)
    for i in range(40):
        one, n_one = rule(toy, context, positions[i], state)
        assert n[i].item() == n_one.item()
        assert ids[i, : n_one.item() + 1].tolist() == one[: n_one.item() + 1].tolist()


# Streams

WIDE = 24
STREAM_SAMPLINGS = {
    "greedy": Sampling(),
    "greedy with penalties": Sampling(repetition_penalty=1.5, frequency_penalty=0.5),
    "softmax": Sampling(temperature=1.0),
    "hot top-k": Sampling(temperature=1.4, top_k=6),
    "nucleus": Sampling(temperature=0.8, top_p=0.9, min_p=0.02),
    "everything": Sampling(
        temperature=1.1,
        top_k=15,
        top_p=0.95,
        min_p=0.01,
        suppress_ids=(3,),
        logit_bias={5: 1.0},
        repetition_penalty=1.2,
        presence_penalty=0.2,
        frequency_penalty=0.2,
    ),
}
DEPTHS = {
    "1": (1,),
    "2": (2,),
    "4": (4,),
    "exits": (3, 0, 0, 1, 4, 0, 2),
    "late start": (0, 0, 0, 4, 3),
}


def stream(toy: Toy, depths: Sequence[int], length: int, key_offset: int = 0) -> list[int]:
    """A reply of `length` ids, round i at depths[i % len(depths)], read back each round.

    key_offset moves the draft's noise away from the target's.
    """
    sampler, ids, state, rounds = toy.sampler, [*PROMPT], toy.sampler.start, 0
    while (position := len(ids) - 2) < length:
        depth = min(depths[rounds % len(depths)], length - position - 1)
        rounds += 1
        context, draft, drafted = mx.array(ids[-2:], mx.int32), None, []
        rows = toy.table[context[:1], context[1:]]
        if depth:
            draft, _ = toy.propose(
                context,
                lambda row, i, at=position: sampler.pick_draft(row, None, at + key_offset + i),
                depth,
            )
            rows = toy.rows(context, draft)
            drafted = values(draft)
        chosen = values(sampler.pick(rows, state, draft, position))
        kept = chosen[: leading_run(drafted, chosen) + 1]
        state = sampler.advance(state, kept)
        ids += kept
    return [int(i) for i in ids[2:]]


@pytest.mark.parametrize("seed", [0, -7])
@pytest.mark.parametrize("name", STREAM_SAMPLINGS)
def test_a_coupled_stream_equals_the_plain_one(name, seed):
    """Neither depth nor leaving speculation in the middle changes an id."""
    toy = Toy(replace(STREAM_SAMPLINGS[name], seed=seed), vocab=WIDE, seed=abs(seed))
    plain = stream(toy, (0,), 16)
    assert {d: stream(toy, depths, 16) for d, depths in DEPTHS.items()} == dict.fromkeys(
        DEPTHS, plain
    )


def test_a_draft_with_the_wrong_noise_costs_speed_only():
    """Under the coupled rule the target picks every id itself, so a bad draft can't change one."""
    toy = Toy(Sampling(temperature=1.0, seed=5), vocab=WIDE)
    assert stream(toy, (3,), 24, key_offset=1) == stream(toy, (0,), 24)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STREAM_SAMPLINGS)
def test_long_coupled_streams_equal_plain_ones(name):
    """200 ids, 10 seeds, random depths."""
    for seed in range(10):
        toy = Toy(replace(STREAM_SAMPLINGS[name], seed=2**63 + seed), vocab=WIDE, seed=seed)
        depths = np.random.default_rng(seed).integers(0, 7, 50).tolist()
        assert stream(toy, depths, 200) == stream(toy, (0,), 200)
