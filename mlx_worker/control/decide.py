"""Is drafting faster, by how much, and how sure is that? Estimates in, a verdict out.

Owns two rules. The *sequential* one asks after each live request whether that is enough to decide.
The *fixed-sample* one is bench's: every request was served plainly and at every depth, and the
verdict comes once, at the end. Leaves the measuring to measure.py and bench. Pure; any thread.

Words: the *ratio* of a request at a depth is its time per token there over its time per token
when decoded plainly: 0.8 is a quarter faster, 1.25 a fifth slower. The speed-up of many requests
is 1 / mean(ratio) − 1: what a client gains who sends them all. (A mean of speed-ups would let one
request that became three times as fast outweigh two that became slower.)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

from mlx_worker.records import verdict_text, whole_percent

SMALL_EFFECT = math.log(1.05)  # the likelihood ratio weighs +5 % against −5 %: smaller is level
BOUNDARY = 6.21  # log of 0.998 / 0.002: Wald's bound for a wrong side in 0.2 % at ±5 %
DOUBT = -2.94  # log of 0.05 / 0.95: while On, this much against it asks for a new measurement
MIN_LOOKS = 3  # requests before the likelihood ratio may decide
BIG_EFFECT_Z = 3.1  # standard errors at which an effect is decided however small the sample …
MIN_BIG_LOOKS = 5  # … from so many requests on
LEAST_GAIN = math.log(1.02)  # a policy that gains less isn't worth a status that may change
LEVEL_LOOKS = 12  # requests to find that it gains less
LEAST_PICKINGS = 0.006  # share of time worth waiting for the policy's own evidence
SPENT_PICKINGS = 0.045  # the same once trials have used up what they may cost
DOUBTED_LOOKS = 12  # requests to find the contrary of what was found before
SPREAD = 0.18  # relative spread of tau between requests before there are requests to tell
SPREAD_PRIOR = 4  # requests' worth of trust in it

CONFIDENCE = 0.90
WIDER = 1.2  # a live figure is shown once a verdict fell, which chance helped to: without this 83
# to 94 % of its 90 % intervals held what is true, by effect (docs/LOG.md)
MIN_REQUESTS = 2  # one request has no spread, so no interval


@dataclass(frozen=True)
class Evidence:
    """What live requests say of a way of drafting.

    theta     log speed-up: −log of the weighted mean of tau
    variance  of theta: the spread between requests, and what is not known of the costs
    spread    relative SD of tau between requests, drawn towards SPREAD while they are few
    measured_spread  the same as measured, chance within requests included
    pickings  share of the time that drafting only where it pays would save; see `pickings`
    n         requests; n_effective: the same number of equally weighty ones
    """

    theta: float
    variance: float
    spread: float
    measured_spread: float
    pickings: float
    n: int
    n_effective: float

    @property
    def likelihood_ratio(self) -> float:
        """Log likelihood of +5 % over that of −5 %."""
        return 2 * SMALL_EFFECT * self.theta / self.variance

    @property
    def z(self) -> float:
        return self.theta / math.sqrt(self.variance)

    @property
    def is_faster(self) -> bool:
        return _is_decided(self, 1)

    @property
    def is_slower(self) -> bool:
        return _is_decided(self, -1)

    @property
    def is_level(self) -> bool:
        """Surely not worth its while: below LEAST_GAIN by two standard errors."""
        below = self.theta + 2 * math.sqrt(self.variance) < LEAST_GAIN
        return self.n >= LEVEL_LOOKS and below

    @property
    def estimate(self) -> "Estimate":
        """The speed-up with its 90 % interval.

        Where the requests differ more than was expected of them, what they show counts in full.
        """
        is_wider = self.measured_spread > self.spread
        excess = self.measured_spread**2 - self.spread**2 if is_wider else 0.0
        variance = self.variance + excess / self.n_effective
        degrees = self.n_effective - 1 + (0 if is_wider else SPREAD_PRIOR)
        reach = WIDER * _t90(min(100, max(1, round(degrees)))) * math.sqrt(variance)
        low, high = math.expm1(self.theta - reach), math.expm1(self.theta + reach)
        return Estimate(math.expm1(self.theta), low, high)


def weigh(
    taus: Sequence[float],
    weights: Sequence[float],
    cost_variance: float,
    noises: Sequence[float] | None = None,
) -> Evidence:
    """Evidence of requests with these taus.

    cost_variance  of the log of the costs that they share
    noises         relative variance of each tau within its request; None: not known, so none
    """
    assert taus, "no requests"
    total = math.fsum(weights)
    weighted = list(map(mul, taus, weights))
    mean = math.fsum(weighted) / total
    n_effective = total * total / math.fsum(map(mul, weights, weights))
    squares = max(0.0, math.fsum(map(mul, weighted, taus)) / (mean * mean) - total)
    squares *= n_effective / total  # as many squares as there are effective requests
    spread = (SPREAD_PRIOR * SPREAD**2 + squares) / (SPREAD_PRIOR + n_effective - 1)
    variance = spread / n_effective + cost_variance
    noise = n_effective * math.fsum(map(mul, noises, weights)) / total if noises else 0.0
    content = (SPREAD_PRIOR * SPREAD**2 + max(squares - noise, 0.0)) / (
        SPREAD_PRIOR + n_effective - 1
    )
    return Evidence(
        theta=-math.log(mean),
        variance=variance,
        spread=math.sqrt(spread),
        measured_spread=math.sqrt(squares / max(n_effective - 1, 1.0)),
        pickings=pickings(mean, mean * math.sqrt(content * (1 + 1 / n_effective))),
        n=len(taus),
        n_effective=n_effective,
    )


def pickings(tau: float, sd: float) -> float:
    """Share of the time that drafting would save if only the requests that gain drafted.

    A draft that loses on the whole may still gain on many requests; if tau hardly differs between
    them, there is nothing to pick. E[max(1 − tau, 0)] for a normal tau with this mean and SD.
    """
    u = (tau - 1) / sd
    density = math.exp(-u * u / 2) / math.sqrt(2 * math.pi)
    return sd * (density - u * math.erfc(u / math.sqrt(2)) / 2)


def judge(
    policy: Evidence, fixed: Evidence, *, was_on: bool = False, was_off: bool = False
) -> bool | None:
    """True: On. False: Off. None: not yet.

    policy  drafting as it would run: depth by request, requests that don't benefit dropped
    fixed   drafting at the best depth throughout
    was_on, was_off  what was found before; its contrary takes more requests

    Both rest on the policy. A fixed depth that clearly gains is enough for On once the policy is
    seen to gain too: it learns while it is measured, so it lags behind. And where tau differs
    too little between requests for anything to be picked, a fixed depth that clearly loses is
    enough for Off: the policy drops such a draft so early that its own loss is hard to see.
    """
    gains = policy.theta >= LEAST_GAIN and (policy.n >= DOUBTED_LOOKS or not was_off)
    if gains and (policy.is_faster or fixed.is_faster):
        return True
    enough = fixed.n >= (DOUBTED_LOOKS if was_on else MIN_BIG_LOOKS)
    has_no_pickings = enough and fixed.pickings < LEAST_PICKINGS
    if policy.is_slower or policy.is_level or (fixed.is_slower and has_no_pickings):
        return False
    return None


def is_unpromising(policy: Evidence, fixed: Evidence) -> bool:
    """Whether to stop measuring when trials have used up what they may cost, short of proof."""
    has_no_pickings = fixed.n >= MIN_BIG_LOOKS and fixed.pickings < SPENT_PICKINGS
    return policy.theta <= 0 and fixed.likelihood_ratio < DOUBT / 2 and has_no_pickings


def _is_decided(evidence: Evidence, sign: int) -> bool:
    small = evidence.n >= MIN_LOOKS and sign * evidence.likelihood_ratio >= BOUNDARY
    return small or (evidence.n >= MIN_BIG_LOOKS and sign * evidence.z >= BIG_EFFECT_Z)


Ratios = Mapping[int, float]  # depth → ratio of one request; the same depths for each


@dataclass(frozen=True)
class Estimate:
    """A speed-up and its 90 % interval, as fractions; low and high None below two requests."""

    speedup: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Verdict:
    """On or Off, with the figure that says why.

    depth     the fastest depth over all requests: the one that would be used
    requests  how many the figure rests on
    """

    is_on: bool
    depth: int
    requests: int
    estimate: Estimate

    @property
    def text(self) -> str:
        return verdict_text(self.is_on, self.estimate.speedup)


def decide(requests: Sequence[Ratios]) -> Verdict:
    """On if the lower end of the 90 % interval of the speed-up is above zero, else Off.

    The figure is that of choosing a depth by measuring, not of the luckiest depth: request i counts
    with the depth that was fastest on the *other* requests. When they all agree on one depth, that
    is the depth's own figure. An On that would read +0 % is Off. One request is always Off.

    How often a draft without any effect is called On, simulated with 18 requests and 4 depths: 6 to
    7 % if a request's ratios at all depths move together, as content makes them; 15 % if they
    did not. At a true −5 %: 1 %.
    """
    assert requests, "a verdict needs requests"
    estimate = estimate_speedup(held_out_ratios(requests))
    return Verdict(shows_gain(estimate), best_depth(requests), len(requests), estimate)


def shows_gain(estimate: Estimate) -> bool:
    """Whether its interval lies above zero, and it would not read +0 %."""
    has_gain = estimate.low is not None and estimate.low > 0
    return has_gain and whole_percent(estimate.speedup) >= 1


def held_out_ratios(requests: Sequence[Ratios]) -> list[float]:
    """Each request's ratio at the depth that the other requests would choose."""
    if len(requests) == 1:
        return [requests[0][best_depth(requests)]]
    total = {depth: math.fsum(ratios[depth] for ratios in requests) for depth in requests[0]}
    return [
        ratios[fastest({depth: total[depth] - ratios[depth] for depth in total})]
        for ratios in requests
    ]


def best_depth(requests: Sequence[Ratios]) -> int:
    """The depth with the lowest mean ratio over all requests."""
    return fastest({d: math.fsum(ratios[d] for ratios in requests) for d in requests[0]})


def fastest(time_by_depth: Ratios) -> int:
    """The depth that takes least; the shallower of two equals, which wastes less."""
    return min(time_by_depth, key=lambda depth: (time_by_depth[depth], depth))


def estimate_speedup(ratios: Sequence[float]) -> Estimate:
    """Speed-up of the mean ratio with its 90 % interval, one ratio a request.

    The interval is Student's t on log(mean ratio), whose standard error is the relative spread over
    √n, so both ends stay above −100 % and a ratio and its inverse are equally far from level.
    """
    assert min(ratios) > 0, ratios
    n = len(ratios)
    mean = math.fsum(ratios) / n
    speedup = 1 / mean - 1
    if n < MIN_REQUESTS:
        return Estimate(speedup, None, None)
    variance = math.fsum((ratio / mean - 1) ** 2 for ratio in ratios) / (n - 1)
    reach = math.exp(student_t((1 + CONFIDENCE) / 2, n - 1) * math.sqrt(variance / n))
    return Estimate(speedup, 1 / (mean * reach) - 1, reach / mean - 1)


@lru_cache(maxsize=512)
def _t90(degrees: int) -> float:
    return student_t((1 + CONFIDENCE) / 2, degrees)


def student_t(probability: float, degrees: int) -> float:
    """The t that a Student variable stays below with this probability, 0.5 ≤ probability < 1.

    Bisection on the angle atan(t / √degrees), in which the distribution is a finite sum.
    Source: Abramowitz and Stegun 26.7.3 and 26.7.4.
    """
    assert 0.5 <= probability < 1, probability
    assert degrees >= 1, degrees
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if (1 + _central_probability(middle, degrees)) / 2 < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _central_probability(angle: float, degrees: int) -> float:
    """P(|t| < √degrees · tan(angle)) for a whole number of degrees of freedom."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    total = 0.0
    for k in range(3 if is_odd else 2, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    if is_odd:
        return 2 / math.pi * (angle + sine * total)
    return sine * total
