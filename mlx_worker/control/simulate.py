"""Drives the real pacer with a described machine, and says how good its verdict and its cost were.

Owns the serving of simulated requests, the policy's true speed-up, and the command. Leaves every
decision to pacer.py, the machine to machine.py, the keys of a scenario to scenario.py and what is
counted to outcome.py. The clock is simulated; one thread.

`python -m mlx_worker.control.simulate scenario.json [--requests N] [--seed S] [--json]`
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from mlx_worker.control import scenario as scenarios
from mlx_worker.control.controller import Controller
from mlx_worker.control.machine import Machine, Served
from mlx_worker.control.outcome import REPORTED, Account, Moment, Outcome, outcome
from mlx_worker.control.scenario import Scenario
from mlx_worker.control.scenario_schema import about, described_keys
from mlx_worker.control.solve import solve
from mlx_worker.errors import ConfigError
from mlx_worker.records import Pacer, Plan, Round, Status, Traffic

SETTLING = 0.85  # what is left of the slowness after a round, a plain step later
POLICY_REQUESTS = (160, 1600)  # that a true figure rests on: as many as …
POLICY_TOKENS = 32_000  # … give so many tokens
POLICY_WARMUP = 20  # requests in which a forced policy gets to know the machine


class Controls(Protocol):
    """What the simulator uses of a controller."""

    def begin(self, traffic: Traffic, now_s: float) -> Pacer: ...

    @property
    def status(self) -> Status: ...


Make = Callable[[Mapping[int, float] | None, Sequence[int], int], Controls]


# --- serving ----------------------------------------------------------------------------------


class Serving:
    """Serves requests one after the other, as the engine's session does, and keeps the account."""

    def __init__(self, controller: Controls):
        self._controller = controller
        self.now_s = 0.0
        self.account = Account()

    def serve(self, request: Served) -> None:
        """One reply: the first id comes from the prefill, then plans until it is over."""
        self.now_s += request.idle_s
        workload = request.workload
        traffic = Traffic(request.prompt_tokens, workload.temperature, workload.has_grammar)
        pacer = self._controller.begin(traffic, self.now_s)
        self.now_s += request.prefill_s
        account = self.account
        n_ids, was_drafting = 1, None
        while n_ids < request.reply_tokens:
            plan = pacer.plan()
            first, is_drafting = n_ids, plan.depth > 0
            switch_ms = request.switch_ms if was_drafting == (not is_drafting) else 0.0
            run = self._rounds if is_drafting else self._plain
            n_ids = run(request, pacer, plan, first, switch_ms)
            was_drafting = is_drafting
            account.plain_ms += math.fsum(request.plain_ms[first:n_ids])
            account.worst_ms = max(account.worst_ms, account.lost_ms)
        account.tokens += n_ids
        pacer.end()

    def _plain(
        self, request: Served, pacer: Pacer, plan: Plan, first: int, switch_ms: float
    ) -> int:
        """Plain steps from position `first` on; returns the position after them."""
        stop = min(request.reply_tokens, first + max(1, plan.tokens))
        context = request.prompt_tokens + first - 1
        observe, read_ms = pacer.observe, 0.0
        settle_ms = request.settle_ms if switch_ms else 0.0
        n_steps = stop - first
        settling_ms = settle_ms * (1 - SETTLING**n_steps) / (1 - SETTLING)
        self.account.true_ms += math.fsum(request.plain_ms[first:stop]) + switch_ms + settling_ms
        times = zip(request.plain_ms[first:stop], request.timer[first:stop], strict=True)
        for n, (step_ms, timer) in enumerate(times, start=context):
            step_ms = (step_ms + switch_ms + settle_ms) * timer
            switch_ms = 0.0
            settle_ms *= SETTLING
            read_ms += step_ms
            observe(Round(0, 0, 0, step_ms, n))
        self.now_s += read_ms / 1000
        return stop

    def _rounds(
        self, request: Served, pacer: Pacer, plan: Plan, first: int, switch_ms: float
    ) -> int:
        """Rounds until plan.tokens ids are written or the reply is over."""
        reply, prompt = request.reply_tokens, request.prompt_tokens
        last = request.workload.reply_max - 1
        luck, below, pace = request.luck, request.accepted_below, request.pace
        round_ms, per_token_ms = request.round_ms, request.round_per_1k_ms / 1000
        until = min(reply, first + plan.tokens)
        n_ids, true_ms = first, 0.0
        while True:
            drafted = min(plan.depth, last - n_ids)
            if request.proposes and not request.proposes[n_ids]:
                drafted = 0
            right = 0
            while right < drafted and luck[n_ids + right] < below[right]:
                right += 1
            context = prompt + n_ids - 1
            took_ms = (round_ms[drafted] + context * per_token_ms) * pace[n_ids] + switch_ms
            if request.stall_ms:
                took_ms += request.stall_ms[n_ids]
            switch_ms = 0.0
            kept = min(right + 1, reply - n_ids)
            read_ms = took_ms * request.timer[n_ids]
            true_ms += took_ms
            self.now_s += read_ms / 1000
            n_ids += kept
            pacer.observe(Round(plan.depth, drafted, min(kept, right), read_ms, context))
            if n_ids >= until:
                self.account.true_ms += true_ms
                return n_ids


def make_controller(
    curve: Mapping[int, float] | None, depths: Sequence[int], seed: int
) -> Controls:
    return Controller(curve=curve, depths=depths, seed=seed)


def make_forced(curve: Mapping[int, float] | None, depths: Sequence[int], seed: int) -> Controls:
    return Controller(curve=curve, depths=depths, seed=seed, forced="on")


def controller_for(make: Make, machine: Machine, scenario: Scenario, seed: int) -> Controls:
    return make(machine.curve(), scenario.depths, seed)


# --- what is true -----------------------------------------------------------------------------


def policy_truth(scenario: Scenario) -> float | None:
    """What the pacer's drafting brings where it is forced on; the phase alone, in the long run."""
    plain = replace(scenario, at_request=0, description="", drift=0.0)
    return _policy_truth(replace(plain, has_curve=True, curve_cv=0.0))


@lru_cache(maxsize=512)
def _policy_truth(scenario: Scenario) -> float:
    """The ratio of sums over few requests, corrected for how those differ from all requests."""
    machine = Machine((scenario,), "policy", is_even=True)
    serving = Serving(controller_for(make_forced, machine, scenario, 0))
    first = scenario.requests  # throttled as far as it goes
    solved = solve(scenario)
    shares: list[tuple[float, float, float]] = []  # (plain ms, ratio at the best depth, own ratio)
    stop = first + POLICY_WARMUP + policy_requests(scenario)
    for n, request in enumerate(machine.requests(first, stop)):
        before = replace(serving.account)
        serving.serve(request)
        plain_ms = serving.account.plain_ms - before.plain_ms
        if n >= POLICY_WARMUP and plain_ms > 0:
            own = (serving.account.true_ms - before.true_ms) / plain_ms
            shares.append((plain_ms, request.ratio(solved.depth), own))
    return 1 / regressed(shares, 1 / (1 + solved.truth)) - 1


def policy_requests(scenario: Scenario) -> int:
    total = sum(workload.weight for workload in scenario.mix)
    tokens = sum(w.weight * min(w.reply_tokens, w.reply_max) for w in scenario.mix) / total
    least, most = POLICY_REQUESTS
    return min(max(least, round(POLICY_TOKENS / tokens)), most)


def regressed(points: Iterable[tuple[float, float, float]], at: float) -> float:
    """Weighted least squares through (weight, x, y): the y at x = at."""
    points = list(points)
    total = math.fsum(w for w, _, _ in points)
    mean_x = math.fsum(w * x for w, x, _ in points) / total
    mean_y = math.fsum(w * y for w, _, y in points) / total
    square = math.fsum(w * (x - mean_x) ** 2 for w, x, _ in points)
    product = math.fsum(w * (x - mean_x) * (y - mean_y) for w, x, y in points)
    return mean_y + (product / square * (at - mean_x) if square > 0 else 0.0)


# --- a run ------------------------------------------------------------------------------------


def run(
    phases: Sequence[Scenario],
    requests: int | None = None,
    seed: int = 0,
    *,
    make: Make = make_controller,
    has_policy: bool = True,
) -> Outcome:
    """Serve the scenario's requests once.

    requests    None: as many as the scenario says
    make        the controller that is driven
    has_policy  whether truth_policy is worked out, which takes about as long as 200 requests
    """
    requests = phases[0].requests if requests is None else requests
    phases = [replace(phase, requests=requests) for phase in phases if phase.at_request < requests]
    machine = Machine(phases, str(seed))
    serving = Serving(controller := controller_for(make, machine, phases[0], seed))
    moments: list[Moment] = []
    ratios: list[float] = []
    last = solve(phases[-1])
    for n, request in enumerate(machine.requests(0, requests)):
        serving.serve(request)
        moments.append(Moment(controller.status, replace(serving.account)))
        if n >= phases[-1].at_request:
            ratios.append(request.ratio(last.depth))
    policies = [policy_truth(phase) if has_policy else None for phase in phases]
    return outcome(phases, moments, ratios, last, policies)


# --- the command ------------------------------------------------------------------------------


def percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:+.1f} %"


def told(phases: Sequence[Scenario], result: Outcome) -> Iterable[str]:
    """The table for people: the machine, the course, the end."""
    if phases[0].description:
        yield phases[0].description
    interval = f"{percent(result.low)} to {percent(result.high)}"
    yield f"served           {result.requests} requests, {result.tokens:,} tokens"
    yield f"truth            {percent(result.truth)} at depth {result.depth}, the best fixed one"
    yield f"  as drafted     {percent(result.truth_policy)} by the pacer's own depths and exits"
    yield f"  spread         {result.spread:.2f} between requests"
    yield "course"
    yield from (f"  {line}" for line in course(phases, result.moments))
    yield f"verdict          {result.verdict_text}{' WRONG' if result.verdict_wrong else ''}"
    yield f"  figure         {percent(result.figure)}, 90 % interval {interval}"
    yield f"  decided after  {result.requests_to_decide} requests, {result.tokens_to_decide} tokens"
    yield f"  flips          {result.on_off_flips}"
    for change in result.changes:
        yield (
            f"  noticed        {percent(change.truth)} from request {change.at_request}: "
            f"after {change.requests_to_notice} requests"
        )
    worst_loss = f"{100 * result.worst_loss:.2f} %"
    yield f"net speed        {percent(result.net_speed)}, worst loss {worst_loss}"


def course(phases: Sequence[Scenario], moments: Sequence[Moment]) -> Iterable[str]:
    """One line for each change of state, with the request after which it was so."""
    before = ""
    starts = {phase.at_request: solve(phase).truth for phase in phases[1:]}
    for n, moment in enumerate(moments):
        if n in starts:
            yield f"request {n:>4}  the machine changes: truth {percent(starts[n])}"
        if moment.status.state != before:
            before = moment.status.state
            yield f"request {n:>4}  {moment.status.text}: {moment.status.why}"


def described_result() -> Iterable[str]:
    yield "keys of --json, its last line; speeds are fractions, 0.24 is 24 % faster:"
    yield from (f"  {name}\n{about(sentence)}" for name, sentence in REPORTED.items())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mlx_worker.control.simulate",
        description="Drive the real pacer with a described machine and judge its verdict.",
        epilog="\n".join([*described_keys(), *described_result()]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", help="a JSON file; the keys are below, {} is every default")
    parser.add_argument("--requests", type=int, help="how many are served (the scenario's own)")
    parser.add_argument("--seed", type=int, default=0, help="of machine and pacer (0)")
    parser.add_argument("--json", action="store_true", help="the result as JSON in the last line")
    options = parser.parse_args(arguments)
    try:
        if options.requests is not None and options.requests < 1:
            raise ConfigError(
                f"--requests: {options.requests}, must be at least 1",
                hint="leave it out for the scenario's own",
            )
        phases = scenarios.read(options.scenario)
        with scenarios.naming(options.scenario):
            result = run(phases, options.requests, options.seed)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(told(phases, result)))
    if options.json:
        print(json.dumps(result.as_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
