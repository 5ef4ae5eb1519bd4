"""What the controller is held to, in numbers; and whether simulated runs keep to it.

The one place of these bounds: scripts/control_table.py prints figures beside them, and
test_table.py asserts them. A Row is one run; a Summary is of a cell, a group of cells or a pool.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from mlx_worker.control.outcome import LEVEL, Outcome, judged

MIN_DECIDE = 5.0  # requests that any verdict may take …
DECIDE_FACTOR = 14.0  # … or so many times (spread / log effect)²
P90_FACTOR = 2.5  # the 90th percentile against that
NOISY_CV = 0.1  # timer noise above it has bounds of its own
WRONG, WRONG_NOISY = 0.01, 0.02  # share of wrong verdicts, of ENOUGH_RUNS or more …
ENOUGH_RUNS = 1000
WRONG_UPPER = 0.02  # … or the 95 % upper bound of that share, of any number
NET_LOSS, NET_LOSS_WORST = 0.01, 0.02  # where drafting is slower: mean, worst run
KEPT = {0.24: 0.20, 0.45: 0.40}  # least net speed at a true effect …
KEPT_NOISY = {0.24: 0.20, 0.45: 0.38}  # … and with a noisy timer
FLIPS = 1  # between On and Off, in 400 requests of one phase
COVERED = 0.85  # share of 90 % intervals that hold what is true, of …
ENOUGH_TO_JUDGE = 20  # runs below which a median, a percentile or a mean kept is only shown
NEAR_POINTS, NEAR_SHARE = 0.05, 0.1  # how far the figure may be off after FIGURE_REQUESTS
FIGURE_REQUESTS = 60
BIG_CHANGE = 0.18  # both effects at least so big: the change is noticed within …
NOTICE_MEDIAN, NOTICE_P90 = 70, 120  # … so many requests
CHANGE_LOSS = 0.02  # share of decode time that a change to a small effect may cost


@dataclass(frozen=True)
class Figure:
    """What a status says: its figure with the 90 % interval, fractions."""

    state: str
    speedup: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One run.

    outcome   without its moments, so that it is small enough to cross processes
    noise_cv  of the timer, in the last phase
    first     truth of the first phase
    early     the figure after FIGURE_REQUESTS; None: no verdict then
    """

    cell: str
    seed: int
    outcome: Outcome
    noise_cv: float
    first: float
    early: Figure | None

    @property
    def right(self) -> float:
        return judged(self.outcome.truth, self.outcome.truth_policy)

    @property
    def is_constant(self) -> bool:
        return not self.outcome.changes

    @property
    def is_noisy(self) -> bool:
        return self.noise_cv > NOISY_CV

    @property
    def decide_bound(self) -> float:
        """Median requests to decide; infinite where any verdict will do.

        The spread is the measured one: between requests as few rounds show them, chance included.
        """
        if not self.right:
            return math.inf
        theta = math.log1p(self.right)
        spread = self.outcome.measured_spread or self.outcome.spread
        return max(MIN_DECIDE, DECIDE_FACTOR * (spread / theta) ** 2)

    @property
    def decided(self) -> int:
        """Requests to decide; one more than there were where they were not enough."""
        return self.outcome.requests_to_decide or self.outcome.requests + 1

    @property
    def least_kept(self) -> float | None:
        """Of what replies of that length can gain: the last round of each is cut by its end."""
        truth = self.outcome.truth
        kept = (KEPT_NOISY if self.is_noisy else KEPT).get(round(truth, 3))
        if kept is None or self.outcome.truth_policy is None:
            return kept
        return kept * min(1.0, self.outcome.truth_policy / truth)

    @property
    def figure_truth(self) -> float:
        """What the early figure is about: the policy while On, the best depth while Off."""
        policy = self.outcome.truth_policy
        is_on = self.early is not None and self.early.state == "on"
        return policy if is_on and policy is not None else self.outcome.truth

    @property
    def figure_error(self) -> float:
        return self.early.speedup - self.figure_truth if self.early else 0.0

    @property
    def is_covered(self) -> bool:
        return self.early is not None and self.early.low <= self.figure_truth <= self.early.high

    @property
    def is_near(self) -> bool:
        return abs(self.figure_error) <= max(NEAR_POINTS, NEAR_SHARE * abs(self.figure_truth))

    @property
    def noticed(self) -> float:
        """Requests until the last change was noticed; infinite: never."""
        requests = self.outcome.changes[-1].requests_to_notice
        return math.inf if requests is None else requests


@dataclass(frozen=True)
class Summary:
    """Figures of some runs. Those of a quantity that no run has are None.

    truth, truth_policy  means; late, very_late: share of runs over the bound of the median, of p90
    verdicts             On, Off, Measuring at the end
    near                 share of early figures near the truth, shown only
    beyond               names of the bounds that are broken
    """

    name: str
    runs: int
    truth: float
    truth_policy: float | None
    wrong: int
    wrong_upper: float
    wrong_seeds: list[int]
    verdicts: list[int]
    decide_median: float
    decide_p90: float
    decide_bound: float
    late: float
    very_late: float
    net_mean: float
    net_worst: float
    worst_loss_mean: float
    worst_loss_worst: float
    flips_mean: float
    flips_worst: int
    figures: int
    covered: float | None
    near: float | None
    figure_error: float | None
    notice_median: float | None
    notice_p90: float | None
    change_loss: float | None
    beyond: list[str]


def summary(name: str, rows: Sequence[Row], checks: Collection[str] | None = None) -> Summary:
    """checks: names of the bounds that apply; None: all."""
    outcomes = [row.outcome for row in rows]
    policies = [o.truth_policy for o in outcomes if o.truth_policy is not None]
    decided = [row.decided for row in rows]
    net = [o.net_speed for o in outcomes]
    losses = [o.worst_loss for o in outcomes]
    flips = [o.on_off_flips for o in outcomes]
    figures = [row for row in rows if row.early]
    changed = [row for row in rows if not row.is_constant]
    noticed = [row.noticed for row in changed]
    wrong = [row.seed for row in rows if row.outcome.verdict_wrong]
    return Summary(
        name=name,
        runs=len(rows),
        truth=fmean(o.truth for o in outcomes),
        truth_policy=fmean(policies) if policies else None,
        wrong=len(wrong),
        wrong_upper=upper_95(len(wrong), len(rows)),
        wrong_seeds=wrong,
        verdicts=[sum(o.verdict == v for o in outcomes) for v in ("on", "off", "measuring")],
        decide_median=median(decided),
        decide_p90=quantile(decided, 0.9),
        decide_bound=median(row.decide_bound for row in rows),
        late=late(rows, 1),
        very_late=late(rows, P90_FACTOR),
        net_mean=fmean(net),
        net_worst=min(net),
        worst_loss_mean=fmean(losses),
        worst_loss_worst=max(losses),
        flips_mean=fmean(flips),
        flips_worst=max(flips),
        figures=len(figures),
        covered=fmean(row.is_covered for row in figures) if figures else None,
        near=fmean(row.is_near for row in figures) if figures else None,
        figure_error=fmean(row.figure_error for row in figures) if figures else None,
        notice_median=median(noticed) if noticed else None,
        notice_p90=quantile(noticed, 0.9) if noticed else None,
        change_loss=(
            fmean(row.outcome.changes[-1].worst_loss for row in changed) if changed else None
        ),
        beyond=[
            check
            for check, is_beyond in CHECKS.items()
            if (checks is None or check in checks) and is_beyond(rows)
        ],
    )


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def late(rows: Sequence[Row], factor: float) -> float:
    return fmean(row.decided > factor * row.decide_bound for row in rows)


def upper_95(n_found: int, n: int) -> float:
    """The share that would give no more than n_found of n in 5 % of cases (Clopper-Pearson)."""
    if n_found >= n:
        return 1.0
    low, high = n_found / n, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        odds = middle / (1 - middle)
        term = total = (1 - middle) ** n
        for k in range(n_found):
            term *= odds * (n - k) / (k + 1)
            total += term
        low, high = (middle, high) if total > 0.05 else (low, middle)
    return high


# --- the bounds: each says whether it is broken by these runs ---------------------------------


def is_wrong_too_often(rows: Sequence[Row]) -> bool:
    """Over few runs, where no bound can be shown, any wrong share above the bound is marked.

    Where the machine changes, what counts is how soon that is noticed and what it costs.
    """
    rows = [row for row in constant(rows) if row.right]
    wrong = sum(row.outcome.verdict_wrong for row in rows)
    most = WRONG_NOISY if any(row.is_noisy for row in rows) else WRONG
    can_show = upper_95(0, len(rows)) <= WRONG_UPPER if rows else False
    if len(rows) >= ENOUGH_RUNS or not can_show:
        return wrong > most * len(rows)
    return upper_95(wrong, len(rows)) > WRONG_UPPER


def is_decided_late(rows: Sequence[Row]) -> bool:
    rows = constant(rows)
    return len(rows) >= ENOUGH_TO_JUDGE and late(rows, 1) > 0.5


def is_decided_very_late(rows: Sequence[Row]) -> bool:
    rows = constant(rows)
    return len(rows) >= ENOUGH_TO_JUDGE and late(rows, P90_FACTOR) > 0.1


def loses(rows: Sequence[Row]) -> bool:
    net = net_where_slower(rows)
    return bool(net) and fmean(net) < -NET_LOSS


def loses_once(rows: Sequence[Row]) -> bool:
    return min(net_where_slower(rows), default=0.0) < -NET_LOSS_WORST


def keeps_little(rows: Sequence[Row]) -> bool:
    kept = [(row.outcome.net_speed, row.least_kept) for row in constant(rows)]
    spare = [net - least for net, least in kept if least is not None]
    return len(spare) >= ENOUGH_TO_JUDGE and fmean(spare) < 0


def flips(rows: Sequence[Row]) -> bool:
    """As a rate over the runs of 400 requests; the worst run is shown beside it."""
    judged_rows = [row for row in rows if row.right]
    allowed = [FLIPS * (len(row.outcome.changes) + 1) for row in judged_rows]
    return sum(row.outcome.on_off_flips for row in judged_rows) > sum(allowed)


def covers_little(rows: Sequence[Row]) -> bool:
    rows = [row for row in rows if row.early]
    return len(rows) >= ENOUGH_TO_JUDGE and fmean(row.is_covered for row in rows) < COVERED


def notices_late(rows: Sequence[Row]) -> bool:
    noticed = [row.noticed for row in rows if has_big_change(row)]
    return bool(noticed) and median(noticed) > NOTICE_MEDIAN


def notices_very_late(rows: Sequence[Row]) -> bool:
    noticed = [row.noticed for row in rows if has_big_change(row)]
    return bool(noticed) and quantile(noticed, 0.9) > NOTICE_P90


def change_costs(rows: Sequence[Row]) -> bool:
    changed = [row for row in rows if not row.is_constant and not has_big_change(row)]
    losses = [row.outcome.changes[-1].worst_loss for row in changed]
    return bool(losses) and fmean(losses) > CHANGE_LOSS


def constant(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.is_constant]


def net_where_slower(rows: Iterable[Row]) -> list[float]:
    return [row.outcome.net_speed for row in constant(rows) if row.right < 0]


def has_big_change(row: Row) -> bool:
    effects = (row.first, row.outcome.truth)
    return not row.is_constant and min(map(abs, effects)) >= BIG_CHANGE - LEVEL / 10


CHECKS: dict[str, Callable[[Sequence[Row]], bool]] = {
    "wrong": is_wrong_too_often,
    "decide_median": is_decided_late,
    "decide_p90": is_decided_very_late,
    "net_mean": loses,
    "net_worst": loses_once,
    "kept": keeps_little,
    "flips": flips,
    "covered": covers_little,
    "notice_median": notices_late,
    "notice_p90": notices_very_late,
    "change_loss": change_costs,
}
NOISE_CHECKS = {"wrong"}  # needs hundreds of runs: of all effects with one kind of timer
EFFECT_CHECKS = {"decide_p90", "covered"}  # a rate of 10 or 15 %: of one effect with all timers
