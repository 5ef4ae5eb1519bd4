"""How good the controller is over many machines: one row a cell, from the simulator.

Cells: effects × timer noise × spread × reply length × greedy or sampled, and with --scenarios each
file of tests/scenarios. A cell's name holds its keys: "effect+24 cv8 spread0.3 long greedy".

    python scripts/control_table.py --scenarios                                   (about 15 minutes)
    python scripts/control_table.py --seeds 20 --cells "effect-18 cv8*long*"
    python scripts/control_table.py --seeds 50 --scenarios --cells "file:*"

After the cells come groups of them, by effect and noise, and pools for what takes more runs to
show: by effect, and by noise alone, over which the rate of wrong verdicts is bounded. Each figure
stands beside its bound, and a ! marks one beyond it. Without --seeds a cell has the most runs where
verdicts are hardest. The seeds of cells differ.
"""

import argparse
import json
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from itertools import groupby, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/ is not installed

from mlx_worker.control import scenario as scenarios
from mlx_worker.control.outcome import Outcome, verdict_of
from mlx_worker.control.simulate import run
from mlx_worker.control.solve import solve
from tests.control.bounds import (
    CHECKS,
    EFFECT_CHECKS,
    FIGURE_REQUESTS,
    NOISE_CHECKS,
    P90_FACTOR,
    Figure,
    Row,
    Summary,
    summary,
)

SCENARIOS = Path(__file__).parent.parent / "tests" / "scenarios"
EFFECTS = (-0.30, -0.18, -0.10, -0.05, 0.05, 0.10, 0.24, 0.45)
NOISE_CVS = (0.03, 0.08, 0.15)
SPREADS = (0.1, 0.3, 0.5)
REPLY_TOKENS = {"short": 60, "long": 400}
TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}
SEEDS_BY_EFFECT = {0.05: 8, 0.10: 3}  # runs of a cell of the grid, else …
SEEDS = 2
NOISY_SEEDS = {0.15: 2}  # times as many, as fewer cells show how often verdicts are wrong there
FILE_SEEDS, CHANGE_SEEDS = 5, 20  # runs of a scenario file; of one that changes in time
SEEDS_APART = 1000  # between the first seeds of two cells
CHUNK_SEEDS = 10


@dataclass(frozen=True)
class Cell:
    """group: the cells that are summed up with it; n_seeds: how many runs it has, unless told."""

    name: str
    group: str
    phases: tuple[scenarios.Scenario, ...]
    n_seeds: int
    first_seed: int


def every_cell(overrides: dict[str, object]) -> Iterator[Cell]:
    for n, cell in enumerate([*grid(overrides), *files()]):
        yield replace(cell, first_seed=SEEDS_APART * n)


def grid(overrides: dict[str, object]) -> Iterator[Cell]:
    axes = product(EFFECTS, NOISE_CVS, SPREADS, REPLY_TOKENS, TEMPERATURES)
    for effect, cv, spread, length, sampling in axes:
        group = f"effect{100 * effect:+.0f} cv{100 * cv:.0f}"
        keys = {
            "effect": effect,
            "noise_cv": cv,
            "spread": spread,
            "reply_tokens": REPLY_TOKENS[length],
            "temperature": TEMPERATURES[sampling],
        }
        phases = scenarios.parse(keys | overrides)
        n_seeds = SEEDS_BY_EFFECT.get(abs(effect), SEEDS) * NOISY_SEEDS.get(cv, 1)
        yield Cell(f"{group} spread{spread:g} {length} {sampling}", group, phases, n_seeds, 0)


def files() -> Iterator[Cell]:
    for path in sorted(SCENARIOS.glob("*.json")):
        phases = scenarios.read(path)
        n_seeds = CHANGE_SEEDS if len(phases) > 1 else FILE_SEEDS
        yield Cell(f"file:{path.stem}", "", phases, n_seeds, 0)


def served(task: tuple[Cell, int | None, Sequence[int]]) -> tuple[str, list[Row]]:
    cell, requests, seeds = task
    rows: list[Row] = []
    for seed in seeds:
        outcome = run(cell.phases, requests, seed)
        rows.append(
            Row(
                cell=cell.name,
                seed=seed,
                outcome=replace(outcome, moments=()),
                noise_cv=cell.phases[-1].noise_cv,
                first=solve(cell.phases[0]).truth,
                early=early_figure(outcome),
            )
        )
    return cell.name, rows


def early_figure(outcome: Outcome) -> Figure | None:
    """Of the status after FIGURE_REQUESTS, where that is a verdict on what is true to the end."""
    if len(outcome.moments) < FIGURE_REQUESTS or outcome.changes:
        return None
    status = outcome.moments[FIGURE_REQUESTS - 1].status
    if verdict_of(status) == "measuring":
        return None
    if status.speedup is None or status.low is None or status.high is None:
        return None
    return Figure(status.state, status.speedup, status.low, status.high)


def noise_pools(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Over which the rate of wrong verdicts is bounded: all that don't change."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.is_constant and row.right:
            found["pool: cv15" if row.is_noisy else "pool: cv3 and cv8"].append(row)
    return found


def effect_pools(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The grid by effect."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.cell.startswith("effect"):
            found[f"pool: {row.cell.split()[0]}"].append(row)
    return found


HEADER = (
    f"{'cell':<38} truth as drafted | wrong (95 % upper) on/off/measuring | "
    "decide median/bound p90/bound, share late, very late | net mean worst % | "
    "worst loss mean max % | flips mean max | "
    "figure at 60: covered/near % error"
)


def line(s: Summary) -> str:
    policy = "   –" if s.truth_policy is None else f"{100 * s.truth_policy:+5.1f}"
    verdicts = "/".join(map(str, s.verdicts))
    figure = "–"
    if s.covered is not None and s.near is not None and s.figure_error is not None:
        figure = f"{100 * s.covered:.0f}/{100 * s.near:.0f} {100 * s.figure_error:+.1f}"
    notice = ""
    if s.notice_median is not None and s.change_loss is not None:
        notice = f"  notice {s.notice_median:g}/{s.notice_p90:g}, loss {100 * s.change_loss:.1f}"
    return (
        f"{s.name:<38} {100 * s.truth:+5.1f} {policy} | "
        f"{s.wrong:>3} ({100 * s.wrong_upper:4.1f}) {verdicts:>9} | "
        f"{s.decide_median:>5g}/{s.decide_bound:<5.0f} "
        f"{s.decide_p90:>5g}/{P90_FACTOR * s.decide_bound:<5.0f} "
        f"{100 * s.late:3.0f} {100 * s.very_late:3.0f} | "
        f"{100 * s.net_mean:+6.2f} {100 * s.net_worst:+6.2f} | "
        f"{100 * s.worst_loss_mean:5.2f} {100 * s.worst_loss_worst:5.2f} | "
        f"{s.flips_mean:.1f} {s.flips_worst} | {figure}{notice}"
        + (f"  ! {', '.join(s.beyond)}" if s.beyond else "")
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default="*", help="names to run, with * and ?; several with |")
    parser.add_argument("--scenarios", action="store_true", help="tests/scenarios as cells too")
    parser.add_argument("--seeds", type=int, help="runs of each cell (more where it is harder)")
    parser.add_argument("--first-seed", type=int, default=0, help="added to every cell's first (0)")
    parser.add_argument("--requests", type=int, help="a run (the scenario's own, 400)")
    parser.add_argument(
        "--set", default="{}", help='JSON of keys for every grid cell, {"drift": 0.1}'
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    parser.add_argument("--list", action="store_true", help="only the names of the cells")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Cell]:
    patterns = options.cells.split("|")
    return [
        cell
        for cell in every_cell(json.loads(options.set))
        if any(fnmatch(cell.name, pattern) for pattern in patterns)
        and (options.scenarios or not cell.name.startswith("file:"))
    ]


def tasks(
    cells: Sequence[Cell], options: argparse.Namespace
) -> Iterator[tuple[Cell, int | None, range]]:
    """Runs in chunks; those of one cell in a row."""
    for cell in cells:
        first = options.first_seed + cell.first_seed
        stop = first + (options.seeds or cell.n_seeds)
        for begin in range(first, stop, CHUNK_SEEDS):
            yield cell, options.requests, range(begin, min(stop, begin + CHUNK_SEEDS))


def summaries(cells: Sequence[Cell], options: argparse.Namespace) -> Iterator[Summary]:
    """Of each cell as soon as it is done, then of groups and pools with more than one cell."""
    groups = {cell.name: cell.group for cell in cells}
    grouped: dict[str, list[Row]] = defaultdict(list)
    every: list[Row] = []
    with multiprocessing.Pool(options.jobs) as pool:
        done = pool.imap(served, tasks(cells, options))
        for name, parts in groupby(done, key=lambda part: part[0]):
            rows = [row for _, rows in parts for row in rows]
            every += rows
            if groups[name]:
                grouped[f"group: {groups[name]}"] += rows
            yield summary(name, rows)
    checked = (
        (grouped, set(CHECKS) - NOISE_CHECKS - EFFECT_CHECKS),
        (effect_pools(every), EFFECT_CHECKS),
        (noise_pools(every), NOISE_CHECKS),
    )
    for pools, checks in checked:
        for name, rows in pools.items():
            if len({row.cell for row in rows}) > 1:
                yield summary(name, rows, checks)


def main() -> None:
    options = arguments()
    cells = chosen(options)
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return
    if not options.json:
        print(HEADER, flush=True)
    for found in summaries(cells, options):
        print(json.dumps(asdict(found)) if options.json else line(found), flush=True)


if __name__ == "__main__":
    main()
