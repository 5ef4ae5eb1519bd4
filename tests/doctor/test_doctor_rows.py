"""What the numeric probe's figures mean, and `mlx-worker doctor` as its users run it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlx_worker.doctor import rows
from mlx_worker.doctor.check import Check
from mlx_worker.upkeep_cli import folded, line, summary

FOUND: Mapping[str, Any] = {
    "model": "m",
    "draft": "d",
    "dtype": "bfloat16",
    "n_positions": 36,
    "rows": [2, 3, 5, 9],
    "largest_difference": 0.1,
    "flips": [],
    "near_tie": 0.5,
    "pass_ms": {"2": 12.0, "1": 10.0},
    "draft_ms": 1.5,
}
RUN_S = 55


def flip(margin: float) -> dict[str, float]:
    return {"rows": 5, "position": 3, "margin": margin}


def doctor(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mlx_worker", "doctor", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({}, "ok", "largest difference 0.1, no flips"),
        ({"flips": [flip(0.2)]}, "ok", "1 flip with margins to 0.2: near-ties below 0.5"),
        ({"flips": [flip(0.2), flip(0.8)]}, "fault", "1 above 0.5, more than rounding"),
        ({"flips": [flip(float("nan"))]}, "fault", "more than rounding"),
        ({"largest_difference": 2.5}, "warning", "rounding alone differs by less"),
        ({"largest_difference": float("inf")}, "fault", "not all are numbers"),
        ({"largest_difference": float("nan")}, "fault", "not all are numbers"),
    ],
)
def test_only_near_ties_may_flip(changes: dict[str, Any], level: str, text: str):
    """Kernels for one row and for several round differently; more than that changes texts."""
    told = rows.checks("m", {**FOUND, **changes})[0]
    assert told.level == level
    assert text in told.value


def test_the_times_of_a_pass_are_in_the_order_of_rows():
    """With a step of the draft beside them."""
    assert rows.checks("m", FOUND)[1].value == "ms by rows 1: 10.0, 2: 12.0; a step of d: 1.5 ms"


def test_a_probe_that_ended_is_a_fault_in_its_own_words():
    """It has no times."""
    told = rows.checks("m", {"error": "its process was ended by signal 9"})
    assert [one.level for one in told] == ["fault"]
    assert "signal 9" in told[0].value


def test_levels_read_without_colour():
    """As words, under each other."""
    assert line("FAULT", "port", "is\ntaken") == "FAULT    port         is taken"
    told = [Check("a", "fault", ""), Check("b", "warning", ""), Check("c", "warning", "")]
    assert summary(told) == "1 fault, 2 warnings"
    assert summary([Check("a", "ok", "")]) == "all is well"


def told_as_json(*flags: str) -> dict[str, dict[str, str]]:
    """On a fresh installation: no fault, so it exits with 0."""
    ran = doctor("--json", *flags)
    assert (ran.returncode, ran.stdout.count("\n")) == (0, 1)
    checks = json.loads(ran.stdout)["checks"]
    assert {tuple(one) for one in checks} == {("name", "level", "value", "next_step")}
    told = {one["name"]: one for one in checks}
    assert len(told) == len(checks)
    assert all((one["next_step"] is None) == (one["level"] == "ok") for one in checks)
    return told


def test_doctor_prints_one_json_line():
    """A line for each check, without what is measured."""
    told = told_as_json("--quick")
    assert {"machine", "models", "port", "service", "gateway"} <= set(told)
    assert not {"numbers", "pass_times"} & set(told)


def test_a_long_line_goes_on_under_its_value():
    """Between words, in the columns of the terminal."""
    text = line("ok", "port", "127.0.0.1:8321 is taken by another mlx-worker, pid 12")
    assert folded(text, 60).splitlines() == [
        "ok       port         127.0.0.1:8321 is taken by another",
        "                      mlx-worker, pid 12",
    ]


def test_a_model_that_isnt_there_says_how_one_is_named():
    """Running the probe again with another would tell nothing of it."""
    error = "ModelNotFound: model not found: nix. hint: a short name"
    (told,) = rows.checks("nix", {"error": error})
    assert (told.level, told.value, told.next_step) == (
        "fault", "model not found: nix", "a short name",
    )  # fmt: skip


def test_a_model_for_no_measurement_is_refused():
    """It would be ignored."""
    ran = doctor("--quick", "--model", "demo")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "--model: nothing is measured with --quick" in ran.stderr


@pytest.mark.long
def test_doctor_measures_with_the_demo_pair():
    """One row against several, and a pass by rows."""
    told = told_as_json()
    assert told["numbers"]["level"] == "ok"
    assert "no flips" in told["numbers"]["value"]
    assert "1: " in told["pass_times"]["value"]


def test_doctor_goes_on_with_a_broken_config(home: Path):
    """A fault, so it exits with 1; the other lines are there, and nothing was written."""
    folder = home / ".mlx-worker"
    folder.mkdir()
    (folder / "config.yaml").write_text("server: {port: many}\n")
    ran = doctor("--quick")
    assert ran.returncode == 1
    assert "FAULT    config" in ran.stdout
    assert "ok       gateway      none is configured" in ran.stdout
    assert [one.name for one in folder.iterdir()] == ["config.yaml"]


def test_doctor_goes_on_where_files_never_end_and_names_have_no_encoding(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    """Pipes in place of files, in a folder whose name is no UTF-8: a minute at most, and a line."""
    folder = home / os.fsdecode(b"\xff")
    folder.mkdir()
    for name in ("config.yaml", "state.json", "policies.json", "models.json"):
        os.mkfifo(folder / name)
    monkeypatch.setenv("MLX_WORKER_HOME", str(folder))
    monkeypatch.setenv("PYTHONIOENCODING", "ascii:strict")
    script = (
        "from mlx_worker.doctor import examine\n"
        "examine.STORAGE_S = examine.NETWORK_S = 0.5\n"
        "from mlx_worker.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", script, "doctor", "--quick", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    assert ran.stdout.count("\n") == 1, ran.stderr
    told = {one["name"]: one["level"] for one in json.loads(ran.stdout)["checks"]}
    assert told["config"] == "fault"
    assert told["settings"] == "warning"
    assert "worker" in told
