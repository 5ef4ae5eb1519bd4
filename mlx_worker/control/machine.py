"""A described machine: requests with everything that will happen in them already drawn.

Owns times, drafts that are right, and what a timer reads. Leaves what the machine's figures are to
solve.py and the serving to simulate.py. Pure and seeded; any thread.

What happens to a request is drawn by (seed, request) and kept by position in the reply: whether a
draft of id 57 will be right, how slow that moment is, and by how much the timer errs. So the same
reply meets the same machine whatever the pacer plans.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from statistics import NormalDist

from mlx_worker.control.scenario import Scenario, Workload
from mlx_worker.control.solve import (
    Solved,
    acceptance_of,
    lengths,
    planned_tokens,
    solve,
    throttled,
)
from mlx_worker.records import MAX_DEPTH

BLOCK_TOKENS = 32  # drift is constant for so long
WARMUP_STEPS = 3
MAX_DRIFT = 1.0  # of the walk, in log time
EVEN_STEPS = (0.7548776662466927, 0.5698402909980532)  # the plastic number's: even in the plane


@dataclass(frozen=True)
class Served:
    """One request with everything that will happen in it. Lists are by position in the reply.

    accepted_below  by draft position from 1: a draft is right where luck is below it
    plain_ms        true time of a plain step
    round_ms        by drafted ids: a round takes pace · (it + context / 1000 · round_per_1k_ms)
    timer           what a timer reads, over what is true
    proposes        whether the drafter has something to propose; empty: always
    stall_ms        what a round takes longer than that; empty: nothing
    planned_ms, planned_tokens  by depth: what an average round takes and gives
    """

    workload: Workload
    prompt_tokens: int
    reply_tokens: int
    idle_s: float
    prefill_s: float
    switch_ms: float
    settle_ms: float
    accepted_below: tuple[float, ...]
    luck: Sequence[float]
    plain_ms: Sequence[float]
    round_ms: tuple[float, ...]
    round_per_1k_ms: float
    pace: Sequence[float]
    timer: Sequence[float]
    proposes: Sequence[bool]
    stall_ms: Sequence[float]
    planned_ms: tuple[float, ...]
    planned_tokens: Sequence[float]

    def ratio(self, depth: int) -> float:
        """Time per token at this fixed depth over time per plain token; noise is left out."""
        middle = self.reply_tokens // 2
        context = (self.prompt_tokens + middle) / 1000
        round_ms = (self.planned_ms[depth] + context * self.round_per_1k_ms) * self.pace[middle]
        return round_ms / self.plain_ms[middle] / self.planned_tokens[depth]


def pick(weights: Sequence[float], u: float) -> int:
    """The index where the running sum passes u of the whole; u in [0, 1)."""
    goal = u * sum(weights)
    sums = list(accumulate(weights))
    return next((n for n, so_far in enumerate(sums) if goal < so_far), len(sums) - 1)


def timer(scenario: Scenario, n: int, rng: Random) -> list[float]:
    """What the timer reads over what is true: lognormal with mean 1, and spikes."""
    variance = math.log1p(scenario.noise_cv**2)
    sd, shift, gauss, exp = math.sqrt(variance), variance / 2, rng.gauss, math.exp
    read = [exp(gauss(0.0, sd) - shift) for _ in range(n)] if sd else [1.0] * n
    if scenario.spike_probability:
        for p in range(n):
            if rng.random() < scenario.spike_probability:
                read[p] *= scenario.spike_factor
    return read


class Machine:
    """Requests of a scenario's phases, in order.

    is_even  workloads and acceptance levels come evenly spread instead of at random, so that a mean
             over few requests is near that over all
    """

    def __init__(self, phases: Sequence[Scenario], seed: str, *, is_even: bool = False):
        self._phases = phases
        self._solved = [solve(scenario) for scenario in phases]
        self._seed = seed
        self._is_even = is_even
        self._walk = 0.0

    def curve(self) -> dict[int, float] | None:
        """Cost of a round in plain steps by depth as it was timed at load, with that error."""
        scenario, solved = self._phases[0], self._solved[0]
        if not scenario.has_curve:
            return None
        rng, cv = Random(f"{self._seed}:curve"), scenario.curve_cv
        sd = math.sqrt(math.log1p(cv * cv))
        return {k: solved.cost[k] * math.exp(rng.gauss(0, sd)) for k in scenario.depths}

    def requests(self, first: int, stop: int) -> Iterator[Served]:
        phase = 0
        for n in range(first, stop):
            while phase + 1 < len(self._phases) and self._phases[phase + 1].at_request <= n:
                phase += 1
            yield self._request(n, self._phases[phase], self._solved[phase])

    def _request(self, n: int, scenario: Scenario, solved: Solved) -> Served:
        rng = Random(f"{self._seed}:{n}")
        which, level = rng.random(), rng.random()
        if self._is_even:
            which, level = ((n * step) % 1.0 for step in EVEN_STEPS)
        index = pick([workload.weight for workload in scenario.mix], which)
        workload = scenario.mix[index]
        z = NormalDist().inv_cdf(min(max(level, 1e-6), 1 - 1e-6))
        prompt, reply = lengths(workload, rng)
        n_drawn = reply + MAX_DEPTH + 1
        idle_s = rng.expovariate(1 / scenario.idle_s) if scenario.idle_s else 0.0
        luck = [rng.random() for _ in range(n_drawn)]
        pace = self._pace(scenario, n, n_drawn, rng)
        slow = throttled(scenario, n)
        rounds_slow = slow if scenario.throttle_rounds_only else 1.0
        base_ms, per_token_ms = scenario.plain_ms, scenario.context_plain_ms / 1000
        base_ms += per_token_ms * (prompt - 1)
        read = timer(scenario, n_drawn, rng)
        accepted_below = acceptance_of(workload, solved.shift + solved.widths[index] * z)
        unit_ms = scenario.plain_ms * rounds_slow
        return Served(
            workload=workload,
            prompt_tokens=prompt,
            reply_tokens=reply,
            idle_s=idle_s,
            prefill_s=prompt / 1e6 * scenario.prefill_ms,
            switch_ms=scenario.switch_cost * scenario.plain_ms,
            settle_ms=scenario.settle_cost * scenario.plain_ms,
            accepted_below=accepted_below,
            luck=luck,
            plain_ms=[each * (base_ms + per_token_ms * p) for p, each in enumerate(pace)],
            round_ms=tuple(cost * unit_ms for cost in solved.cost),
            round_per_1k_ms=scenario.context_round_ms * rounds_slow,
            pace=pace,
            timer=read,
            proposes=self._proposes(scenario, n_drawn, rng),
            stall_ms=self._stalls(scenario, n_drawn, rng),
            planned_ms=tuple(cost * unit_ms for cost in solved.planned),
            planned_tokens=planned_tokens(scenario, accepted_below),
        )

    def _proposes(self, scenario: Scenario, n: int, rng: Random) -> Sequence[bool]:
        if scenario.proposes >= 1:
            return ()
        return [rng.random() < scenario.proposes for _ in range(n)]

    def _stalls(self, scenario: Scenario, n: int, rng: Random) -> Sequence[float]:
        if not scenario.stall_probability:
            return ()
        stall_ms = scenario.stall_steps * scenario.plain_ms
        return [stall_ms * (rng.random() < scenario.stall_probability) for _ in range(n)]

    def _pace(self, scenario: Scenario, n: int, n_drawn: int, rng: Random) -> list[float]:
        """Factors on all true times by position: drift, throttling, background load, warm-up."""
        slow = 1.0 if scenario.throttle_rounds_only else throttled(scenario, n)
        pace: list[float] = []
        for _ in range(0, n_drawn, BLOCK_TOKENS):
            if scenario.drift:
                step = scenario.drift * math.sqrt(BLOCK_TOKENS / 1000) * rng.gauss(0, 1)
                self._walk = min(max(self._walk + step, -MAX_DRIFT), MAX_DRIFT)
            pace += [slow * math.exp(self._walk)] * BLOCK_TOKENS
        del pace[n_drawn:]
        if rng.random() < scenario.burst_probability:
            first = rng.randrange(n_drawn)
            for p in range(first, min(n_drawn, first + scenario.burst_tokens)):
                pace[p] *= scenario.burst_factor
        for p in range(1, min(1 + WARMUP_STEPS, n_drawn)):
            pace[p] *= 1 + scenario.warmup_cost
        return pace
