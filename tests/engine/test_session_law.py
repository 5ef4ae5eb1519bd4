"""The joint law of whole replies, through the real session: what is drafted never bends it."""

from collections import Counter
from functools import cache
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from scipy.stats import chisquare

from mlx_worker.engine.target import Target
from mlx_worker.records import Acceptance, Sampling
from tests.tiny import VOCAB, tiny_pair, tiny_target, write

PROMPT = (2, 50, 61, 47)
LENGTH = 3
ALLOWED = (40, 41, 42, 43)
TEMPERATURE = 1.5
TOO_UNLIKELY = 1e-6


def only_allowed(seed: int) -> Sampling:
    """Sampling restricted to four ids, so that every continuation can be enumerated."""
    banned = tuple(id for id in range(VOCAB) if id not in ALLOWED)
    return Sampling(suppress_ids=banned, temperature=TEMPERATURE, seed=seed)


def next_law(target: Target, ids: tuple[int, ...]) -> np.ndarray:
    """(4,) the target's own probabilities of the allowed ids after `ids`, from a full pass."""
    logits = target.head(target.hidden(mx.array([list(ids)]), None)[0, -1:])[0]
    scores = np.array(logits)[list(ALLOWED)].astype(np.float64) / TEMPERATURE
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@cache
def joint_law() -> dict[tuple[int, ...], float]:
    """Continuation → probability, by enumeration."""
    target = tiny_target("own")
    law = {}
    for reply in product(range(len(ALLOWED)), repeat=LENGTH):
        ids, probability = PROMPT, 1.0
        for choice in reply:
            probability *= next_law(target, ids)[choice]
            ids = (*ids, ALLOWED[choice])
        law[ids[len(PROMPT) :]] = probability
    return law


def p_value(acceptance: Acceptance, draft: str | None, n_replies: int) -> float:
    """Chi-square of n_replies replies, one seed each, against the enumerated law."""
    pair = tiny_pair("own", draft)
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(n_replies):
        reply = write(
            pair,
            PROMPT,
            LENGTH,
            sampling=only_allowed(seed),
            acceptance=acceptance,
            speculation="on",
            depth=2,
            ignore_eos=True,
        )
        seen[tuple(reply.ids)] += 1
    expected = {ids: n_replies * p for ids, p in joint_law().items() if n_replies * p >= 5}
    rare = n_replies - sum(expected.values())
    observed = [seen[ids] for ids in expected]
    return chisquare([*observed, n_replies - sum(observed)], [*expected.values(), rare]).pvalue


# A coupled draft leaves each reply as it is, which tests/engine/test_session.py checks reply by
# reply; so here plain replies stand for both, and the long tier has the draft as well.
FEW_RULES = [("coupled", None), ("standard", "other_seed")]
RULES = [*FEW_RULES, ("coupled", "other_seed"), ("standard", "assistant")]


@pytest.mark.parametrize(("acceptance", "draft"), FEW_RULES)
def test_replies_follow_the_targets_law(acceptance: Acceptance, draft: str | None):
    """Two hundred whole replies under each rule."""
    assert p_value(acceptance, draft, 200) > TOO_UNLIKELY


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("acceptance", "draft"), RULES)
def test_many_replies_follow_the_targets_law(acceptance: Acceptance, draft: str | None):
    """The same with enough replies to see a bias of a few percent."""
    assert p_value(acceptance, draft, 5_000) > TOO_UNLIKELY


def test_the_draft_is_really_tried_and_really_refused():
    """The law above is tested on rounds that accept some drafts and refuse others."""
    pair = tiny_pair("own", "other_seed")
    timings = [
        write(
            pair,
            PROMPT,
            8,
            sampling=only_allowed(seed),
            acceptance="standard",
            speculation="on",
            depth=2,
            ignore_eos=True,
        ).done.timing
        for seed in range(30)
    ]
    accepted, drafted = sum(t.accepted for t in timings), sum(t.drafted for t in timings)
    assert 0 < accepted < drafted
