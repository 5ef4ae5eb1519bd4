"""Print the acceptance per drafted id at which drafting is exactly level with plain decoding.

    python scripts/break_even.py [--targets demo,random] [--cycles N] [--json FILE]

c_k is what a round at depth k takes, in plain steps. A round whose ids are each right with
probability a gives 1 + a + … + a^k ids, so it is level where that sum is c_k; "never" where c_k is
above k + 1. Two targets: the embedded demo pair, every round charged with its real draft's steps,
and a target of random float32 weights whose draft costs nothing.

One session per target decodes short segments: plain, depth 1, plain, depth 2, … and back. The draft
is always wrong there, so that every round gives one id like a plain step. Each segment of rounds is
compared with the two plain ones beside it; c_k is the median of these ratios. Some cells are then
confirmed with whole replies: plainly, and with an oracle that is right as often as solved, less and
plus MARGIN. Prints tables, then one JSON object.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, median

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/ is not installed

from mlx_worker.bench.facts import blas_name
from mlx_worker.bench.workloads import BUILT_IN, pick
from mlx_worker.engine.load import LoadedPair, load_pair
from mlx_worker.engine.session import generate_events
from mlx_worker.records import Done, GenerationRequest, Plan, Round
from tests.oracle import OraclePair, oracle_pair, random_target

DEPTHS = tuple(range(1, 9))
MARGIN = 0.1
EDGE = 1  # steps at both ends of a plain segment that aren't counted: they build two or none


@dataclass(frozen=True)
class Setting:
    """How a target is measured.

    n_prompt   ids of context before the first segment
    n_rounds   rounds, or counted plain steps, of a segment
    n_cycles   turns through all depths and back
    confirm    depths confirmed by whole replies of n_reply ids after n_short ids, 2·n_repeats each
    """

    n_prompt: int
    n_rounds: int
    n_cycles: int
    confirm: tuple[int, ...]
    n_short: int
    n_reply: int
    n_repeats: int

    @property
    def segments(self) -> list[Plan]:
        """Depth and ids of each; every other one is plain, the first and the last too."""
        plain = Plan(0, self.n_rounds + 2 * EDGE)
        depths = [*DEPTHS, *reversed(DEPTHS)] * self.n_cycles
        return [plain, *(plan for k in depths for plan in (Plan(k, self.n_rounds), plain))]

    @property
    def n_ids(self) -> int:
        return sum(plan.tokens for plan in self.segments)


SETTINGS = {
    "demo": Setting(200, 3, 6, (2, 6), 180, 128, 3),
    "random": Setting(128, 1, 4, (4,), 32, 40, 1),
}
TITLES = {"demo": "the demo pair, its draft charged", "random": "random weights, a draft for free"}


class Segments:
    """A pacer that goes through planned segments and keeps the times of their rounds and steps.

    Every round must give one id, so that a segment has as many rounds as ids.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._depths = [plan.depth for plan in plans for _ in range(plan.tokens)]
        self._plans = iter(plans)
        self.ms: list[float] = []

    def plan(self) -> Plan:
        return next(self._plans)

    def observe(self, round: Round) -> None:
        depth = self._depths[len(self.ms)]
        assert (round.depth, round.drafted, round.accepted) == (depth, depth, 0), round
        self.ms.append(round.round_ms)

    def end(self) -> None:
        pass


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
    """A cell end to end: time per id plainly over time per id drafted, minus 1."""

    depth: int
    acceptance: float
    expected: float
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
    plans = setting.segments
    pacer = Segments(plans)
    for _ in generate_events(replace(pair, acceptance=0.0), request, pacer):
        pass
    times = iter(pacer.ms)
    typical = [typical_ms(plan, list(islice(times, plan.tokens))) for plan in plans]
    rounds: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    ratios: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for i in range(1, len(plans), 2):
        rounds[plans[i].depth].append(typical[i])
        ratios[plans[i].depth].append(typical[i] / fmean((typical[i - 1], typical[i + 1])))
    return [cell(depth, rounds[depth], sorted(ratios[depth])) for depth in DEPTHS]


def typical_ms(plan: Plan, ms: Sequence[float]) -> float:
    return median(ms if plan.depth else ms[EDGE:-EDGE])


def cell(depth: int, rounds: Sequence[float], ratios: Sequence[float]) -> Cell:
    cost, quarter = median(ratios), len(ratios) // 4
    quartiles = (ratios[quarter], ratios[-1 - quarter])
    return Cell(depth, median(rounds), cost, quartiles, break_even(cost, depth))


def ms_per_id(pair: LoadedPair, request: GenerationRequest) -> float:
    done = list(generate_events(pair, request))[-1]
    mx.synchronize()
    assert isinstance(done, Done)
    return done.timing.decode_ms / (done.timing.completion_tokens - 1)


def confirm(
    pair: OraclePair, request: GenerationRequest, found: Cell, n_repeats: int
) -> list[Confirmation]:
    """The cell's acceptance less and plus MARGIN, each against plain replies beside it."""
    level = found.acceptance
    assert level is not None
    chances = [max(0.0, level - MARGIN), min(1.0, level + MARGIN)]
    plain_request = replace(request, speculation="off")
    drafted_request = replace(request, speculation="on", depth=found.depth)
    plain: list[float] = []
    drafted: dict[float, list[float]] = {chance: [] for chance in chances}
    for repeat in range(2 * n_repeats):
        arms = [None, *chances] if repeat % 2 == 0 else [*reversed(chances), None]
        for chance in arms:
            if chance is None:
                plain.append(ms_per_id(pair, plain_request))
            else:
                oracle = replace(pair, acceptance=chance, seed=repeat)
                drafted[chance].append(ms_per_id(oracle, drafted_request))
    return [
        Confirmation(
            found.depth,
            chance,
            ids_per_round(chance, found.depth) / found.cost - 1,
            fmean(plain) / fmean(drafted[chance]) - 1,
        )
        for chance in chances
    ]


def measure(name: str, loaded: LoadedPair, setting: Setting) -> dict[str, object]:
    """Both stages on one target, printed as they are done."""
    ask = {"ignore_eos": True, "speculation": "auto"}
    # The prompt's pass gives the first id; the last segment is plain and needs no room to draft.
    prompt = prompt_of(name, loaded, setting.n_prompt)
    longer = GenerationRequest(prompt, 1 + setting.n_ids, **ask)
    shorter = GenerationRequest(prompt_of(name, loaded, setting.n_short), setting.n_reply, **ask)
    pair = oracle_pair(loaded, [longer, shorter], 0.0, charge=loaded.draft_kind is not None)
    cells = costs(pair, longer, setting)
    print_cells(name, loaded, setting, cells)
    confirmed = [
        one
        for found in cells
        if found.depth in setting.confirm and found.acceptance is not None
        for one in confirm(pair, shorter, found, setting.n_repeats)
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
    print("\n| depth | acceptance | gain expected | gain measured | same sign |")
    print("|---|---|---|---|---|")
    for one in confirmed:
        agrees = "yes" if one.expected * one.measured > 0 else "NO"
        print(f"| {one.depth} | {one.acceptance:.3f} | {one.expected:+.1%} | ", end="")
        print(f"{one.measured:+.1%} | {agrees} |", flush=True)


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
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
