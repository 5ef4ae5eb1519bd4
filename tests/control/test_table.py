"""The controller keeps to its bounds on simulated machines: some of them here, all with -m long.

The bounds are in bounds.py, the machines in scripts/control_table.py.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_worker.control.outcome import Noticed, Outcome
from tests.control.bounds import (
    CHECKS,
    EFFECT_CHECKS,
    FLIPS,
    KEPT,
    KEPT_NOISY,
    NOISE_CHECKS,
    Figure,
    Row,
    summary,
    upper_95,
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "control_table.py"
LONG_S = 2400  # the whole table takes about 15 minutes of two idle cores
SOME = (
    "effect-30 cv8 spread0.1 short greedy|effect-18 cv8 spread0.1 long greedy|"
    "effect-10 cv3 spread0.1 short sampled|effect-5 cv8 spread0.1 long greedy|"
    "effect+5 cv8 spread0.1 long greedy|effect+10 cv15 spread0.1 short greedy|"
    "effect+24 cv8 spread0.3 short greedy|effect+45 cv15 spread0.5 short sampled"
)
SOME_CHECKS = ["wrong", "net_mean", "net_worst"]
SHOWN = (
    *("runs", "wrong_seeds", "decide_median", "decide_bound", "late", "very_late"),
    *("net_mean", "net_worst", "flips_mean", "flips_worst", "covered"),
    *("notice_median", "notice_p90", "change_loss"),
)
Table = list[dict[str, Any]]


def table(*arguments: str) -> Table:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", *arguments], capture_output=True, encoding="utf-8"
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def broken(rows: Table, check: str) -> dict[str, Any]:
    """The rows that are beyond a bound, with their figures for the message."""
    return {
        row["name"]: {name: row[name] for name in SHOWN} for row in rows if check in row["beyond"]
    }


def cells_of(rows: Table) -> Table:
    return [row for row in rows if not row["name"].startswith(("group:", "pool:"))]


@pytest.fixture(scope="module")
def some() -> Table:
    """Eight cells, one run each."""
    return table("--cells", SOME, "--seeds", "1")


@pytest.fixture(scope="module")
def whole() -> Table:
    """Groups, pools and scenario files of the whole table; cells alone have too few runs."""
    rows = table("--scenarios")
    return [row for row in rows if row["name"].startswith(("group:", "pool:", "file:"))]


@pytest.mark.parametrize("check", SOME_CHECKS)
def test_the_controller_keeps_to_a_bound_on_some_machines(some: Table, check: str):
    """Verdicts, what they cost and what they keep; how soon they come needs more runs."""
    assert len(cells_of(some)) == len(SOME.split("|"))
    assert broken(cells_of(some), check) == {}


def test_verdicts_seldom_flip(some: Table):
    """At most once in 400 requests, on average over machines: one run of each is luck."""
    assert sum(row["flips_mean"] for row in cells_of(some)) <= FLIPS * len(cells_of(some))


@pytest.mark.parametrize("effect", KEPT)
def test_a_gain_is_kept(some: Table, effect: float):
    """Of a true +24 % at least +20, of +45 % at least +38 with a noisy timer."""
    (cell,) = [row for row in cells_of(some) if round(row["truth"], 3) == effect]
    assert cell["net_mean"] >= KEPT_NOISY[effect]


@pytest.mark.long
@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize("check", sorted(NOISE_CHECKS | EFFECT_CHECKS))
def test_the_controller_keeps_to_a_bound_that_takes_many_runs(whole: Table, check: str):
    """Wrong: at most 1 % (2 % with a timer CV of 15 %), or a 95 % upper bound of at most 2 %."""
    pools = [row for row in whole if row["name"].startswith("pool:")]
    assert len(pools) == 2 + 8
    assert broken(pools, check) == {}


@pytest.mark.long
@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize("check", sorted(set(CHECKS) - NOISE_CHECKS - EFFECT_CHECKS))
def test_the_controller_keeps_to_a_bound_on_all_machines(whole: Table, check: str):
    """By effect and timer noise, and on each scenario file."""
    rows = [row for row in whole if not row["name"].startswith("pool:")]
    assert len(rows) > 40
    assert broken(rows, check) == {}


@pytest.mark.parametrize(
    ("n_found", "n", "share"),
    [(0, 149, 0.0199048), (4, 480, 0.0189676), (10, 864, 0.0195531), (3, 3, 1.0)],
)
def test_the_upper_bound_of_a_rate_is_the_exact_one(n_found: int, n: int, share: float):
    """Values of Clopper and Pearson, from scipy.stats.beta.ppf(0.95, n_found + 1, n - n_found)."""
    assert upper_95(n_found, n) == pytest.approx(share, abs=1e-7)


# --- the bounds themselves: each is kept by a good run and broken by a bad one -----------------

GOOD = Outcome(
    verdict_text="Off, −18%",
    verdict="off",
    truth=-0.18,
    truth_policy=-0.01,
    verdict_wrong=False,
    requests_to_decide=5,
    tokens_to_decide=1000,
    net_speed=-0.003,
    worst_loss=0.003,
    on_off_flips=0,
    figure=-0.18,
    low=-0.2,
    high=-0.16,
    spread=0.1,
    measured_spread=None,
    depth=4,
    changes=(),
    requests=400,
    tokens=80_000,
    moments=(),
)
EARLY = Figure("off", -0.17, -0.2, -0.15)
GAINS = {"verdict": "on", "truth": 0.24, "truth_policy": 0.25, "net_speed": 0.21}


def rows(early: Figure | None = EARLY, first: float = -0.18, **values: Any) -> list[Row]:
    """Twenty runs of one kind."""
    outcome = replace(GOOD, **values)
    return [Row("cell", n, outcome, noise_cv=0.08, first=first, early=early) for n in range(20)]


def change(truth: float, requests: int | None, worst_loss: float) -> dict[str, Any]:
    found = Noticed(150, truth, requests, None, worst_loss)
    return {"early": None, "truth": truth, "changes": (found,)}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"requests_to_decide": None, "spread": 1.2},  # 400 requests are not enough to be late
        {"requests_to_decide": None, "truth": -0.01, "early": None},
        GAINS | {"early": Figure("on", 0.26, 0.2, 0.3)},
        {"first": 0.24} | change(-0.18, 40, 0.05),
        {"first": 0.15} | change(-0.05, None, 0.015),
    ],
)
def test_a_good_run_is_within_every_bound(values: dict[str, Any]):
    """Also one that need not decide, and one that need not notice."""
    assert summary("good", rows(**values)).beyond == []


@pytest.mark.parametrize(
    ("values", "beyond"),
    [
        ({"verdict_wrong": True}, ["wrong"]),
        ({"requests_to_decide": 6}, ["decide_median"]),
        ({"requests_to_decide": None}, ["decide_median", "decide_p90"]),
        ({"net_speed": -0.011}, ["net_mean"]),
        ({"net_speed": -0.021}, ["net_mean", "net_worst"]),
        (GAINS | {"early": None, "net_speed": 0.19}, ["kept"]),
        ({"on_off_flips": 2}, ["flips"]),
        ({"early": Figure("off", -0.17, -0.175, -0.15)}, ["covered"]),
        ({"first": 0.24} | change(-0.18, 80, 0), ["notice_median"]),
        ({"first": 0.24} | change(-0.18, None, 0), ["notice_median", "notice_p90"]),
        ({"first": 0.15} | change(-0.05, 9, 0.021), ["change_loss"]),
    ],
)
def test_a_bad_run_breaks_its_bound(values: dict[str, Any], beyond: list[str]):
    """And no other one."""
    assert summary("bad", rows(**values)).beyond == beyond
