"""Is drafting faster, by how much, and how sure is that? Estimates in, a verdict out.

Owns the fixed-sample rule: every request was served plainly and at every depth, and the verdict
comes once, at the end. Leaves the measuring to bench and the wording to status.py. Pure; any
thread.

Words: the *ratio* of a request at a depth is its time per token there over its time per token
when decoded plainly: 0.8 is a quarter faster, 1.25 a fifth slower. The speed-up of many requests
is 1 / mean(ratio) − 1: what a client gains who sends them all. (A mean of speed-ups would let one
request that became three times as fast outweigh two that became slower.)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_worker.control.status import verdict_text, whole_percent

CONFIDENCE = 0.90
MIN_REQUESTS = 2  # one request has no spread, so no interval

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
    is_on = estimate.low is not None and estimate.low > 0 and whole_percent(estimate.speedup) >= 1
    return Verdict(is_on, best_depth(requests), len(requests), estimate)


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
