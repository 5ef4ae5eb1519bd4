"""Choosing ids: noise, each processor against a plain numpy reference, their order, bad rows."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from scipy import stats

from mlx_worker.engine.sample import STREAMS, Sampler, gumbel, mixed, noise, stream_keys
from mlx_worker.records import Sampling
from scripts.make_noise_vectors import PUBLISHED, threefry

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "noise.json").read_text())
VOCAB = 40
PROMPT = (3, 5, 5, 8, 30)
REPLY = (5, 5, 11, 2)

PENALTIES = Sampling(
    temperature=1, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, seed=3
)
EVERYTHING = replace(
    PENALTIES,
    suppress_ids=(0, 7),
    logit_bias={4: 2.5, 5: -1.0, 7: 50.0},
    temperature=0.8,
    top_k=12,
    top_p=0.85,
    min_p=0.05,
)
SAMPLINGS = {
    "suppress": Sampling(temperature=1, suppress_ids=(0, 7, 39), seed=1),
    "bias": Sampling(temperature=1, logit_bias={1: 3.0, 39: -2.0}, seed=1),
    "repetition": Sampling(temperature=1, repetition_penalty=1.5, seed=1),
    "presence": Sampling(temperature=1, presence_penalty=0.7, seed=1),
    "frequency": Sampling(temperature=1, frequency_penalty=-0.6, seed=1),
    "temperature": Sampling(temperature=0.6, seed=1),
    "top-k": Sampling(temperature=1, top_k=5, seed=1),
    "top-p": Sampling(temperature=1, top_p=0.7, seed=1),
    "min-p": Sampling(temperature=1, min_p=0.2, seed=1),
    "greedy with penalties": replace(PENALTIES, temperature=0),
    "everything": EVERYTHING,
}


def reference_probs(
    sampling: Sampling, row: np.ndarray, prompt: Sequence[int], reply: Sequence[int]
) -> np.ndarray:
    """(V,) float64 probabilities of the next id, one plain loop a processor."""
    scores = np.array(row, np.float64)
    for i in sampling.suppress_ids:
        scores[i] = -np.inf
    for i, bias in sampling.logit_bias.items():
        scores[i] += bias
    for i in set(prompt) | set(reply):
        r = sampling.repetition_penalty
        scores[i] = scores[i] / r if scores[i] > 0 else scores[i] * r
    for i in set(reply):
        scores[i] -= sampling.presence_penalty + sampling.frequency_penalty * reply.count(i)
    if sampling.temperature == 0:
        return np.eye(len(scores))[np.argmax(scores)]
    scores /= sampling.temperature
    probs = np.exp(scores - scores.max())
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    if sampling.top_k:
        probs[order[sampling.top_k :]] = 0
    probs /= probs.sum()
    reached = 0.0
    for i in order:
        if reached >= sampling.top_p:
            probs[i] = 0
        reached += probs[i]
    probs[probs < sampling.min_p * probs.max()] = 0
    return probs / probs.sum()


def cheap(sampling: Sampling) -> Sampling:
    """What of a request's sampling a draft is given."""
    neutral = Sampling()
    return replace(
        sampling,
        repetition_penalty=neutral.repetition_penalty,
        presence_penalty=neutral.presence_penalty,
        frequency_penalty=neutral.frequency_penalty,
        top_p=neutral.top_p,
    )


def rows(n: int, seed: int = 0, vocab: int = VOCAB) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 2, (n, vocab)), mx.float32)


def values(array: mx.array) -> list:
    return np.array(array).tolist()


def sampler(sampling: Sampling, vocab: int = VOCAB) -> Sampler:
    return Sampler(sampling, vocab, PROMPT)


def survivors(sampling: Sampling, row: list[float], prompt: Sequence[int] = ()) -> list[int]:
    """The ids a greedy-free sampler may still draw from one row."""
    chooser = Sampler(sampling, len(row), prompt)
    probs = chooser.distribution(mx.array([row]), chooser.start, None)
    return [i for i, p in enumerate(values(probs[0])) if p > 0]


def choose_key(seed: int) -> mx.array:
    return stream_keys(seed, 0)[STREAMS.index("choose")]


# Noise


@pytest.mark.parametrize(("key", "counter", "words"), PUBLISHED)
def test_the_vectors_come_from_the_published_threefry(key, counter, words):
    """The script that wrote our vectors gives Random123's known answers (2x32, 20 rounds)."""
    assert threefry(key, counter) == words


def test_the_hash_is_threefry():
    """MLX's key split is Threefry-2x32-20 of the counter (0, 1); our noise rests on it."""
    for v in VECTORS["hash"]:
        assert mixed(mx.array(v["key"], mx.uint32), mx.array(0)).tolist() == v["words"]


def test_keys_are_the_committed_ones():
    """A seed's noise never changes between versions, negative and 64-bit seeds included."""
    for v in VECTORS["keys"]:
        key = stream_keys(v["seed"], v["choice"])[STREAMS.index(v["stream"])]
        assert key.tolist() == v["key"], v


def test_noise_is_the_committed_one():
    """The same for the noise itself, at small and large positions and ids."""
    for v in VECTORS["noise"]:
        drawn = noise(choose_key(v["seed"]), mx.array(v["position"]), mx.array(v["id"])).item()
        assert drawn == pytest.approx(v["gumbel"], abs=1e-4), v  # u near 1 rounds


@pytest.mark.parametrize("vector", VECTORS["gumbel"])
def test_both_tails_of_the_noise_are_exact(vector):
    """Bits 0 give G = 22.9 and not infinity; the smallest u keep every digit."""
    drawn = gumbel(mx.array(vector["bits"], mx.uint32)).item()
    assert drawn == pytest.approx(vector["gumbel"], abs=2e-5, rel=2e-7)


def test_the_largest_bits_give_finite_noise():
    """u rounds to 1 there, which would make the noise minus infinity and the id impossible."""
    drawn = gumbel(mx.array([2**32 - 1 - i for i in range(300)], mx.uint32))
    assert mx.all(drawn > -3.2).item()


@pytest.mark.parametrize("axis", ["ids", "positions", "seeds"])
def test_noise_is_gumbel_along(axis):
    """Kolmogorov-Smirnov against the standard Gumbel law."""
    n, one = 100_000, mx.zeros(1, mx.int32)
    many, key = mx.arange(n), choose_key(9)
    if axis == "seeds":
        drawn = noise(mixed(key, many), one, one)
    else:
        drawn = noise(key, one, many) if axis == "ids" else noise(key, many, one)
    assert stats.kstest(np.array(drawn), "gumbel_r").pvalue > 1e-6


@pytest.mark.parametrize("step", [(0, 1), (1, 0), (1, -1)])
def test_noise_of_neighbours_is_uncorrelated(step):
    """Neighbouring ids and positions share no noise."""
    key = choose_key(9)
    positions, ids = mx.arange(1, 301)[:, None], mx.arange(1, 301)
    here = np.array(noise(key, positions, ids)).ravel()
    there = np.array(noise(key, positions + step[0], ids + step[1])).ravel()
    assert abs(np.corrcoef(here, there)[0, 1]) < 5 / math.sqrt(here.size)


def test_noise_of_an_id_does_not_depend_on_its_company():
    """A drafter's candidates meet bit for bit the noise of the full row."""
    key = choose_key(9)
    full = noise(key, mx.array([[3], [4]]), mx.arange(1000))
    some = mx.array([999, 4, 512, 4])
    assert mx.array_equal(noise(key, mx.array([[4]]), some)[0], full[1][some])


# Processors


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("seed", range(3))
def test_distribution_equals_the_reference_for(name, seed):
    """Each processor alone, then all together, row by row behind a draft."""
    sampling, logits = SAMPLINGS[name], rows(4, seed)
    chooser, draft = sampler(sampling), (8, 5, 8)
    state = chooser.advance(chooser.start, REPLY)
    probs = chooser.distribution(logits, state, mx.array(draft, mx.int32))
    expected = [
        reference_probs(sampling, np.array(row), PROMPT, REPLY + draft[:j])
        for j, row in enumerate(logits)
    ]
    np.testing.assert_allclose(np.array(probs), expected, atol=2e-6)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_pick_is_the_likeliest_id_after_noise_for(name):
    """pick agrees with log-probabilities plus noise over the whole row, 30 rows a sampler."""
    sampling, logits = SAMPLINGS[name], rows(30, 7)
    chooser = sampler(sampling)
    state = chooser.advance(chooser.start, REPLY)
    for position, row in enumerate(logits):
        probs = reference_probs(sampling, np.array(row), PROMPT, REPLY)
        key = choose_key(sampling.seed or 0)
        drawn = np.array(noise(key, mx.array(position), mx.arange(VOCAB)))
        with np.errstate(divide="ignore"):
            expected = np.argmax(np.log(probs) + (0 if chooser.is_greedy else drawn))
        assert chooser.pick(row[None], state, None, position).tolist() == [expected]


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("ids", [None, (30, 4, 11, 7, 2, 39, 5, 21)])
def test_draft_distribution_equals_the_reference_for(name, ids):
    """A draft gets suppression, bias, temperature, top-k and min-p, over all ids or a few."""
    columns = list(range(VOCAB)) if ids is None else list(ids)
    row = rows(1, 5, len(columns))[0]
    full = np.full(VOCAB, -np.inf)
    full[columns] = np.array(row)
    expected = reference_probs(cheap(SAMPLINGS[name]), full, (), ())
    candidates = None if ids is None else mx.array(ids, mx.int32)
    probs = sampler(SAMPLINGS[name]).draft_distribution(row, candidates)
    np.testing.assert_allclose(np.array(probs), expected, atol=2e-6)


@pytest.mark.parametrize("name", sorted(set(SAMPLINGS) - {"everything", "top-p"}))
def test_a_draft_with_the_targets_logits_proposes_the_targets_id_for(name):
    """Same logits, same noise, same id: acceptance is 1 where only cheap processors are set."""
    chooser = Sampler(cheap(SAMPLINGS[name]), VOCAB, PROMPT)
    for position, row in enumerate(rows(20, 3)):
        proposed = chooser.pick_draft(row, None, position)
        assert proposed.item() == chooser.pick(row[None], chooser.start, None, position).item()


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_draft_of_some_candidates_proposes_the_full_rows_id(temperature):
    """Leaving other candidates out changes nothing while the winner is among those left."""
    chooser = Sampler(Sampling(temperature=temperature, seed=4), VOCAB, ())
    for position, row in enumerate(rows(20, 3)):
        full = chooser.pick_draft(row, None, position)
        some = mx.concatenate([mx.array([17, 2, 9]), full[None]])
        assert chooser.pick_draft(row[some][None], some, position).item() == full.item()


# Order


def test_bias_comes_before_repetition():
    """(1 + 1) / 2 is the 1 of the rival, not 1 / 2 + 1."""
    chooser = Sampler(
        Sampling(temperature=1, logit_bias={0: 1.0}, repetition_penalty=2.0), 2, prompt_ids=(0,)
    )
    probs = chooser.distribution(mx.array([[1.0, 1.0]]), chooser.start, None)
    assert probs.tolist() == [[0.5, 0.5]]


def test_repetition_comes_before_presence_and_frequency():
    """2 / 2 − 0.25 − 0.25 and not (2 − 0.5) / 2."""
    chooser = Sampler(
        Sampling(
            temperature=1, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.25
        ),
        2,
        prompt_ids=(),
    )
    state = chooser.advance(chooser.start, [0])
    probs = chooser.distribution(mx.array([[2.0, 0.5]]), state, None)
    assert probs.tolist() == [[0.5, 0.5]]


def test_penalties_come_before_the_grammar_mask():
    """A presence penalty below zero can't bring a forbidden id back."""
    chooser = Sampler(Sampling(presence_penalty=-100.0), 2, prompt_ids=())
    state = chooser.advance(chooser.start, [0])
    mask = mx.array([[False, True]])
    assert chooser.pick(mx.array([[0.0, 0.0]]), state, None, 0, mask).tolist() == [1]


def test_suppressed_and_forbidden_ids_take_no_place_in_top_k():
    """Two ids are left to draw from, neither of them suppressed or outside the grammar."""
    chooser = Sampler(Sampling(temperature=1, suppress_ids=(0,), top_k=2), 5, prompt_ids=())
    mask = mx.array([[True, False, True, True, True]])
    probs = chooser.distribution(mx.array([[9.0, 8.0, 3.0, 2.0, 1.0]]), None, None, mask)
    assert [i for i, p in enumerate(values(probs[0])) if p > 0] == [2, 3]


def test_temperature_comes_before_top_p():
    """At temperature 4 the second id is needed to reach 0.8, at 1 it is not."""
    row = [2.0, 0.0]
    assert survivors(Sampling(temperature=1, top_p=0.8), row) == [0]
    assert survivors(Sampling(temperature=4, top_p=0.8), row) == [0, 1]


def test_top_k_comes_before_top_p():
    """0.3 and 0.3 of five are 0.5 each once the rest is cut, so one id reaches 0.5."""
    row = np.log([0.31, 0.29, 0.2, 0.1, 0.1]).tolist()
    assert survivors(Sampling(temperature=1, top_p=0.5), row) == [0, 1]
    assert survivors(Sampling(temperature=1, top_p=0.5, top_k=2), row) == [0]


def test_top_p_keeps_the_id_that_crosses():
    """0.5 + 0.3 is the first sum to reach 0.7."""
    assert survivors(Sampling(temperature=1, top_p=0.7), np.log([0.2, 0.5, 0.3]).tolist()) == [1, 2]


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=1, top_p=0.0), Sampling(temperature=1, min_p=1.0)]
)
def test_the_best_id_always_survives(sampling):
    """The tightest nucleus still holds one id."""
    assert survivors(sampling, [0.0, 3.0, 1.0]) == [1]


def test_min_p_is_relative_to_the_best_id():
    """A quarter of the best, not of 1."""
    row = np.log([0.4, 0.3, 0.11, 0.09, 0.1]).tolist()
    assert survivors(Sampling(temperature=1, min_p=0.26), row) == [0, 1, 2]


# State


def test_prompt_counts_for_repetition_only():
    """Presence and frequency look at the reply."""
    chooser = sampler(replace(PENALTIES, repetition_penalty=1.0))
    logits = rows(1)
    plain = sampler(Sampling(temperature=1)).distribution(logits, None, None)
    assert mx.array_equal(chooser.distribution(logits, chooser.start, None), plain)


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "everything"])
def test_row_j_sees_the_drafts_before_it(name):
    """A pass behind a draft equals one-row passes, each with its own ids in the state."""
    chooser, logits = sampler(SAMPLINGS[name]), rows(5)
    draft = mx.array([11, 6, 11, 8], mx.int32)
    state = chooser.advance(chooser.start, REPLY)
    together = chooser.distribution(logits, state, draft)
    for j in range(5):
        alone = chooser.distribution(logits[j : j + 1], chooser.advance(state, draft[:j]), None)
        assert mx.array_equal(together[j], alone[0])


def test_an_older_state_stays_valid():
    """Dropping the newer state forgets a rejected draft."""
    chooser = sampler(PENALTIES)
    newer = chooser.advance(chooser.start, [1, 1, 2])
    assert newer is not None
    mx.eval(newer)
    assert chooser.start is not None
    assert values(chooser.start) == [0] * VOCAB


def test_state_takes_lists_and_lazy_arrays():
    """Committed ids come from the host, pipelined ones are not computed yet."""
    chooser = sampler(PENALTIES)
    lazy = mx.array([4, 4], mx.int32) + 1
    states = [chooser.advance(chooser.start, ids) for ids in (lazy, [5, 5], (5, 5))]
    assert [values(counts)[5] for counts in states if counts is not None] == [2, 2, 2]


def test_there_is_no_state_without_a_penalty():
    """Nothing is counted for a request that needs no counts."""
    chooser = sampler(Sampling(temperature=1))
    assert chooser.advance(chooser.start, [1]) is None


# Picking


@pytest.mark.parametrize("name", SAMPLINGS)
def test_an_id_does_not_depend_on_the_rows_beside_it(name):
    """One pass of five rows and five passes of one row choose the same ids."""
    chooser = sampler(SAMPLINGS[name])
    draft = mx.array([11, 6, 11, 8], mx.int32)
    for seed in range(5):
        logits = rows(5, seed)
        together = chooser.pick(logits, chooser.start, draft, 20).tolist()
        alone = [
            chooser.pick(
                logits[j : j + 1], chooser.advance(chooser.start, draft[:j]), None, 20 + j
            ).item()
            for j in range(5)
        ]
        assert together == alone


def test_a_lazy_position_is_the_same_position():
    """A position may be on the device."""
    chooser, logits = sampler(Sampling(temperature=1, seed=2)), rows(3)
    draft = mx.zeros(2, mx.int32)
    assert mx.array_equal(
        chooser.pick(logits, None, draft, mx.array(4)), chooser.pick(logits, None, draft, 4)
    )


def test_greedy_is_argmax():
    """Temperature 0 with nothing else set."""
    logits = rows(5)
    picked = sampler(Sampling()).pick(logits, None, None, 0)
    assert mx.array_equal(picked, mx.argmax(logits, axis=-1))


def test_plain_greedy_costs_two_passes_over_the_row():
    """No cast, mask, noise or copy of the row for a request that sets nothing."""
    logits = rows(1)
    mx.eval(logits)
    graph = io.StringIO()
    mx.export_to_dot(graph, sampler(Sampling()).pick(logits, None, None, 0))
    names = [line.split('"')[1] for line in graph.getvalue().splitlines() if "shape=rect" in line]
    costly = {"Max", "ArgReduce", "Squeeze"}
    tiny = {"Abs", "Less", "AsType", "Broadcast", "Select"}  # on the one value of a row
    assert sorted(n for n in names if n in costly) == ["ArgReduce", "Max", "Squeeze", "Squeeze"]
    assert all(n in costly | tiny or n.startswith("Compiled") for n in names), names


def test_a_tiny_temperature_is_greedy():
    """Scores are shifted before they are divided, so they can't overflow together."""
    logits = rows(5)
    chooser = sampler(Sampling(temperature=1e-30, seed=0))
    assert mx.array_equal(chooser.pick(logits, None, None, 0), mx.argmax(logits, axis=-1))


@pytest.mark.parametrize("name", SAMPLINGS)
def test_choosing_reads_nothing_back(name):
    """A traced array can't be read, so tracing a whole round proves that all of it is lazy."""
    chooser = sampler(SAMPLINGS[name])

    def round_of_two(logits):
        draft = chooser.pick_draft(logits[0], None, 0)[None]
        probs = chooser.draft_distribution(logits[0], None)
        chosen = chooser.pick(logits, chooser.start, draft, 0)
        state = chooser.advance(chooser.start, draft) if chooser.start is not None else draft
        drawn = chooser.draw(probs, "residual", 0)
        return chosen, state, drawn, chooser.uniforms(1, 0), *chooser.logprobs(logits, chosen)

    mx.compile(round_of_two)(rows(2))


@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p", "min-p", "everything"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_with_one_bad_logit_is_refused(name, bad, temperature):
    """-1 for that row, its neighbours are untouched."""
    chooser = sampler(replace(SAMPLINGS[name], temperature=temperature))
    logits, draft = rows(3), mx.array([9, 6], mx.int32)
    expected = values(chooser.pick(logits, chooser.start, draft, 0))
    logits[1, 20] = bad
    picked = chooser.pick(logits, chooser.start, draft, 0).tolist()
    assert picked == [expected[0], -1, expected[2]]


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("how", ["logits", "mask"])
def test_a_row_with_nothing_left_is_refused(name, how):
    """-1 where the grammar or the target leaves no id."""
    chooser, logits, mask = sampler(SAMPLINGS[name]), rows(1), None
    if how == "logits":
        logits = logits - math.inf
    else:
        mask = mx.zeros((1, VOCAB), mx.bool_)
    assert chooser.pick(logits, chooser.start, None, 0, mask).tolist() == [-1]


def test_suppressing_everything_is_refused():
    """The same through the request's own settings."""
    chooser = Sampler(Sampling(suppress_ids=tuple(range(VOCAB))), VOCAB, ())
    assert chooser.pick(rows(1), None, None, 0).tolist() == [-1]


def test_ids_outside_the_vocabulary_are_ignored():
    """An image placeholder in the prompt has no logit to touch."""
    sampling = replace(PENALTIES, suppress_ids=(VOCAB, -1), logit_bias={VOCAB + 3: 9.0})
    odd = Sampler(sampling, VOCAB, (*PROMPT, VOCAB, -1))
    logits = rows(1)
    expected = sampler(PENALTIES).distribution(logits, odd.start, None)
    assert mx.array_equal(odd.distribution(logits, odd.start, None), expected)


# Seeds


def stream_of(sampling: Sampling, choice: int = 0, n: int = 40) -> list[int]:
    chooser = Sampler(sampling, VOCAB, (), choice=choice)
    return values(chooser.pick(mx.zeros((n, VOCAB)), None, None, 0))


@pytest.mark.parametrize("other", [2, 1 + 2**32, 1 + 2**63, -1])
def test_another_seed_is_another_stream(other):
    """All 64 bits of a seed count."""
    assert stream_of(Sampling(temperature=1, seed=1)) != stream_of(
        Sampling(temperature=1, seed=other)
    )


def test_a_seed_repeats_its_stream():
    """Nothing but the arguments goes into an id."""
    sampling = Sampling(temperature=1, seed=2**63 + 1)
    assert stream_of(sampling) == stream_of(sampling)


def test_a_negative_seed_is_its_64_bit_twin():
    """-1 is 2⁶⁴ - 1."""
    assert stream_of(Sampling(temperature=1, seed=-1)) == stream_of(
        Sampling(temperature=1, seed=2**64 - 1)
    )


def test_another_choice_is_another_stream():
    """The n replies of one call differ."""
    sampling = Sampling(temperature=1, seed=1)
    assert stream_of(sampling, choice=0) != stream_of(sampling, choice=1)


def test_no_seed_is_a_random_one():
    """Two requests without a seed don't get the same reply."""
    assert stream_of(Sampling(temperature=1)) != stream_of(Sampling(temperature=1))


def test_streams_of_one_seed_differ():
    """The standard rule's three draws are independent of each other and of pick."""
    chooser, even = sampler(Sampling(temperature=1, seed=1)), mx.ones(VOCAB) / VOCAB
    drawn = {s: tuple(chooser.draw(even, s, p).item() for p in range(10)) for s in STREAMS}
    assert len(set(drawn.values())) == len(STREAMS)


@pytest.mark.parametrize("seed", range(2))
def test_one_id_of_many_seeds_follows_the_target(seed):
    """1,000 requests with different seeds, one id each: chi-square against the row's softmax."""
    row = mx.array([[1.0, 0.0, -1.0, 0.5]])
    picked = mx.concatenate(
        [
            Sampler(Sampling(temperature=1, seed=s), 4, ()).pick(row, None, None, 3)
            for s in range(seed * 10_000, seed * 10_000 + 1_000)
        ]
    )
    counts = np.bincount(np.array(picked), minlength=4)
    expected = reference_probs(Sampling(temperature=1), np.array(row[0]), (), ()) * 1_000
    assert stats.chisquare(counts, expected).pvalue > 1e-6


def test_uniforms_are_uniform():
    """Kolmogorov-Smirnov; 1 itself never comes, or a sure id could be refused."""
    drawn = np.array(sampler(Sampling(temperature=1, seed=8)).uniforms(50_000, 0))
    assert stats.kstest(drawn, "uniform").pvalue > 1e-6
    assert drawn.min() >= 0
    assert drawn.max() < 1


def test_draw_refuses_a_law_that_is_none():
    """NaN or all-zero probabilities give -1."""
    chooser = sampler(Sampling(temperature=1, seed=8))
    assert chooser.draw(mx.zeros(VOCAB), "residual", 0).item() == -1
    assert chooser.draw(mx.full((VOCAB,), math.nan), "residual", 0).item() == -1


def test_draw_never_gives_an_impossible_id():
    """Probability 0 is never drawn."""
    chooser, law = sampler(Sampling(temperature=1, seed=8)), mx.zeros(VOCAB)
    law[mx.array([3, 30])] = 0.5
    assert {chooser.draw(law, "draft", p).item() for p in range(50)} == {3, 30}


# Log-probabilities


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_logprobs_equal_the_reference(dtype):
    """Raw float32 log-softmax of the chosen id and of the t best, best first."""
    logits, chosen = rows(3).astype(dtype), mx.array([4, 0, 39], mx.int32)
    chooser = sampler(replace(EVERYTHING, logprobs=5))
    own, top_ids, top_values = chooser.logprobs(logits, chosen)
    expected = np.array(logits.astype(mx.float32), np.float64)
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    order = np.argsort(-expected, axis=-1, kind="stable")[:, :5]
    np.testing.assert_allclose(own, expected[range(3), chosen.tolist()], atol=1e-5)
    np.testing.assert_allclose(top_values, np.take_along_axis(expected, order, -1), atol=1e-5)
    np.testing.assert_allclose(
        np.take_along_axis(expected, np.array(top_ids), -1), top_values, atol=1e-5
    )


@pytest.mark.parametrize("n_top", [None, 0])
def test_logprobs_without_rivals_have_no_columns(n_top):
    """logprobs 0 asks for the chosen id alone."""
    _, top_ids, top = sampler(Sampling(logprobs=n_top)).logprobs(rows(3), mx.zeros(3, mx.int32))
    assert (top_ids.shape, top.shape) == ((3, 0), (3, 0))


def test_logprobs_are_finite():
    """An id the target gives no chance is written -9999: JSON has no infinity."""
    logits = mx.array([[0.0, -math.inf, -math.inf]])
    own, _, top = sampler(Sampling(logprobs=2), 3).logprobs(logits, mx.array([1], mx.int32))
    assert own.tolist() == [-9999.0]
    assert top.tolist() == [[0.0, -9999.0]]


def test_more_rivals_than_ids_gives_all_ids():
    """A vocabulary smaller than the number asked for is no error."""
    _, top_ids, _ = sampler(Sampling(logprobs=20), 3).logprobs(rows(1, 0, 3), mx.array([0]))
    assert sorted(values(top_ids[0])) == [0, 1, 2]
