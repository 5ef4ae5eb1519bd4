"""A scenario's machine, solved for the effect and the spread that its author asks for.

Owns what a round costs and how well drafts are accepted there, and the true speed-up. Leaves
requests, and what happens in them, to machine.py. Pure; any thread.

The truth is a mean over POPULATION requests of each workload: acceptance levels evenly by
probability, lengths drawn once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from random import Random
from statistics import NormalDist

from mlx_worker.control.scenario import Replies, Scenario, Workload
from mlx_worker.errors import ConfigError
from mlx_worker.records import MAX_DEPTH

POPULATION = 200  # requests of each workload that the true figures are a mean over
MAX_LOGIT = 8.0
LEVELS = tuple(NormalDist().inv_cdf((n + 0.5) / POPULATION) for n in range(POPULATION))


@dataclass(frozen=True)
class Solved:
    """A scenario's machine, with what is true of it.

    cost       of a round in plain steps, at no context; by drafted ids, 0 (nothing to draft) first
    planned    the same by planned depth: the mean of rounds with a proposal and without, stalls
               included
    shift      on the logit of every acceptance
    widths     by workload: SD of a request's own shift on top
    depth      the best fixed one
    truth      speed-up at it, as a fraction: 1 / mean over requests of cost / tokens per round − 1
    """

    cost: tuple[float, ...]
    planned: tuple[float, ...]
    shift: float
    widths: tuple[float, ...]
    depth: int
    truth: float


def logit(share: float) -> float:
    share = min(max(share, 1e-6), 1 - 1e-6)
    return math.log(share / (1 - share))


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@lru_cache(maxsize=512)
def logits(acceptance: tuple[float, ...]) -> tuple[float, ...]:
    """By draft position; the last one given holds for the rest."""
    by_position = acceptance + acceptance[-1:] * MAX_DEPTH
    return tuple(logit(share) for share in by_position[:MAX_DEPTH])


def acceptance_of(replies: Replies, shift: float) -> tuple[float, ...]:
    """By draft position, for one request."""
    return tuple(logistic(each + shift) for each in logits(replies.acceptance))


def tokens_per_round(acceptance: Sequence[float]) -> list[float]:
    """Expected ids of a round by depth, 0 first."""
    reach = accumulate(acceptance, lambda so_far, share: so_far * share, initial=1.0)
    return list(accumulate(reach))


def planned_tokens(scenario: Scenario, acceptance: Sequence[float]) -> list[float]:
    """Expected ids of a round by planned depth, 0 first; those without a proposal included."""
    share = scenario.proposes
    return [share * tokens + 1 - share for tokens in tokens_per_round(acceptance)]


def planned_cost(scenario: Scenario, cost: Sequence[float]) -> tuple[float, ...]:
    """Of a round in plain steps by planned depth, 0 first."""
    share, stalls = scenario.proposes, scenario.stall_probability * scenario.stall_steps
    return tuple(share * each + (1 - share) * cost[0] + stalls for each in cost)


def described_cost(scenario: Scenario) -> tuple[float, ...]:
    """Of a round in plain steps by drafted ids, as written; 0 first."""
    given = scenario.round_cost
    if not given:
        base, slope = scenario.round_base, scenario.round_per_depth
        return tuple(base + slope * depth for depth in range(MAX_DEPTH + 1))
    if len(given) == 1:
        return given * (MAX_DEPTH + 1)
    slope = given[-1] - given[-2]
    longer = [given[-1] + slope * n for n in range(1, MAX_DEPTH + 1 - len(given))]
    return (max(1.0, 2 * given[0] - given[1]), *given, *longer)


def throttled(scenario: Scenario, request: int) -> float:
    """The factor on times that throttling has reached."""
    if request < scenario.throttle_at:
        return 1.0
    n_steps = (request - scenario.throttle_at) // scenario.throttle_every + 1
    return scenario.throttle_step ** min(n_steps, scenario.throttle_steps)


def length(mean: float, spread: float, low: int, high: int, z: float) -> int:
    """Lognormal, by its mean and its relative SD."""
    variance = math.log1p(spread * spread)
    drawn = mean * math.exp(math.sqrt(variance) * z - variance / 2)
    return int(min(max(drawn, low), max(low, high)))


def lengths(workload: Workload, rng: Random) -> tuple[int, int]:
    """Tokens of a prompt and of its reply."""
    w = workload
    z_prompt, z_reply = rng.gauss(0, 1), rng.gauss(0, 1)
    prompt = length(w.prompt_tokens, w.prompt_spread, w.prompt_min, w.prompt_max, z_prompt)
    return prompt, length(w.reply_tokens, w.reply_spread, w.reply_min, w.reply_max, z_reply)


def relative_sd(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return 0.0
    return math.sqrt(math.fsum((value / mean - 1) ** 2 for value in values) / (len(values) - 1))


def bisect(is_below: Callable[[float], bool], low: float, high: float, steps: int = 26) -> float:
    """Where a growing quantity reaches its goal; is_below(x): not yet at x."""
    for _ in range(steps):
        middle = (low + high) / 2
        if is_below(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True)
class Population:
    """Requests of one workload that stand for all of them.

    fixed, slope   time of a round in plain steps is fixed · cost + slope, for the request's context
    """

    scenario: Scenario
    workload: Workload
    fixed: tuple[float, ...]
    slope: tuple[float, ...]

    @classmethod
    def of(cls, scenario: Scenario, workload: Workload) -> "Population":
        rng = Random(f"population:{workload.name}")
        rounds_only = throttled(scenario, scenario.requests - 1)
        pace = rounds_only if scenario.throttle_rounds_only else 1.0
        fixed: list[float] = []
        slope: list[float] = []
        for _ in range(POPULATION):
            prompt, reply = lengths(workload, rng)
            context = (prompt + reply / 2) / 1000
            plain_ms = scenario.plain_ms + context * scenario.context_plain_ms
            fixed.append(pace * scenario.plain_ms / plain_ms)
            slope.append(pace * context * scenario.context_round_ms / plain_ms)
        return cls(scenario, workload, tuple(fixed), tuple(slope))

    def tokens(self, shift: float, width: float) -> list[list[float]]:
        """Expected ids of a round by request and depth."""
        return [
            planned_tokens(self.scenario, acceptance_of(self.workload, shift + width * level))
            for level in LEVELS
        ]

    def ratio_parts(self, tokens: list[list[float]], depth: int) -> tuple[float, float]:
        """(a, b): at cost c the mean ratio of these requests is a · c + b."""
        a = sum(fixed / each[depth] for fixed, each in zip(self.fixed, tokens, strict=True))
        b = sum(slope / each[depth] for slope, each in zip(self.slope, tokens, strict=True))
        return a / POPULATION, b / POPULATION

    def spread(self, tokens: list[list[float]], depth: int, cost: float) -> float:
        ratios = [
            (fixed * cost + slope) / each[depth]
            for fixed, slope, each in zip(self.fixed, self.slope, tokens, strict=True)
        ]
        return relative_sd(ratios)


class Solver:
    """Finds cost, acceptances and spread for what a scenario asks; a fixed point over its depth."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.mix = [Population.of(scenario, workload) for workload in scenario.mix]
        total = sum(workload.weight for workload in scenario.mix)
        if total <= 0:
            raise ConfigError(
                "workloads: their weights add up to 0, must be more", hint="give one a weight"
            )
        self.weights = [workload.weight / total for workload in scenario.mix]
        self.depths = sorted(set(scenario.depths))
        self.cost = described_cost(scenario)
        self.shift = 0.0
        self.widths = [0.0] * len(self.mix)

    def solve(self) -> Solved:
        before = None
        for _ in range(8):
            depth, _ratio = self.best()
            if before == (before := (depth, round(self.shift, 2))):
                break
            self.widths = [self.width(n, depth) for n in range(len(self.mix))]
            self.reach_effect()
        depth, ratio = self.best()
        planned, widths = planned_cost(self.scenario, self.cost), tuple(self.widths)
        return Solved(self.cost, planned, self.shift, widths, depth, 1 / ratio - 1)

    def parts(self, shift: float) -> dict[int, tuple[float, float]]:
        """By depth, the (a, b) of the mean ratio a · cost + b over all workloads."""
        tokens = [p.tokens(shift, w) for p, w in zip(self.mix, self.widths, strict=True)]
        found: dict[int, tuple[float, float]] = {}
        for depth in self.depths:
            each = [p.ratio_parts(t, depth) for p, t in zip(self.mix, tokens, strict=True)]
            a = sum(weight * a for weight, (a, _) in zip(self.weights, each, strict=True))
            b = sum(weight * b for weight, (_, b) in zip(self.weights, each, strict=True))
            found[depth] = (a, b)
        return found

    def best(self, shift: float | None = None) -> tuple[int, float]:
        """The best fixed depth and its mean ratio."""
        parts = self.parts(self.shift if shift is None else shift)
        cost = planned_cost(self.scenario, self.cost)
        ratios = {depth: a * cost[depth] + b for depth, (a, b) in parts.items()}
        depth = min(ratios, key=lambda depth: ratios[depth])
        return depth, ratios[depth]

    def width(self, n: int, depth: int) -> float:
        """SD of a request's shift that gives workload n the spread that it asks for."""
        population, goal = self.mix[n], self.mix[n].workload.spread
        cost = planned_cost(self.scenario, self.cost)[depth]

        def spread(width: float) -> float:
            return population.spread(population.tokens(self.shift, width), depth, cost)

        if goal == 0:
            return 0.0
        if goal > (most := spread(MAX_LOGIT)):
            raise ConfigError(
                f"spread: {goal:g}, must be at most {most:.2f} for workload "
                f"{population.workload.name} at depth {depth}",
                hint="give acceptances that leave more room, or a lower spread",
            )
        return bisect(lambda width: spread(width) < goal, 0, MAX_LOGIT)

    def reach_effect(self) -> None:
        effect = self.scenario.effect
        if effect is None:
            return
        goal = 1 / (1 + effect)
        if self.scenario.solve_by == "cost":
            stalls = planned_cost(self.scenario, [0.0])[0]
            cost = [each - stalls for each in planned_cost(self.scenario, self.cost)]
            scale = max(
                (goal - b - a * stalls) / (a * cost[k])
                for k, (a, b) in self.parts(self.shift).items()
            )
            if scale <= 0:
                raise ConfigError(
                    f"effect: {effect:g}, must be lower: context_round_ms or stalls alone take "
                    "longer",
                    hint="lower either",
                )
            self.cost = tuple(scale * each for each in self.cost)
            return
        least, most = (1 / self.best(shift)[1] - 1 for shift in (-MAX_LOGIT, MAX_LOGIT))
        if not least <= effect <= most:
            raise ConfigError(
                f"effect: {effect:g}, must be {least:.2f}..{most:.2f} by acceptance alone",
                hint='set round_base and round_per_depth, or "solve_by": "cost"',
            )
        self.shift = bisect(lambda shift: self.best(shift)[1] > goal, -MAX_LOGIT, MAX_LOGIT)


@lru_cache(maxsize=512)
def solve(scenario: Scenario) -> Solved:
    """Raises ConfigError: no machine has this effect or this spread."""
    try:
        return Solver(scenario).solve()
    except ConfigError as error:
        if not scenario.at_request:
            raise
        where = f"from request {scenario.at_request}"
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None
