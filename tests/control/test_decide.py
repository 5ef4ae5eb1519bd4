"""The fixed-sample rule: tables of ratios in, verdicts out."""

import math
import random
from statistics import mean, stdev

import pytest
from scipy import stats

from mlx_worker.control.decide import (
    Ratios,
    Verdict,
    best_depth,
    decide,
    estimate_speedup,
    held_out_ratios,
    student_t,
)

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
