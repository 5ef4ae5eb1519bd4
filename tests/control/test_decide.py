"""The fixed-sample rule and the sequential one: ratios or samples in, verdicts out."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, stdev

import pytest
from hypothesis import given, settings, strategies as st
from scipy import integrate, stats

from mlx_worker.control.decide import (
    BIG_EFFECT_Z,
    BOUNDARY,
    DOUBTED_LOOKS,
    LEAST_GAIN,
    LEAST_PICKINGS,
    LEVEL_LOOKS,
    MIN_BIG_LOOKS,
    MIN_LOOKS,
    SMALL_EFFECT,
    SPREAD,
    SPREAD_PRIOR,
    Evidence,
    Ratios,
    Verdict,
    best_depth,
    decide,
    estimate_speedup,
    held_out_ratios,
    judge,
    pickings,
    student_t,
    weigh,
)
from mlx_worker.control.measure import CostPair, Costs, Sample
from mlx_worker.records import MAX_DEPTH, Round

FASTER: list[Ratios] = [{2: 0.80, 4: 0.90}, {2: 0.82, 4: 0.95}, {2: 0.79, 4: 0.88}]
SLOWER: list[Ratios] = [{1: 1.20, 2: 1.40}, {1: 1.25, 2: 1.50}, {1: 1.22, 2: 1.30}]
# Single requests gain, but not surely so: mean 0.95 with a spread of a fifth.
UNSURE: list[Ratios] = [{2: 0.70}, {2: 1.20}, {2: 0.85}, {2: 1.05}]


def random_table(seed: int, n: int, depths: tuple[int, ...] = (1, 2, 3, 4)) -> list[Ratios]:
    """Requests with spread of their own; every depth level with plain on average."""
    rng = random.Random(seed)
    return [{depth: math.exp(rng.gauss(0, 0.15)) for depth in depths} for _ in range(n)]


# --- the verdict ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "text", "depth"),
    [(FASTER, "On, +24%", 2), (SLOWER, "Off, −18%", 1), (UNSURE, "Off, +0%", 2)],
)
def test_recorded_tables_give_their_verdicts(table: list[Ratios], text: str, depth: int):
    """Faster is On, slower is Off with its cost, and faster but not surely so is a level Off."""
    verdict = decide(table)
    assert (verdict.text, verdict.depth) == (text, depth)


def test_the_figure_is_one_over_the_mean_ratio():
    """Not the mean of the requests' own speed-ups, which one lucky request would dominate."""
    assert decide([{2: 0.25}, {2: 1.0}]).estimate.speedup == pytest.approx(1 / 0.625 - 1)


def test_on_needs_a_lower_end_above_zero():
    """A point estimate above zero is not enough."""
    verdict = decide(UNSURE)
    assert verdict.estimate.speedup > 0
    assert verdict.estimate.low is not None
    assert verdict.estimate.low < 0
    assert not verdict.is_on


def test_one_request_is_off_without_an_interval():
    """However fast it was: there is no spread to judge by."""
    verdict = decide([{2: 0.3}])
    assert (verdict.is_on, verdict.estimate.low, verdict.estimate.high) == (False, None, None)
    assert verdict.text == "Off, +0%"


def test_a_sure_gain_below_one_percent_is_off():
    """On would read +0 %, which nobody could tell from Off."""
    verdict = decide([{1: 0.995}] * 5)
    assert verdict.estimate.low is not None
    assert verdict.estimate.low > 0
    assert (verdict.is_on, verdict.text) == (False, "Off, +0%")


def test_requests_that_are_all_alike_have_no_width():
    """No spread, so the interval is the figure."""
    estimate = decide([{3: 0.8}] * 4).estimate
    assert estimate.low == pytest.approx(estimate.speedup) == pytest.approx(estimate.high)


# --- choosing the depth -----------------------------------------------------------------------


def test_each_request_counts_at_the_depth_that_the_others_choose():
    """The fourth request likes depth 2, the rest like 1, so its own favourite doesn't count."""
    table: list[Ratios] = [{1: 0.8, 2: 0.9}, {1: 0.8, 2: 0.9}, {1: 0.8, 2: 0.9}, {1: 1.1, 2: 0.95}]
    assert held_out_ratios(table) == [0.8, 0.8, 0.8, 1.1]


def test_when_all_agree_the_figure_is_that_of_the_depth():
    """Leaving one out changes nothing then."""
    assert decide(FASTER).estimate == estimate_speedup([ratios[2] for ratios in FASTER])


def test_of_equal_depths_the_shallower_is_chosen():
    """It wastes less."""
    assert best_depth([{4: 0.9, 2: 0.9}, {4: 0.7, 2: 0.7}]) == 2


def test_choosing_among_level_depths_does_not_flatter():
    """Picking the luckiest of eight level depths would look 5 % faster; holding out does not."""
    depths = (1, 2, 3, 4, 5, 6, 7, 8)
    honest, lucky = [], []
    for seed in range(400):
        table = random_table(seed, 12, depths)
        honest.append(mean(held_out_ratios(table)))
        lucky.append(mean(ratios[best_depth(table)] for ratios in table))
    level = math.exp(0.15**2 / 2)  # the mean of the lognormal ratios
    assert mean(lucky) < 0.96 * level
    assert mean(honest) == pytest.approx(level, abs=0.01)


def test_a_draft_without_effect_is_rarely_called_on():
    """A one-sided 5 % rule; choosing among four depths that move together adds little to that."""
    n_on, n_runs = 0, 1000
    for seed in range(n_runs):
        rng = random.Random(seed)
        content = [rng.gauss(-(0.25**2) / 2, 0.25) for _ in range(18)]
        table: list[Ratios] = [
            {depth: math.exp(shared + rng.gauss(0, 0.03)) for depth in (1, 2, 3, 4)}
            for shared in content
        ]
        n_on += decide(table).is_on
    assert n_on / n_runs < 0.09


# --- properties -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_any_table_gives_a_verdict_that_holds_together(seed: int):
    """The figure is inside its interval, ends are above −100 %, the text follows the decision."""
    rng = random.Random(seed)
    table: list[Ratios] = [
        {depth: math.exp(rng.gauss(rng.uniform(-1, 1), 0.5)) for depth in (1, 4)}
        for _ in range(rng.randint(2, 40))
    ]
    verdict = decide(table)
    estimate = verdict.estimate
    assert estimate.low is not None
    assert estimate.high is not None
    assert -1 < estimate.low <= estimate.speedup <= estimate.high
    assert math.isfinite(estimate.high)
    assert verdict.text.startswith("On, +" if verdict.is_on else "Off, ")
    assert not verdict.is_on or estimate.low > 0


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_requests_does_not_matter(seed: int):
    """Replayed in any order, a log gives the same verdict."""
    table = random_table(seed, 9)
    shuffled = random.Random(seed).sample(table, len(table))
    assert same_but_rounding(decide(shuffled)) == same_but_rounding(decide(table))


def same_but_rounding(verdict: Verdict) -> tuple[object, ...]:
    return verdict.is_on, verdict.depth, round(verdict.estimate.speedup, 12)


@pytest.mark.parametrize("seed", range(20))
def test_slower_requests_never_turn_a_verdict_on(seed: int):
    """Making every ratio at the only depth a tenth worse never raises the figure."""
    table = random_table(seed, 9, (2,))
    worse: list[Ratios] = [{2: 1.1 * ratios[2]} for ratios in table]
    assert decide(worse).estimate.speedup < decide(table).estimate.speedup
    assert decide(worse).is_on <= decide(table).is_on


# --- the interval -----------------------------------------------------------------------------


def test_the_interval_is_students_on_the_log_of_the_mean():
    """Against scipy, on a table worked by hand."""
    ratios = [0.7, 0.8, 0.75, 0.9, 0.65]
    estimate = estimate_speedup(ratios)
    centre = mean(ratios)
    standard_error = stdev(ratios) / centre / math.sqrt(len(ratios))
    low, high = stats.t.interval(0.90, len(ratios) - 1, -math.log(centre), standard_error)
    assert estimate.low == pytest.approx(math.exp(low) - 1)
    assert estimate.high == pytest.approx(math.exp(high) - 1)


def test_the_interval_covers_the_truth_nine_times_in_ten():
    """Twelve requests with a spread of 25 %, as real traffic has."""
    rng = random.Random(7)
    truth = 1 / math.exp(-0.2 + 0.25**2 / 2) - 1
    n_covered, n_runs = 0, 2000
    for _ in range(n_runs):
        estimate = estimate_speedup([math.exp(rng.gauss(-0.2, 0.25)) for _ in range(12)])
        assert estimate.low is not None
        assert estimate.high is not None
        n_covered += estimate.low <= truth <= estimate.high
    assert 0.87 < n_covered / n_runs < 0.93


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 6, 17, 18, 59, 60, 999, 1000])
@pytest.mark.parametrize("probability", [0.5, 0.8, 0.95, 0.975, 0.999])
def test_student_quantiles_agree_with_scipy(degrees: int, probability: float):
    """From one degree of freedom, where the tail is longest."""
    expected = stats.t.ppf(probability, degrees)
    assert student_t(probability, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-12)


# --- the sequential rule: weighing ------------------------------------------------------------

repeatable = settings(derandomize=True, deadline=None, max_examples=80)
FIVE = [0.7, 0.9, 0.8, 0.75, 0.85]


def test_theta_is_the_log_of_the_weighted_mean():
    """Not a mean of logs, and heavier requests count for more."""
    evidence = weigh([0.6, 0.9], [1.0, 3.0], 0.0)
    assert evidence.theta == pytest.approx(-math.log((0.6 + 3 * 0.9) / 4))


def test_equal_weights_count_each_request():
    """Whatever the weight is."""
    assert weigh(FIVE, [0.5] * 5, 0.0).n_effective == pytest.approx(5)


def test_unequal_weights_count_as_fewer_requests():
    """(Σw)² / Σw²: one long reply and four short ones are not five."""
    evidence = weigh(FIVE, [0.9, 0.1, 0.1, 0.1, 0.1], 0.0)
    assert (evidence.n, evidence.n_effective) == (5, pytest.approx(1.3**2 / (0.81 + 0.04)))


def test_the_variance_is_the_spread_with_its_prior_over_the_requests():
    """Worked by hand: squared relative deviations and the prior's, shared out."""
    squares = math.fsum((tau / 0.8 - 1) ** 2 for tau in FIVE)
    spread = (SPREAD_PRIOR * SPREAD**2 + squares) / (SPREAD_PRIOR + 4)
    evidence = weigh(FIVE, [1.0] * 5, 0.0)
    assert evidence.variance == pytest.approx(spread / 5)
    assert evidence.spread == pytest.approx(math.sqrt(spread))


def test_what_is_not_known_of_the_costs_stays_however_many_requests():
    """All requests share the costs, so more of them do not average their error out."""
    few, many = (weigh(FIVE * n, [1.0] * 5 * n, 0.01).variance for n in (1, 100))
    assert few == pytest.approx(weigh(FIVE, [1.0] * 5, 0.0).variance + 0.01)
    assert 0.01 < many < 0.0105


def test_one_request_has_the_spread_of_the_prior():
    """It can't tell by how much requests differ."""
    assert weigh([0.8], [0.5], 0.0).spread == pytest.approx(SPREAD)


def test_chance_within_requests_is_not_taken_for_content():
    """Requests that differ by no more than their rounds do leave less to pick from."""
    taus = [1.0, 1.2, 1.1, 0.95, 1.25] * 4
    plain = weigh(taus, [1.0] * 20, 0.0)
    noisy = weigh(taus, [1.0] * 20, 0.0, [0.01] * 20)
    assert noisy.pickings < plain.pickings
    assert (noisy.theta, noisy.variance) == (plain.theta, plain.variance)


@pytest.mark.parametrize(("tau", "sd"), [(1.2, 0.2), (1.0, 0.05), (0.8, 0.3), (1.5, 0.1)])
def test_pickings_are_the_expected_gain_of_those_that_gain(tau: float, sd: float):
    """The closed form against the integral of max(1 − τ, 0) over a normal τ."""
    expected, _ = integrate.quad(
        lambda x: (1 - x) * stats.norm.pdf(x, tau, sd), tau - 12 * sd, 1, points=[min(tau, 1)]
    )
    assert pickings(tau, sd) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_the_likelihood_ratio_weighs_a_gain_against_as_big_a_loss():
    """Log of the chance of this theta at +5 % over that at −5 %."""
    evidence = weigh(FIVE, [1.0] * 5, 0.0)
    sd = math.sqrt(evidence.variance)
    gain, loss = (stats.norm.logpdf(evidence.theta, at, sd) for at in (SMALL_EFFECT, -SMALL_EFFECT))
    assert evidence.likelihood_ratio == pytest.approx(float(gain - loss))


@pytest.mark.parametrize(("spread", "n"), [(0.1, 12), (0.25, 30), (0.4, 30)])
def test_the_interval_of_weighed_requests_covers_the_truth(spread: float, n: int):
    """Too often where requests are more alike than the prior has it, never under 85 %."""
    rng = random.Random(17)
    truth = math.expm1(0.2 - spread**2 / 2)
    n_covered, n_runs = 0, 2000
    for _ in range(n_runs):
        taus = [math.exp(rng.gauss(-0.2, spread)) for _ in range(n)]
        estimate = weigh(taus, [1.0] * n, 0.0).estimate
        assert estimate.low is not None
        assert estimate.high is not None
        n_covered += estimate.low <= truth <= estimate.high
    assert 0.85 < n_covered / n_runs < 0.995


def test_the_figure_is_inside_its_interval():
    """As a speed-up: a tau of 0.8 is a quarter faster."""
    estimate = weigh([0.8] * 6, [1.0] * 6, 0.0).estimate
    assert estimate.speedup == pytest.approx(0.25)
    assert estimate.low is not None
    assert estimate.high is not None
    assert estimate.low < 0.25 < estimate.high


# --- the sequential rule: when it is enough ---------------------------------------------------


def evidence(theta: float, z: float = 1.0, n: int = 8, saved: float = 0.0) -> Evidence:
    """Of this log speed-up, so many standard errors from none."""
    return Evidence(
        theta=theta,
        variance=(theta / z) ** 2,
        spread=0.2,
        measured_spread=0.2,
        pickings=saved,
        n=n,
        n_effective=float(n),
    )


def at_boundary(theta: float, share: float, n: int = MIN_LOOKS) -> Evidence:
    """Whose likelihood ratio is this share of the boundary."""
    return replace(evidence(theta, n=n), variance=2 * SMALL_EFFECT * abs(theta) / BOUNDARY / share)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_likelihood_ratio_decides_at_its_boundary(sign: int):
    """Not a little before; on either side alike."""
    before, after = (at_boundary(sign * 0.05, share) for share in (0.99, 1.01))
    assert (before.is_faster, before.is_slower) == (False, False)
    assert (after.is_faster, after.is_slower) == (sign > 0, sign < 0)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_big_effect_is_decided_by_its_standard_errors(sign: int):
    """Large spread makes the likelihood ratio slow, however clear the effect is."""
    before, after = (evidence(sign * 0.5, sign * z) for z in (BIG_EFFECT_Z - 0.01, BIG_EFFECT_Z))
    assert abs(after.likelihood_ratio) < BOUNDARY
    assert (before.is_faster, before.is_slower) == (False, False)
    assert (after.is_faster, after.is_slower) == (sign > 0, sign < 0)


@pytest.mark.parametrize("theta", [0.5, -0.5])
def test_nothing_is_decided_on_fewer_requests_than_that(theta: float):
    """Whatever they say: a lone prompt may be anything but representative."""
    few = at_boundary(theta, 50.0, n=MIN_LOOKS - 1)
    enough = replace(few, n=MIN_LOOKS)
    assert not few.is_faster | few.is_slower
    assert enough.is_faster | enough.is_slower


def test_a_big_effect_needs_some_more_requests():
    """Standard errors of so few are themselves not known well."""
    few = evidence(0.5, BIG_EFFECT_Z, n=MIN_BIG_LOOKS - 1)
    assert (few.is_faster, replace(few, n=MIN_BIG_LOOKS).is_faster) == (False, True)


# --- the sequential rule: the verdict ---------------------------------------------------------

FASTER_NOW = evidence(0.3, 5.0)
SLOWER_NOW = evidence(-0.3, -5.0)
GAINS_A_BIT = evidence(1.5 * LEAST_GAIN, 0.5, saved=0.1)
LOSES_A_BIT = evidence(-0.02, -0.5, saved=0.1)


@pytest.mark.parametrize(
    ("policy", "fixed", "verdict"),
    [
        (FASTER_NOW, GAINS_A_BIT, True),
        (GAINS_A_BIT, FASTER_NOW, True),
        (LOSES_A_BIT, FASTER_NOW, None),
        (SLOWER_NOW, LOSES_A_BIT, False),
        (SLOWER_NOW, GAINS_A_BIT, False),
        (LOSES_A_BIT, SLOWER_NOW, False),
        (LOSES_A_BIT, replace(SLOWER_NOW, pickings=2 * LEAST_PICKINGS), None),
        (GAINS_A_BIT, LOSES_A_BIT, None),
        (FASTER_NOW, SLOWER_NOW, True),
    ],
    ids=[
        "policy-gains",
        "depth-gains-and-policy-follows",
        "depth-gains-but-policy-does-not",
        "policy-loses",
        "policy-loses-though-depth-gains-a-bit",
        "depth-loses-and-nothing-to-pick",
        "depth-loses-but-there-is-something-to-pick",
        "neither-is-clear",
        "policy-gains-though-depth-loses",
    ],
)
def test_the_verdict_rests_on_the_policy(policy: Evidence, fixed: Evidence, verdict: bool | None):
    """A fixed depth alone decides only where the policy could do no differently."""
    assert judge(policy, fixed) is verdict


def test_a_sure_gain_that_nobody_would_notice_is_not_on():
    """It is no reason for a status that may change again."""
    tiny = evidence(0.9 * LEAST_GAIN, 40.0, n=100)
    assert tiny.is_faster
    assert judge(tiny, tiny) is not True


def test_a_policy_that_surely_gains_next_to_nothing_is_off():
    """Otherwise a draft without effect would be measured for ever."""
    level = replace(evidence(0.0), variance=(0.4 * LEAST_GAIN) ** 2, n=LEVEL_LOOKS)
    assert judge(level, level) is False
    assert judge(replace(level, n=LEVEL_LOOKS - 1), level) is None
    unsure = replace(level, variance=(0.6 * LEAST_GAIN) ** 2)
    assert judge(unsure, unsure) is None


def test_where_drafts_have_paid_before_their_loss_takes_more_requests():
    """A few bad requests in a row are common where content differs."""
    fixed = replace(SLOWER_NOW, n=DOUBTED_LOOKS - 1)
    assert judge(LOSES_A_BIT, fixed) is False
    assert judge(LOSES_A_BIT, fixed, was_on=True) is None
    assert judge(LOSES_A_BIT, replace(fixed, n=DOUBTED_LOOKS), was_on=True) is False


def test_what_can_be_picked_needs_some_requests_to_be_seen():
    """Three alike do not tell that the fourth won't gain."""
    fixed = at_boundary(-0.3, 2.0, n=MIN_BIG_LOOKS - 1)
    assert fixed.is_slower
    assert judge(LOSES_A_BIT, fixed) is None


# --- the sequential rule: slower rounds --------------------------------------------------------

DEPTH = 3
one_request = st.tuples(
    st.lists(st.integers(0, DEPTH), min_size=3, max_size=30),  # accepted
    st.one_of(st.just(0), st.integers(1, 300)),  # written plainly after it stopped
)
histories = st.lists(one_request, min_size=MIN_LOOKS, max_size=25)
raised_pairs = st.lists(
    st.tuples(st.floats(0.8, 4.0), st.floats(1.0, 2.0)), min_size=2, max_size=12
)  # cost, and what the slower machine multiplies it by
Requests = Sequence[tuple[list[int], int]]


def weighed(requests: Requests, costs: Costs) -> tuple[Evidence, Evidence]:
    """Of the policy and of the depth throughout, as a controller with one depth has them."""
    table, samples = costs.table(0), [sample(*request) for request in requests]
    policy_taus, weights = zip(*[each.tau(table) for each in samples], strict=True)
    policy = weigh(policy_taus, weights, costs.variance)
    priced = [each.tau_at(DEPTH, table) for each in samples]
    taus, depth_weights, noises = zip(*priced, strict=True)
    return policy, weigh(taus, depth_weights, costs.variance, noises)


def sample(accepted: list[int], plain_tokens: int) -> Sample:
    found = Sample(plain_tokens=plain_tokens)
    for n in accepted:
        found.hear(Round(DEPTH, DEPTH, n, 1.0, 0))
        found.hear_at_every_depth(DEPTH, DEPTH, n, lambda _: [0.0] * (MAX_DEPTH + 1))
    return found


def costs_of(pairs: Sequence[float]) -> Costs:
    costs = Costs(curve={depth: 1 + 0.1 * depth for depth in range(1, MAX_DEPTH + 1)})
    costs.hear([CostPair(DEPTH, 0, math.log(cost), 1.0) for cost in pairs])
    return costs


def both_machines(pairs: Sequence[tuple[float, float]]) -> tuple[Costs, Costs]:
    """As it is, and with some of its rounds slower."""
    return costs_of([cost for cost, _ in pairs]), costs_of([cost * by for cost, by in pairs])


@repeatable
@given(histories, raised_pairs)
def test_slower_rounds_never_raise_a_figure(
    requests: Requests, pairs: Sequence[tuple[float, float]]
):
    """Neither the policy's nor the depth's: the same rounds, some of them slower."""
    usual, slower = (weighed(requests, costs) for costs in both_machines(pairs))
    for before, after in zip(usual, slower, strict=True):
        assert after.theta <= before.theta + 1e-12


@repeatable
@given(histories, raised_pairs, st.booleans())
def test_slower_rounds_never_turn_off_into_on(
    requests: Requests, pairs: Sequence[tuple[float, float]], was_on: bool
):
    """The same rounds at one depth, any of their times raised, plain steps as they were."""
    usual, slower = (weighed(requests, costs) for costs in both_machines(pairs))
    if judge(*usual, was_on=was_on) is False:
        assert judge(*slower, was_on=was_on) is not True


@repeatable
@given(
    st.lists(st.tuples(one_request.map(lambda each: each[0]), st.just(0)), min_size=3, max_size=25),
    st.floats(0.8, 4.0),
    st.floats(1.0, 2.0),
)
def test_a_machine_that_is_slower_throughout_never_gets_a_better_verdict(
    requests: Requests, cost: float, by: float
):
    """On above undecided above Off, where every request drafted to its end."""
    rank = {True: 2, None: 1, False: 0}
    usual, slower = (judge(*weighed(requests, costs_of([c] * 8))) for c in (cost, by * cost))
    assert rank[slower] <= rank[usual]


@repeatable
@given(histories, st.data())
def test_worse_acceptance_never_raises_the_figure_of_the_depth(
    requests: Requests, data: st.DataObject
):
    """The same number of rounds at one depth, fewer of their drafts right."""
    costs = costs_of([1.5] * 8)
    worse = [
        ([data.draw(st.integers(0, n)) for n in accepted], plain) for accepted, plain in requests
    ]
    assert weighed(worse, costs)[1].theta <= weighed(requests, costs)[1].theta + 1e-12
