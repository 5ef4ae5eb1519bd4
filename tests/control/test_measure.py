"""Recorded rounds in; costs, levels of acceptance and evidence out."""

import math
import random
from collections.abc import Sequence
from operator import mul
from statistics import mean

import pytest
from hypothesis import given, settings, strategies as st

from mlx_worker.control.measure import (
    CHANGED_PAIRS,
    CLEAR_VALUE,
    FULL_ROUNDS,
    FULL_STEPS,
    GAP_STEPS,
    LEVELS,
    N_BUCKETS,
    PAIR_MEMORY,
    PAIR_TOKENS,
    RECALL_REQUESTS,
    SURE_PAIRS,
    WINSOR,
    CostPair,
    Costs,
    Levels,
    LevelTable,
    Priced,
    RequestLevel,
    Sample,
    bucket_of,
    cost_pair,
    settled_mean,
)
from mlx_worker.records import MAX_DEPTH, Round

repeatable = settings(derandomize=True, deadline=None, max_examples=80)
DEPTHS = range(1, MAX_DEPTH + 1)
STEPS_MS = [10.0] * FULL_STEPS
ROUNDS_MS = [15.0] * FULL_ROUNDS


def true_cost(depth: int, bucket: int = 0) -> float:
    """What a round really costs in these tests; a curve never has it quite right."""
    return (1.2 + 0.11 * depth) * 1.08**bucket


def pairs_of(
    cost: float, depth: int = 3, n: int = 1, bucket: int = 0, weight: float = 1.0
) -> list[CostPair]:
    return [CostPair(depth, bucket, math.log(cost), weight)] * n


def noisy_pairs(rng: random.Random, n: int, depths: Sequence[int], cv: float) -> list[CostPair]:
    """In any order, at any of these depths and in any context."""
    return [
        CostPair(depth, bucket, math.log(true_cost(depth, bucket)) + rng.gauss(0, cv), 1.0)
        for depth, bucket in ((rng.choice(depths), rng.randrange(3)) for _ in range(n))
    ]


def accepted_at(rng: random.Random, level: float, depth: int) -> int:
    """How many drafts in a row are right where each is with this chance."""
    return next((n for n in range(depth) if rng.random() >= level), depth)


def heard(table: LevelTable, rounds: Sequence[tuple[int, int]]) -> RequestLevel:
    """A request that had these (depth, accepted)."""
    request = RequestLevel(table)
    for depth, accepted in rounds:
        request.hear(depth, accepted)
    return request


def rounds_at(level: float, n: int, seed: int = 0, depth: int = 4) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(depth, accepted_at(rng, level, depth)) for _ in range(n)]


# --- times ------------------------------------------------------------------------------------


def test_a_hiccup_is_cut_back():
    """It counts as what a slow moment could have been, not as what it was."""
    assert settled_mean([10.0, 10.0, 10.0, 40.0]) == pytest.approx((30 + WINSOR * 10) / 4)


def test_times_near_their_median_count_as_they_are():
    """Only hiccups are touched."""
    assert settled_mean([9.0, 10.0, 12.5, 14.9]) == pytest.approx(11.6)


def test_a_machine_that_slept_has_no_mean():
    """One gap tells that the times around it are not to be trusted either."""
    assert settled_mean([10.0] * 9 + [GAP_STEPS * 10.0]) is not None
    assert settled_mean([10.0] * 9 + [GAP_STEPS * 10.0 + 1]) is None


def test_no_times_have_no_mean():
    """Not zero, which would be a very fast machine."""
    assert settled_mean([]) is None


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(0, 0), (4095, 0), (4096, 1), (16383, 1), (16384, 2), (10**6, 2)]
)
def test_contexts_fall_into_three_buckets(tokens: int, bucket: int):
    """Below 4k, below 16k, above."""
    assert bucket_of(tokens) == bucket


def test_a_grammar_has_buckets_of_its_own():
    """Its plain steps are others: none is compared with those that are built ahead."""
    free = {bucket_of(tokens) for tokens in (0, 5000, 20_000)}
    held = {bucket_of(tokens, has_grammar=True) for tokens in (0, 5000, 20_000)}
    assert len(free) == len(held) == 3
    assert free | held == set(range(N_BUCKETS))


# --- a pair -----------------------------------------------------------------------------------


def test_a_pair_is_the_log_of_round_over_step():
    """With the depth and the context that it was measured at, in full weight."""
    pair = cost_pair(3, 1, ROUNDS_MS, STEPS_MS)
    assert pair is not None
    assert (pair.drafted, pair.bucket, pair.weight) == (3, 1, 1.0)
    assert pair.log_cost == pytest.approx(math.log(1.5))


@pytest.mark.parametrize(
    ("rounds_ms", "steps_ms"),
    [
        ([], STEPS_MS),
        (ROUNDS_MS, []),
        (ROUNDS_MS, STEPS_MS[: FULL_STEPS // 2 - 1]),
        ([*ROUNDS_MS, 15.0 * GAP_STEPS * 2], STEPS_MS),
        (ROUNDS_MS, [*STEPS_MS, 10.0 * GAP_STEPS * 2]),
    ],
    ids=["no-rounds", "no-steps", "few-steps", "slept-in-rounds", "slept-in-steps"],
)
def test_a_pair_that_says_nothing_is_none(rounds_ms: list[float], steps_ms: list[float]):
    """Too short on either side, or the machine slept in it."""
    assert cost_pair(3, 0, rounds_ms, steps_ms) is None


def test_a_short_pair_counts_for_less():
    """Half the rounds and half the steps that a full one has: a quarter."""
    pair = cost_pair(3, 0, ROUNDS_MS[: FULL_ROUNDS // 2], STEPS_MS[: FULL_STEPS // 2])
    assert pair is not None
    assert pair.weight == pytest.approx(0.25)


# --- costs ------------------------------------------------------------------------------------


def test_costs_are_recovered_at_every_depth_and_context():
    """From 96 pairs with a noise of 8 % each; by default nothing is known of the machine."""
    costs = Costs()
    costs.hear(noisy_pairs(random.Random(1), 96, [1, 2, 4, 8], cv=0.08))
    for bucket in range(3):
        table = costs.table(bucket)
        for depth in (1, 2, 4, 8):
            assert table[depth] == pytest.approx(true_cost(depth, bucket), rel=0.07)


def test_a_round_without_a_proposal_has_a_cost_of_its_own():
    """Mostly that of a plain step, whatever deep rounds cost."""
    costs = Costs(curve={depth: true_cost(depth) for depth in DEPTHS})
    costs.hear([*pairs_of(1.03, depth=0, n=20), *pairs_of(true_cost(8), depth=8, n=20)])
    assert costs.table(0)[0] == pytest.approx(1.03, rel=0.02)
    assert costs.table(0)[8] == pytest.approx(true_cost(8), rel=0.02)


# --- stalls -----------------------------------------------------------------------------------


def heard_tails(
    rounds_ms: Sequence[float], steps_ms: Sequence[float] = STEPS_MS, n: int = 1
) -> Costs:
    """Costs of 1.5 that heard so many requests with these times."""
    costs = Costs()
    for _ in range(n):
        costs.hear_tails([rounds_ms], [steps_ms])
        costs.hear(pairs_of(1.5))
    return costs


def stalled(by: float, n_rounds: int = 20) -> list[float]:
    """Rounds of which one takes so many times what the others take."""
    return [15.0] * (n_rounds - 1) + [15.0 * by]


def test_a_stall_that_only_rounds_have_is_part_of_their_cost():
    """One round in twenty takes twenty times as long: twice as long on average."""
    costs = heard_tails(stalled(20.0), n=12)
    assert math.exp(costs.stalls) == pytest.approx(1.95, rel=0.05)
    assert costs.table(0)[3] == pytest.approx(1.95 * 1.5, rel=0.08)
    assert costs.variance > heard_tails(ROUNDS_MS, n=12).variance


def test_a_few_hiccups_are_the_machine_s():
    """Nobody can tell whose they were."""
    assert heard_tails(stalled(20.0), n=5).stalls == 0.0


def test_hiccups_that_plain_steps_have_too_are_the_machine_s():
    """However many."""
    steps_ms = [10.0] * 19 + [200.0]
    assert heard_tails(stalled(20.0), steps_ms, n=60).stalls == 0.0


def test_a_machine_that_sleeps_a_night_is_one_hiccup():
    """It neither counts as a stall nor hides those that there are."""
    costs = heard_tails(stalled(1e6))
    assert costs.stalls == 0.0
    for _ in range(30):
        costs.hear_tails([stalled(20.0)], [STEPS_MS])
    assert costs.stalls > 0.3


def test_stalls_are_forgotten_once_they_are_over():
    """After some hundred requests."""
    costs = heard_tails(stalled(20.0), n=12)
    for _ in range(400):
        costs.hear_tails([ROUNDS_MS * 5], [STEPS_MS])
    assert costs.stalls < 0.02


def test_an_outlier_moves_a_cost_little():
    """A pair that was ten times too dear counts as one that was twice too dear."""
    costs, twice = Costs(), Costs()
    costs.hear([*pairs_of(1.5, n=23), *pairs_of(15.0)])
    twice.hear([*pairs_of(1.5, n=23), *pairs_of(3.0)])
    assert costs.table(0) == pytest.approx(twice.table(0))
    assert costs.table(0)[3] == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("busy", [1.2, 1.6, 2.0])
def test_a_cost_is_the_mean_of_what_rounds_take(busy: float):
    """A machine that is fast for one request and slow for the next: neither alone is its cost."""
    costs = Costs()
    for n in range(24):
        costs.hear(pairs_of(1.5 * (busy if n % 2 else 1.0), n=4))
    assert costs.table(0)[3] == pytest.approx(1.5 * (1 + busy) / 2, rel=0.02)


def test_pairs_correct_the_level_of_the_curve_and_it_ranks_the_untimed_depths():
    """Timed alone at load, everything was 30 % too cheap; only depth 2 was timed in a reply."""
    costs = Costs(curve={depth: 0.7 * true_cost(depth) for depth in DEPTHS})
    costs.hear(pairs_of(true_cost(2), depth=2, n=8))
    assert costs.table(0)[1:] == pytest.approx([true_cost(depth) for depth in DEPTHS], rel=0.01)


def test_without_pairs_the_curve_is_the_cost():
    """It ranks depths for the very first request."""
    costs = Costs(curve={depth: true_cost(depth) for depth in DEPTHS})
    assert costs.table(0)[1:] == pytest.approx([true_cost(depth) for depth in DEPTHS])


def test_a_depth_that_differs_from_the_curve_gets_its_own_price():
    """Depth 8 was timed to be half dearer than the curve has it, depth 2 just as it has it."""
    costs = Costs(curve={depth: true_cost(depth) for depth in DEPTHS})
    costs.hear(pairs_of(true_cost(2), 2, n=20) + pairs_of(1.5 * true_cost(8), 8, n=20))
    assert costs.table(0)[2] == pytest.approx(true_cost(2), rel=0.04)
    assert costs.table(0)[8] == pytest.approx(1.5 * true_cost(8), rel=0.04)


def test_newer_pairs_count_for_more():
    """A machine changes over the hours, too slowly for one request to contradict the last."""
    rising, falling = Costs(), Costs()
    prices = [1.4 * 1.002**n for n in range(60)]
    rising.hear([pair for price in prices for pair in pairs_of(price)])
    falling.hear([pair for price in reversed(prices) for pair in pairs_of(price)])
    assert rising.table(0)[3] > 1.005 * falling.table(0)[3]


def test_more_pairs_make_costs_surer():
    """The variance that a verdict allows for shrinks with them."""
    costs = Costs()
    variances = [costs.variance]
    for _ in range(5):
        costs.hear(pairs_of(1.5, n=4))
        variances.append(costs.variance)
    assert variances == sorted(variances, reverse=True)
    assert variances[-1] < variances[0] / 10


def test_costs_are_sure_from_some_pairs_on():
    """Until then the next requests time some more."""
    costs = Costs()
    costs.hear(pairs_of(1.5, n=SURE_PAIRS - 1))
    assert not costs.is_sure
    costs.hear(pairs_of(1.5))
    assert costs.is_sure


@pytest.mark.parametrize("now", [2.2, 1.1])
def test_pairs_that_contradict_the_old_ones_replace_them(now: float):
    """Another program came or went: what was measured before it says nothing any more."""
    costs = Costs()
    costs.hear(pairs_of(1.5, n=4 * SURE_PAIRS))
    for _ in range(2):
        costs.hear(pairs_of(now, n=4))
    assert costs.pairs == pairs_of(now, n=8)
    assert costs.table(0)[3] == pytest.approx(now)


def test_a_request_that_contradicts_alone_replaces_nothing():
    """The device was busy for as long as it lasted; but costs are in doubt until the next one."""
    costs = Costs()
    costs.hear(pairs_of(1.5, n=4 * SURE_PAIRS))
    costs.hear(pairs_of(1.9, n=4))
    assert not costs.is_sure
    costs.hear(pairs_of(1.5, n=4))
    assert costs.is_sure
    assert costs.table(0)[3] == pytest.approx(1.5)


@pytest.mark.parametrize("once", [1.9, 3.0, 1.2, 0.7])
def test_a_moment_leaves_nothing_behind(once: float):
    """However far off it was: its pairs wait for the next request's, and are forgotten."""
    costs = Costs()
    costs.hear(pairs_of(1.5, n=4 * SURE_PAIRS))
    before = list(costs.table(0))
    costs.hear(pairs_of(once, n=4))
    assert costs.is_doubtful
    assert costs.table(0) == before
    costs.hear(pairs_of(1.5, n=4))
    assert not costs.is_doubtful
    assert costs.table(0) == pytest.approx(before)


def test_requests_that_contradict_both_ways_replace_nothing():
    """One too dear, one too cheap: that is noise."""
    costs = Costs()
    costs.hear(pairs_of(1.5, n=4 * SURE_PAIRS))
    costs.hear(pairs_of(1.9, n=4))
    costs.hear(pairs_of(1.2, n=4))
    assert costs.table(0)[3] == pytest.approx(1.5)
    assert costs.is_doubtful


@pytest.mark.parametrize("every", [2, 3, 6])
def test_what_contradicts_again_and_again_is_part_of_the_cost(every: int):
    """Not twice in a row, but too often for a moment: it used to be dismissed each time."""
    costs = Costs()
    costs.hear(pairs_of(1.5, n=4 * SURE_PAIRS))
    for n in range(40 * every):
        costs.hear(pairs_of(3.0 if n % every == 0 else 1.5, n=4))
    true = 1.5 * (1 + 1 / every)
    assert costs.table(0)[3] == pytest.approx(true, rel=0.1)


def test_two_moments_far_apart_stay_moments():
    """Once in RECALL_REQUESTS or less, they say little of what rounds cost."""
    costs = Costs()
    costs.hear(pairs_of(1.5, n=4 * SURE_PAIRS))
    before = list(costs.table(0))
    for n in range(4 * (RECALL_REQUESTS + 2)):
        costs.hear(pairs_of(3.0 if n % (RECALL_REQUESTS + 2) == 0 else 1.5, n=4))
    assert costs.table(0) == pytest.approx(before)


@pytest.mark.parametrize(
    "little", [pairs_of(2.4, weight=0.25), pairs_of(2.4, bucket=1, n=2)], ids=["short", "elsewhere"]
)
def test_a_request_that_does_not_tell_leaves_the_doubt_to_the_next(little: list[CostPair]):
    """Too short, or of a context that isn't known: it used to clear the machine of a change."""
    costs = Costs()
    costs.hear(pairs_of(1.5, n=4 * SURE_PAIRS))
    costs.hear(pairs_of(2.4, n=4))
    costs.hear(little)
    assert costs.is_doubtful
    costs.hear(pairs_of(2.4, n=4))
    assert not costs.is_doubtful
    assert costs.table(0)[3] == pytest.approx(2.4, rel=0.02)


def test_doubt_ends_where_nothing_ever_tells():
    """All requests moved to another context for good: the old one's doubt is nobody's concern."""
    costs = Costs()
    costs.hear(pairs_of(1.5, n=4 * SURE_PAIRS))
    costs.hear(pairs_of(2.4, n=4))
    for _ in range(SURE_PAIRS):
        costs.hear(pairs_of(1.6, bucket=2, weight=0.5))
    assert not costs.is_doubtful


def test_starting_anew_ends_all_doubt():
    """What was suspected of the old costs says nothing of the new ones."""
    costs = Costs()
    costs.hear(pairs_of(1.5, n=4 * SURE_PAIRS))
    for price in (2.4, 1.5, 1.1):
        costs.hear(pairs_of(price, n=4))
    costs.renew(pairs_of(1.1, n=SURE_PAIRS))
    assert costs.is_sure
    assert (costs.suspects, costs.waiting, costs.dismissed) == ([], [], [])
    costs.hear(pairs_of(2.4, n=4))
    assert costs.pairs == pairs_of(1.1, n=SURE_PAIRS)


def test_one_pair_alone_contradicts_nothing():
    """It is one opinion, and may be a hiccup that lasted as long as the pair."""
    costs = Costs()
    costs.hear(pairs_of(1.5, n=SURE_PAIRS))
    costs.hear(pairs_of(3.0, weight=0.9 * CHANGED_PAIRS))
    assert len(costs.pairs) == SURE_PAIRS + 1


def test_unsure_costs_are_not_contradicted():
    """A few pairs of the first request are no ground to call the second one a change."""
    costs = Costs()
    costs.hear(pairs_of(1.5, n=SURE_PAIRS - 1))
    costs.hear(pairs_of(3.0, n=4))
    assert len(costs.pairs) == SURE_PAIRS + 3


def test_noise_is_no_change():
    """Two thousand requests on a machine whose pairs scatter by 8 % forget next to nothing."""
    rng, costs, n_forgotten = random.Random(3), Costs(), 0
    for _ in range(2000):
        before = len(costs.pairs)
        costs.hear(noisy_pairs(rng, 4, [2, 4], cv=0.08))
        n_forgotten += len(costs.pairs) < min(before + 4, PAIR_MEMORY)
    assert n_forgotten <= 10


def test_the_memory_of_pairs_is_bounded():
    """A worker runs for weeks."""
    costs = Costs()
    for _ in range(PAIR_MEMORY):
        costs.hear(pairs_of(1.5, n=4))
    assert len(costs.pairs) == PAIR_MEMORY


def test_a_request_without_pairs_changes_no_cost():
    """Most requests while On have none."""
    costs = Costs()
    costs.hear(pairs_of(1.5, n=4))
    before = costs.table(0)
    costs.hear([])
    assert costs.table(0) == before


prices = st.floats(0.5, 6.0)


@repeatable
@given(
    st.lists(st.tuples(prices, st.floats(1.0, 3.0)), min_size=1, max_size=12),
    st.integers(1, MAX_DEPTH),
)
def test_slower_rounds_never_make_a_depth_cheaper(raised: list[tuple[float, float]], depth: int):
    """Any of the pairs at one depth raised, by anything: hiccups are cut, the order stays."""
    usual, slower = Costs(), Costs()
    usual.hear([pair for price, _ in raised for pair in pairs_of(price, depth)])
    slower.hear([pair for price, by in raised for pair in pairs_of(price * by, depth)])
    for before, after in zip(usual.table(0), slower.table(0), strict=True):
        assert after >= before * (1 - 1e-12)


def test_plain_requests_do_not_make_stalls_forgotten():
    """While Off none is drafted: the figure crept up to +0 % on an unchanged machine."""
    costs = heard_tails(stalled(20.0), n=12)
    before = costs.stalls
    for _ in range(200):
        costs.hear_tails([], [STEPS_MS])
    assert costs.stalls == before > 0


# --- levels of acceptance ---------------------------------------------------------------------


def test_the_chances_of_a_round_sum_to_one():
    """Over how many drafts are right, at each depth and level."""
    table = Levels().table("greedy")
    for depth in DEPTHS:
        for g in range(len(LEVELS)):
            assert math.fsum(math.exp(row[g]) for row in table.outcome[depth]) == pytest.approx(1)


def test_expected_tokens_are_those_of_the_chances():
    """Two tables of one thing agree: accepted + 1 times its chance."""
    table = Levels().table("greedy")
    for depth in DEPTHS:
        for g in range(len(LEVELS)):
            chances = [math.exp(row[g]) for row in table.outcome[depth]]
            tokens = math.fsum((n + 1) * chance for n, chance in enumerate(chances))
            assert table.tokens[depth][g] == pytest.approx(tokens)


def test_a_level_is_the_chance_of_the_first_draft():
    """So a round of depth 1 gives one token more with that chance."""
    assert Levels().table("greedy").tokens[1] == pytest.approx([1 + level for level in LEVELS])


@pytest.mark.parametrize("level", [0.2, 0.5, 0.82, 0.97])
def test_a_request_is_placed_within_some_rounds(level: float):
    """Thirty rounds of depth 4, without a prior to lean on; the mean of twenty requests."""
    table = Levels().table("greedy")
    found = [heard(table, rounds_at(level, 30, seed)).mean_level() for seed in range(20)]
    assert mean(found) == pytest.approx(level, abs=0.07)


def test_an_unheard_request_is_believed_to_be_as_others_were():
    """Its shares are the prior of its kind."""
    table = Levels().table("greedy")
    assert RequestLevel(table).shares() == pytest.approx([math.exp(p) for p in table.prior])


def test_a_request_that_moved_on_is_believed_half():
    """After a plain stretch its level lies between what it was and what others are."""
    table = Levels().table("greedy")
    request = heard(table, rounds_at(0.05, 20))
    low, usual = request.mean_level(), RequestLevel(table).mean_level()
    request.relax()
    assert low < request.mean_level() < usual


def test_a_request_follows_its_text():
    """Prose after JSON: what the first thousand rounds taught fades within a hundred."""
    table = Levels().table("greedy")
    request = heard(table, rounds_at(0.97, 1000) + rounds_at(0.05, 100))
    assert request.mean_level() < 0.3


def learnt(levels: Sequence[float], kind: str = "greedy", n: int = 40) -> Levels:
    """After n requests, at these levels in turn."""
    known = Levels()
    for i in range(n):
        rounds = rounds_at(levels[i % len(levels)], 40, seed=i)
        known.hear(kind, heard(known.table(kind), rounds))
    return known


def test_clumps_of_requests_are_learnt_as_clumps():
    """JSON and prose, nothing in between: a mean with a spread would put most there."""
    chances = [math.exp(p) for p in learnt([0.2, 0.94]).prior("greedy")]
    low, middle, high = (sum(chances[part]) for part in (slice(3), slice(3, 6), slice(6, None)))
    assert low > 0.35
    assert high > 0.35
    assert middle < 0.15


def test_a_kind_never_seen_borrows_from_all():
    """Hot sampling is taken to be as greedy was until it shows itself."""
    known = learnt([0.2, 0.94])
    all_kinds = [math.exp(p) for p in known.prior("")]
    assert [math.exp(p) for p in known.prior("hot")] == pytest.approx(all_kinds, abs=0.01)


def test_a_kind_often_seen_is_known_for_itself():
    """However different all the others are."""
    known = learnt([0.94])
    for i in range(20):
        known.hear("hot", heard(known.table("hot"), rounds_at(0.2, 40, seed=i)))
    assert RequestLevel(known.table("hot")).mean_level() < 0.3
    assert RequestLevel(known.table("greedy")).mean_level() > 0.85


def test_what_traffic_was_like_long_ago_fades():
    """A change of level is believed after some requests."""
    known = learnt([0.94], n=60)
    for i in range(40):
        known.hear("greedy", heard(known.table("greedy"), rounds_at(0.2, 40, seed=i)))
    assert RequestLevel(known.table("greedy")).mean_level() < 0.5


def test_a_request_without_rounds_teaches_nothing():
    """A reply that was plain throughout has shown no level."""
    known = Levels()
    known.hear("greedy", RequestLevel(known.table("greedy")))
    assert known == Levels()


def test_positions_that_fail_more_are_learnt():
    """A draft whose second id is wrong every other time, its first one time in ten."""
    known, rng = Levels(), random.Random(5)
    for _ in range(60):
        request = RequestLevel(known.table("greedy"))
        for _ in range(20):
            first = rng.random() < 0.9
            request.hear(2, (1 + (rng.random() < 0.5)) if first else 0)
        known.hear("greedy", request)
    shape = known.shape
    assert shape[1] == 1
    assert shape[2] > 1.7
    assert known.table("greedy").tokens[2] < Levels().table("greedy").tokens[2]


# --- worse acceptance -------------------------------------------------------------------------

rounds_and_worse = st.lists(
    st.integers(1, MAX_DEPTH).flatmap(
        lambda depth: st.integers(0, depth).flatmap(
            lambda accepted: st.tuples(st.just(depth), st.just(accepted), st.integers(0, accepted))
        )
    ),
    min_size=1,
    max_size=25,
)  # (depth, accepted, the same or fewer)
cost_tables = st.tuples(st.floats(0.8, 3.0), st.floats(0.0, 0.6)).map(
    lambda line: [1.0] + [line[0] + line[1] * depth for depth in DEPTHS]
)
memories = st.tuples(
    st.lists(st.sampled_from(LEVELS), max_size=6),  # of earlier requests
    st.lists(st.floats(0.0, 300.0), min_size=MAX_DEPTH + 1, max_size=MAX_DEPTH + 1),  # failures
).map(lambda given: remembered(*given))


def remembered(levels: Sequence[float], failures: list[float]) -> LevelTable:
    """Of a draft whose positions differ in any way, after requests at these levels."""
    known = learnt(levels, n=len(levels)) if levels else Levels()
    known.failures, known.expected = failures, [100.0] * (MAX_DEPTH + 1)
    return known.table("greedy")


def both(
    table: LevelTable, rounds: Sequence[tuple[int, int, int]]
) -> tuple[RequestLevel, RequestLevel]:
    """The request as it was, and with the worse rounds."""
    usual = heard(table, [(depth, accepted) for depth, accepted, _ in rounds])
    worse = heard(table, [(depth, fewer) for depth, _, fewer in rounds])
    return usual, worse


@repeatable
@given(memories, rounds_and_worse, cost_tables)
def test_worse_acceptance_never_raises_the_depth(
    table: LevelTable, rounds: list[tuple[int, int, int]], costs: list[float]
):
    """In any of the rounds, at any costs, whatever earlier requests were like."""
    usual, worse = both(table, rounds)
    assert worse.best_depth(costs, DEPTHS)[0] <= usual.best_depth(costs, DEPTHS)[0]


@repeatable
@given(memories, rounds_and_worse, cost_tables)
def test_worse_acceptance_never_raises_what_a_round_is_worth(
    table: LevelTable, rounds: list[tuple[int, int, int]], costs: list[float]
):
    """Tokens a ps at the best depth."""
    usual, worse = both(table, rounds)
    most = usual.best_depth(costs, DEPTHS)[1]
    assert worse.best_depth(costs, DEPTHS)[1] <= most * (1 + 1e-12)


@repeatable
@given(memories, rounds_and_worse, cost_tables, st.integers(1, MAX_DEPTH), st.floats(1, 300))
def test_worse_acceptance_never_makes_a_round_pay(
    table: LevelTable,
    rounds: list[tuple[int, int, int]],
    costs: list[float],
    depth: int,
    tokens_ahead: float,
):
    """At a given depth: neither by what it may win nor by what it may teach."""
    usual, worse = both(table, rounds)

    def pays(request: RequestLevel) -> bool:
        value = request.best_depth(costs, [depth])[1]
        return request.pays(costs, depth, value, tokens_ahead)

    assert pays(worse) <= pays(usual)


@repeatable
@given(memories, rounds_and_worse, cost_tables, st.floats(1.0, 2.0))
def test_dearer_rounds_never_pay_where_cheaper_ones_did_not(
    table: LevelTable, rounds: list[tuple[int, int, int]], costs: list[float], by: float
):
    """At a given depth; a machine that slows down stops sooner."""
    request, dearer = both(table, rounds)[0], [by * cost for cost in costs]
    for depth in DEPTHS:
        value, dear_value = (request.best_depth(c, [depth])[1] for c in (costs, dearer))
        assert request.pays(dearer, depth, dear_value, 100.0) <= request.pays(
            costs, depth, value, 100.0
        )


def test_the_deepest_pays_most_where_all_is_right():
    """And the shallowest where nothing is; costs grow with the depth."""
    costs = [1.0] + [true_cost(depth) for depth in DEPTHS]
    table = Levels().table("greedy")
    assert heard(table, [(4, 4)] * 40).best_depth(costs, DEPTHS)[0] == MAX_DEPTH
    assert heard(table, [(4, 0)] * 40).best_depth(costs, DEPTHS)[0] == 1


def test_of_equal_depths_the_shallower_is_the_best():
    """It wastes less; at costs that make every depth worth the same."""
    table = Levels().table("greedy")
    request = heard(table, [(4, 4)] * 9)
    even = [math.fsum(map(mul, request.shares(), row)) for row in table.tokens]
    assert request.best_depth(even, [3, 5]) == (3, 1.0)


def test_an_unlikely_gain_is_looked_for_where_the_reply_is_long():
    """One request in five gains much; finding out costs little beside what is still to come."""
    table = learnt([0.05, 0.05, 0.05, 0.05, 0.97]).table("greedy")
    request, costs = RequestLevel(table), [1.0, 1.9, *[9.0] * (MAX_DEPTH - 1)]
    _, value = request.best_depth(costs, [1])
    assert value < CLEAR_VALUE
    assert not request.pays(costs, 1, value, 1.0)
    assert request.pays(costs, 1, value, 2000.0)


# --- one request's evidence -------------------------------------------------------------------


def sample_of(rounds: Sequence[tuple[int, int]], plain_tokens: int = 0) -> Sample:
    sample = Sample(plain_tokens=plain_tokens)
    for depth, accepted in rounds:
        sample.hear(Round(depth, depth, accepted, 1.0, 0))
        sample.hear_at_every_depth(depth, depth, accepted, lambda _: [0.0] * (MAX_DEPTH + 1))
    return sample


COSTS = [1.0] + [true_cost(depth) for depth in DEPTHS]


def test_tau_is_time_over_tokens():
    """ps of the rounds, by the costs given, over what they gave."""
    sample = sample_of([(3, 2)] * 6)
    assert sample.tau(COSTS)[0] == pytest.approx(COSTS[3] / 3)


def test_plain_tokens_of_a_request_that_stopped_draw_tau_to_one():
    """Six rounds of 3 tokens, and as many tokens written plainly."""
    sample = sample_of([(3, 2)] * 6, plain_tokens=18)
    assert sample.tau(COSTS)[0] == pytest.approx((COSTS[3] / 3 + 1) / 2)


def test_rounds_of_several_depths_are_priced_each_at_its_own():
    """As a request runs while On."""
    sample = sample_of([(1, 1), (8, 1)])
    assert sample.cost(COSTS) == pytest.approx(COSTS[1] + COSTS[8])
    assert sample.tau(COSTS)[0] == pytest.approx((COSTS[1] + COSTS[8]) / 4)


@pytest.mark.parametrize("level", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("depth", [2, 4])
def test_tau_of_a_few_rounds_is_unbiased(level: float, depth: int):
    """Rounds that end with so many tokens; the mean of what each round took a token is not."""
    rng, taus, naive = random.Random(11), list[float](), list[float]()
    for _ in range(2000):
        sample, of_rounds = Sample(), list[float]()
        while sample.tokens < PAIR_TOKENS:
            accepted = accepted_at(rng, level, depth)
            sample.hear(Round(depth, depth, accepted, 1.0, 0))
            of_rounds.append(COSTS[depth] / (accepted + 1))
        taus.append(sample.tau(COSTS)[0])
        naive.append(mean(of_rounds))
    truth = COSTS[depth] / math.fsum(level**i for i in range(depth + 1))
    assert mean(taus) == pytest.approx(truth, rel=0.02)
    assert mean(naive) > 1.04 * truth


@repeatable
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 4))
def test_a_round_prices_every_shallower_depth_as_if_it_had_run_there(
    accepted: list[int], depth: int
):
    """A draft cut short has the same first ids, so nothing about it is a guess."""
    deep = sample_of([(4, n) for n in accepted])
    shallow = sample_of([(depth, min(n, depth)) for n in accepted])
    found = deep.tau_at(depth, COSTS)
    assert found == shallow.tau_at(depth, COSTS)
    assert found[0] == pytest.approx(shallow.tau(COSTS)[0], rel=1e-12)


def test_a_round_with_a_wrong_draft_prices_every_deeper_depth_exactly():
    """What follows the wrong one would have been wrong whatever it was."""
    shallow = sample_of([(2, 1), (1, 0), (4, 3)])
    assert shallow.tau_at(8, COSTS)[0] == pytest.approx(3 * COSTS[8] / (2 + 1 + 4))


def test_a_round_all_of_whose_drafts_were_right_prices_deeper_ones_by_its_request():
    """By what more drafts would have given there: on average as if it had drafted deeper."""
    rng = random.Random(3)
    table = Levels().table("greedy")
    taus = {"deep": list[float](), "shallow": list[float]()}
    for level in (0.35, 0.62, 0.82, 0.94) * 50:
        accepted = [accepted_at(rng, level, 8) for _ in range(40)]
        for name, depth in (("deep", 8), ("shallow", 3)):
            rounds = [(depth, min(n, depth)) for n in accepted]
            request, sample = heard(table, rounds), Sample()
            for planned, n in rounds:
                sample.hear_at_every_depth(planned, planned, n, request.beyond)
            taus[name].append(sample.tau_at(8, COSTS)[0])
    assert mean(taus["shallow"]) == pytest.approx(mean(taus["deep"]), rel=0.02)


def test_a_round_that_proposed_nothing_is_priced_as_such_at_every_depth():
    """A deeper plan would have found nothing either."""
    sample = Sample()
    for drafted, accepted in ((0, 0), (0, 0), (4, 4)):
        sample.hear(Round(drafted, drafted, accepted, 1.0, 0))
        sample.hear_at_every_depth(4, drafted, accepted, lambda _: [0.0] * (MAX_DEPTH + 1))
    costs = [1.1, *COSTS[1:]]
    assert sample.tau(costs)[0] == pytest.approx((2 * 1.1 + COSTS[4]) / 7)
    assert sample.tau_at(2, costs)[0] == pytest.approx((2 * 1.1 + COSTS[2]) / 5)


def test_more_tokens_weigh_more_but_ever_less_so():
    """One pair counts half, three pairs three quarters."""
    one, three = (sample_of([(3, 3)] * (n * PAIR_TOKENS // 4)).tau(COSTS)[1] for n in (1, 3))
    assert (one, three) == pytest.approx((0.5, 0.75))


def test_the_variance_of_tau_is_what_it_scatters_by():
    """As the rounds of one request tell it, against many requests of as many rounds."""
    rng = random.Random(13)
    samples = [sample_of([(4, accepted_at(rng, 0.7, 4)) for _ in range(12)]) for _ in range(1500)]
    found = [sample.tau_at(4, COSTS) for sample in samples]
    taus = [tau for tau, _, _ in found]
    told = mean(variance for _, _, variance in found)
    centre = mean(taus)
    assert told == pytest.approx(mean((tau / centre - 1) ** 2 for tau in taus), rel=0.15)


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "costs", "forget", "replace"]),
        st.integers(1, MAX_DEPTH),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=30,
)


@repeatable
@given(steps=steps)
def test_samples_priced_one_by_one_are_priced_as_all_at_once(steps: list[tuple[str, int, int]]):
    """Whatever comes: a sample more, the oldest gone, other costs, a new measurement."""
    most, kept, samples = 5, Priced(), list[Sample]()
    tables = [COSTS] * N_BUCKETS
    for what, n, bucket in steps:
        one = sample_of([(n, n // 2)] * n, plain_tokens=bucket)
        one.bucket = bucket
        match what:
            case "add":
                samples = [*samples, one][-most:]
            case "costs":
                tables = [*tables[:bucket], [n * cost for cost in COSTS], *tables[bucket + 1 :]]
            case "forget":
                samples = []
            case _:
                samples = [one] * n
        assert kept.take_in(samples, tables) or what == "costs" or not samples
        at_once = Priced()
        at_once.take_in(samples, tables)
        assert vars(kept) == vars(at_once)
        assert not kept.take_in(samples, tables)
        assert kept.cost == pytest.approx(sum(s.cost(tables[s.bucket]) for s in samples))
