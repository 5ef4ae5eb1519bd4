"""K/V timelines: what the queries see, and rewinds that leave no trace."""

import random

import mlx.core as mx
import numpy as np
import pytest

from mlx_worker.engine.cache import SLACK_TOKENS, SlidingTimeline, Timelines
from mlx_worker.engine.target import Target
from tests.tiny import SHAPES, VOCAB, WINDOW, cached_now, tiny_target

N_WINDOWS = 4  # prompts are several windows long
TOLERANCE = 1e-4


def some_ids(n: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(3, VOCAB) for _ in range(n)]


def uncached(target: Target, ids: list[int]) -> np.ndarray:
    return np.array(target.head(target.hidden(mx.array([ids]), None)[0]))


@pytest.fixture(params=[*SHAPES, "llama"])
def target(request: pytest.FixtureRequest) -> Target:
    return tiny_target(request.param)


@pytest.mark.parametrize("chunk", [1, 7, WINDOW - 1, WINDOW + 1, 1000])
def test_prefill_in_chunks_agrees_with_a_pass_without_cache(target: Target, chunk: int):
    """Whatever the chunk length, every row's logits are those of the whole prompt at once."""
    ids = some_ids(N_WINDOWS * WINDOW + 3)
    timelines = Timelines(target.model)
    rows = [cached_now(target, ids[i : i + chunk], timelines) for i in range(0, len(ids), chunk)]
    assert (
        np.abs(np.concatenate([np.array(r) for r in rows]) - uncached(target, ids)).max()
        < TOLERANCE
    )


@pytest.mark.parametrize("n_context", [2, WINDOW - 2, WINDOW, 5 * WINDOW, 300])
@pytest.mark.parametrize("n_rejected", [1, 3, 8])
def test_a_rewind_leaves_no_trace(target: Target, n_context: int, n_rejected: int):
    """After a rewind one row, and then several, see exactly the committed context."""
    ids, wrong = some_ids(n_context + 4), some_ids(n_rejected, seed=9)
    timelines = Timelines(target.model)
    cached_now(target, ids[:n_context], timelines)
    target.hidden(mx.array([wrong]), timelines.layers)
    timelines.settle()
    one = np.array(cached_now(target, ids[n_context : n_context + 1], timelines))
    several = np.array(cached_now(target, ids[n_context + 1 :], timelines))
    expected = uncached(target, ids)[n_context:]
    assert np.abs(np.concatenate([one, several]) - expected).max() < TOLERANCE


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_random_appends_and_rewinds_keep_every_row_right(target: Target, seed: int):
    """Rounds of every size, accepted in part, for several buffer growths past the window."""
    chance = random.Random(seed)
    ids = some_ids(700, seed)
    expected = uncached(target, ids)
    timelines = Timelines(target.model)
    n = 0
    while n < 640:
        rows = chance.randint(1, 9)
        kept = chance.randint(1, rows)
        tail = ids[n : n + kept] + some_ids(rows - kept, seed=n)
        hidden = target.hidden(mx.array([tail]), timelines.layers)[0]
        got = np.array(target.head(hidden))[:kept]
        assert np.abs(got - expected[n : n + kept]).max() < TOLERANCE
        timelines.commit(ids[n : n + kept])
        timelines.settle()
        n += kept


def test_a_sliding_timeline_rewinds_its_whole_slack_right_after_compaction():
    """The slack survives compaction, so that ids queued one by one can still be taken back."""
    timeline = SlidingTimeline(WINDOW)
    for i in range(1000):
        row = mx.full((1, 1, 1, 2), i)
        timeline.update_and_fetch(row, row)
    timeline.rewind(SLACK_TOKENS)
    keys, _ = timeline.recent(WINDOW - 1)
    last = 999 - SLACK_TOKENS
    assert keys[0, 0, :, 0].tolist() == list(range(last - WINDOW + 2, last + 1))


def test_a_rewind_past_what_is_kept_is_refused():
    """Never a silent wrong cache: what cannot be rewound exactly is an assertion."""
    timeline = SlidingTimeline(WINDOW)
    for i in range(1000):
        row = mx.full((1, 1, 1, 2), i)
        timeline.update_and_fetch(row, row)
    with pytest.raises(AssertionError, match="rewind"):
        timeline.rewind(500)


def test_a_sliding_timeline_stays_small():
    """Ten thousand tokens take no more room than the window, the slack and one growth step."""
    timeline = SlidingTimeline(WINDOW)
    row = mx.zeros((1, 1, 1, 2))
    sizes = set()
    for i in range(10_000):
        timeline.update_and_fetch(row, row)
        if i % 500 == 0:
            mx.eval(timeline.state)
            sizes.add(timeline.nbytes)
    assert len(sizes) == 1


def test_settling_more_than_was_cached_is_refused():
    """The ledger can't claim ids whose keys and values were never made."""
    timelines = Timelines(tiny_target("own").model)
    timelines.commit([5])
    with pytest.raises(AssertionError, match="never cached"):
        timelines.settle()


def test_a_pass_that_failed_half_way_is_taken_back_layer_by_layer():
    """Layers that the pass never reached give nothing back; it used to be taken from them too."""
    timelines = Timelines(tiny_target("own").model)
    cached_now(tiny_target("own"), some_ids(5), timelines)
    row = mx.zeros((1, 2, 3, 8))
    timelines.layers[0].update_and_fetch(row, row)
    timelines.settle()
    assert {layer.offset for layer in timelines.layers} == {5}


def test_donors_are_the_last_own_caches_of_their_type():
    """KV-shared layers have no cache, so they can't be a draft's donors."""
    assert tiny_target("shared").donor_layers == {"sliding_attention": 2, "full_attention": 3}
