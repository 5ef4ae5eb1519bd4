"""Print the acceptance per drafted id at which drafting is exactly level with plain decoding.

    python scripts/break_even.py [--targets demo,random] [--cycles N] [--json FILE]

c_k is what a round at depth k takes, in plain steps. A round whose ids are each right with
probability a gives 1 + a + … + a^k ids, so it is level where that sum is c_k; "never" where c_k is
above k + 1. Two targets: the embedded demo pair, every round charged with its real draft's steps,
and a target of random float32 weights whose draft costs nothing.

One session per target decodes short segments: plain, depth 1, plain, depth 2, … and back. The draft
is always wrong there, so that every round gives one id like a plain step. Each segment of rounds is
compared with the two plain ones beside it; c_k is the median of these ratios. Some cells are then
confirmed: an oracle that is right as often as solved, less and plus MARGIN, drafts longer segments
between plain ones, and what both take per id is compared. Prints tables, then one JSON object.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/ is not installed

from results import tell

from mlx_worker.bench.facts import blas_name
from mlx_worker.bench.workloads import BUILT_IN, pick
from mlx_worker.engine.load import LoadedPair, load_pair
from mlx_worker.engine.session import generate_events
from mlx_worker.records import GenerationRequest, Plan, Round
from tests.oracle import OraclePair, oracle_pair, random_target

DEPTHS = tuple(range(1, 9))
MARGIN = 0.1
CONFIRM_IDS = 12
TRIM = 0.2
EDGE = 1  # steps at both ends of a plain segment that aren't counted: they build two or none


@dataclass(frozen=True)
class Setting:
    """How a target is measured.

    n_prompt   ids of context before the first segment
    n_rounds   rounds, or counted plain steps, of a segment
    n_cycles   turns through all depths and back
    confirm    depths confirmed by n_pairs segments of CONFIRM_IDS ids, and as many plain ones
    """

    n_prompt: int
    n_rounds: int
    n_cycles: int
    confirm: tuple[int, ...]
    n_pairs: int

    @property
    def plans(self) -> list[Plan]:
        """The segments that c_k is measured on; every other one is plain."""
        depths = [*DEPTHS, *reversed(DEPTHS)] * self.n_cycles
        return alternating(depths, self.n_rounds + 2 * EDGE, self.n_rounds)

    def confirming(self, depth: int) -> list[Plan]:
        return alternating([depth] * self.n_pairs, CONFIRM_IDS, CONFIRM_IDS)

    @property
    def n_ids(self) -> int:
        """Ids of the longest reply; a segment may end with a whole round too many."""
        longest = max(sum(plan.tokens + plan.depth for plan in self.confirming(k)) for k in DEPTHS)
        return 1 + max(longest, sum(plan.tokens for plan in self.plans))


def alternating(depths: Sequence[int], n_plain: int, n_drafted: int) -> list[Plan]:
    """Plain, first depth, plain, second depth, …, plain."""
    plain = Plan(0, n_plain)
    return [plain, *(plan for k in depths for plan in (Plan(k, n_drafted), plain))]


SETTINGS = {
    "demo": Setting(180, 3, 6, (2, 6), 24),
    "random": Setting(100, 1, 3, (4,), 8),
}
TITLES = {"demo": "the demo pair, its draft charged", "random": "random weights, a draft for free"}


class Segments:
    """A pacer that goes through plans and keeps the rounds and steps of each."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = plans
        self.heard: list[list[Round]] = []

    def plan(self) -> Plan:
        self.heard.append([])
        return self._plans[len(self.heard) - 1]

    def observe(self, round: Round) -> None:
        self.heard[-1].append(round)

    def end(self) -> None:
        pass

    @property
    def is_done(self) -> bool:
        n_heard = len(self.heard)
        return n_heard == len(self._plans) and n_ids(self.heard[-1]) >= self._plans[-1].tokens


def n_ids(rounds: Sequence[Round]) -> int:
    return sum(round.accepted + 1 for round in rounds)


def segments(
    pair: OraclePair, request: GenerationRequest, plans: Sequence[Plan]
) -> list[list[Round]]:
    """The rounds and steps of each planned segment of one session."""
    pacer = Segments(plans)
    for _ in generate_events(pair, request, pacer):
        if pacer.is_done:
            break
    assert pacer.is_done, "the reply ended before the plans did"
    return pacer.heard


@dataclass(frozen=True)
class Cell:
    """One depth: ms of a round, in plain steps (median and quartiles), and where it is level."""

    depth: int
    round_ms: float
    cost: float
    quartiles: tuple[float, float]
    acceptance: float | None


@dataclass(frozen=True)
class Confirmation:
    """A cell end to end: time per id plainly over time per id drafted, minus 1.

    rounds    how many drafted ones it rests on
    expected  from the cell's cost and the ids that rounds give at this acceptance on average
    drawn     from the cell's cost and the ids that these rounds happened to give
    """

    depth: int
    acceptance: float
    rounds: int
    expected: float
    drawn: float
    measured: float


def ids_per_round(acceptance: float, depth: int) -> float:
    return sum(acceptance**i for i in range(depth + 1))


def break_even(cost: float, depth: int) -> float | None:
    """The acceptance at which a round gives `cost` ids; None where none does, 0 where any does."""
    if cost > depth + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ids_per_round(middle, depth) < cost else (low, middle)
    return high if cost > 1 else 0.0


def prompt_of(name: str, pair: LoadedPair, n_ids: int) -> tuple[int, ...]:
    """A prompt of n ids: chat repeated for the demo pair, any ids for random weights."""
    if name == "random":
        return tuple(3 + 7 * i % 250 for i in range(n_ids))
    texts = [message for prompt in pick(BUILT_IN, ["edit"], 3) for message in prompt.messages]
    whole = [id for text in texts for id in pair.encode_chat([text])]
    return tuple((whole * (1 + n_ids // len(whole)))[-n_ids:])


def costs(pair: OraclePair, request: GenerationRequest, setting: Setting) -> list[Cell]:
    """A cell for every depth, from one session."""
    plans = setting.plans
    heard = segments(replace(pair, acceptance=0.0), request, plans)
    ms = [typical_ms(plan, rounds) for plan, rounds in zip(plans, heard, strict=True)]
    rounds: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    ratios: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for i in range(1, len(plans), 2):
        rounds[plans[i].depth].append(ms[i])
        ratios[plans[i].depth].append(ms[i] / fmean((ms[i - 1], ms[i + 1])))
    return [cell(depth, rounds[depth], sorted(ratios[depth])) for depth in DEPTHS]


def typical_ms(plan: Plan, rounds: Sequence[Round]) -> float:
    assert {round.drafted for round in rounds} == {plan.depth}, "a round was cut short"
    return median(round.round_ms for round in (rounds if plan.depth else rounds[EDGE:-EDGE]))


def cell(depth: int, rounds: Sequence[float], ratios: Sequence[float]) -> Cell:
    cost, quarter = median(ratios), len(ratios) // 4
    quartiles = (ratios[quarter], ratios[-1 - quarter])
    return Cell(depth, median(rounds), cost, quartiles, break_even(cost, depth))


def confirm(
    pair: OraclePair, request: GenerationRequest, found: Cell, setting: Setting
) -> list[Confirmation]:
    """The cell's acceptance less and plus MARGIN, each in one session with plain segments."""
    level = found.acceptance
    assert level is not None
    return [
        confirmation(replace(pair, acceptance=chance), request, found, setting)
        for chance in (max(0.0, level - MARGIN), min(1.0, level + MARGIN))
    ]


def confirmation(
    pair: OraclePair, request: GenerationRequest, found: Cell, setting: Setting
) -> Confirmation:
    plans = setting.confirming(found.depth)
    heard = segments(pair, request, plans)
    plain = [round for rounds in heard[::2] for round in rounds]
    drafted = [round for rounds in heard[1::2] for round in rounds]
    assert isinstance(pair.acceptance, float)
    return Confirmation(
        found.depth,
        pair.acceptance,
        len(drafted),
        ids_per_round(pair.acceptance, found.depth) / found.cost - 1,
        n_ids(drafted) / len(drafted) / found.cost - 1,
        ms_per_id(plain) / ms_per_id(drafted) - 1,
    )


def ms_per_id(rounds: Sequence[Round]) -> float:
    """From the mean round without the TRIM shortest and longest: bursts of other work are long."""
    ms = sorted(round.round_ms for round in rounds)
    n_cut = int(TRIM * len(ms))
    return fmean(ms[n_cut : len(ms) - n_cut]) * len(rounds) / n_ids(rounds)


def measure(name: str, loaded: LoadedPair, setting: Setting) -> dict[str, object]:
    """Both stages on one target, printed as they are done."""
    prompt = prompt_of(name, loaded, setting.n_prompt)
    request = GenerationRequest(prompt, setting.n_ids, ignore_eos=True)
    pair = oracle_pair(loaded, [request], 0.0, charge=loaded.draft_kind is not None)
    cells = costs(pair, request, setting)
    print_cells(name, loaded, setting, cells)
    confirmed = [
        one
        for found in cells
        if found.depth in setting.confirm and found.acceptance is not None
        for one in confirm(pair, request, found, setting)
    ]
    print_confirmed(confirmed)
    mx.clear_cache()
    return {
        "cells": [asdict(one) for one in cells],
        "confirmed": [asdict(one) for one in confirmed],
    }


def print_cells(name: str, loaded: LoadedPair, setting: Setting, cells: Sequence[Cell]) -> None:
    last = setting.n_prompt + setting.n_ids
    print(f"\n### {TITLES[name]}: {loaded.target_bytes / 1e6:.0f} MB, {loaded.dtype}, ", end="")
    print(f"{setting.n_prompt} to {last} ids of context\n")
    print("| depth | round ms | in plain steps | quartiles | level at acceptance |")
    print("|---|---|---|---|---|")
    for one in cells:
        low, high = one.quartiles
        level = "never" if one.acceptance is None else f"{one.acceptance:.3f}"
        print(f"| {one.depth} | {one.round_ms:.1f} | {one.cost:.2f} | ", end="")
        print(f"{low:.2f}–{high:.2f} | {level} |", flush=True)


def print_confirmed(confirmed: Sequence[Confirmation]) -> None:
    print("\n| depth | acceptance | rounds | gain expected | as drawn | measured | same sign |")
    print("|---|---|---|---|---|---|---|")
    for one in confirmed:
        agrees = "yes" if one.expected * one.measured > 0 else "NO"
        print(
            f"| {one.depth} | {one.acceptance:.3f} | {one.rounds} | {one.expected:+.1%} | ", end=""
        )
        print(f"{one.drawn:+.1%} | {one.measured:+.1%} | {agrees} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default=",".join(SETTINGS))
    parser.add_argument("--megabytes", type=float, default=300)
    parser.add_argument(
        "--cycles", type=int, help="turns through all depths and back (default: by target)"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, object] = {"load": os.getloadavg()[0]}
    for name in options.targets.split(","):
        loaded = load_pair("demo") if name == "demo" else random_target(options.megabytes)
        setting = SETTINGS[name]
        if options.cycles:
            setting = replace(setting, n_cycles=options.cycles)
        result[name] = measure(name, loaded, setting)
    maps = Path("/proc/self/maps")
    result["blas"] = blas_name(maps.read_text()) if maps.exists() else None
    print()
    tell(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
