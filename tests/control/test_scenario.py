"""Scenario files: their keys, their errors, their schema; and those in tests/scenarios."""

import json
from pathlib import Path

import pytest

from mlx_worker.control.scenario import (
    AT_REQUEST,
    CHANGES,
    Replies,
    Scenario,
    Workload,
    keys,
    parse,
    read,
)
from mlx_worker.control.scenario_schema import described_keys, schema, schema_text
from mlx_worker.control.simulate import policy_truth
from mlx_worker.control.solve import solve
from mlx_worker.errors import ConfigError

FOLDER = Path(__file__).parent.parent / "scenarios"
FILES = sorted(FOLDER.glob("*.json"))
SCHEMA = Path(__file__).parents[2] / "mlx_worker" / "control" / "scenario.schema.json"
KEYS_HINT = "--help lists every key with its limits"


def error_of(values: object) -> str:
    with pytest.raises(ConfigError) as failed:
        parse(values)
    return str(failed.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"spread": -1}, "spread: -1, must be 0..3"),
        ({"spread": 1e400}, "spread: inf, must be 0..3"),
        ({"spread": float("nan")}, "spread: nan, must be 0..3"),
        ({"spread": None}, "spread: None, must be 0..3"),
        ({"effect": -1}, "effect: -1, must be -0.95..10 or null"),
        ({"requests": 0}, "requests: 0, must be a whole number 1..1e+06"),
        ({"requests": 1.5}, "requests: 1.5, must be a whole number 1..1e+06"),
        ({"requests": True}, "requests: True, must be a whole number 1..1e+06"),
        ({"has_grammar": 1}, "has_grammar: 1, must be true or false"),
        ({"solve_by": "luck"}, "solve_by: 'luck', must be cost or acceptance"),
        ({"acceptance": []}, "acceptance: [], must be a number or up to 8, each 0..1"),
        ({"acceptance": [0.5, 2]}, "acceptance: [0.5, 2], must be a number or up to 8, each 0..1"),
        ({"depths": [9]}, "depths: [9], must be a whole number or up to 8, each 1..8"),
        ({"workloads": 3}, "workloads: 3, must be a list of objects"),
        ({"workloads": [3]}, "workloads[0]: 3, must be an object"),
        ({"workloads": [{"weight": -1}]}, "workloads[0].weight: -1, must be 0..1e+06"),
        ({"changes": [{"at_request": 9, "spread": 4}]}, "changes[0].spread: 4, must be 0..3"),
        ([], "a scenario: [], must be an object"),
    ],
)
def test_an_error_names_the_key_its_value_and_its_limit(values: object, message: str):
    """Then it says where all limits are listed."""
    assert error_of(values) == f"{message}. hint: {KEYS_HINT}"


@pytest.mark.parametrize(
    ("values", "path", "nearest"),
    [
        ({"acceptence": 0.5}, "acceptence", "acceptance"),
        ({"change": []}, "change", "changes"),
        ({"workloads": [{"wieght": 1}]}, "workloads[0].wieght", "weight"),
        ({"changes": [{"at_request": 5, "efect": 0}]}, "changes[0].efect", "effect"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(values: object, path: str, nearest: str):
    """A misspelt key would otherwise leave a default in force unseen."""
    assert error_of(values) == f"unknown key: {path}. hint: did you mean {nearest}?"


@pytest.mark.parametrize("at", [None, 0, "10", True])
def test_a_change_needs_the_request_from_which_it_holds(at: object):
    """A change at the first request would be the scenario itself."""
    assert error_of({"changes": [{"at_request": at}]}) == (
        f"changes[0].at_request: {at!r}, must be a whole number from 1. "
        "hint: changes are written in the order in which they happen"
    )


def test_changes_come_in_order():
    """The second must be later than the first."""
    message = error_of({"changes": [{"at_request": 30}, {"at_request": 30}]})
    assert message.startswith("changes[1].at_request: 30, must be a whole number from 31")


def test_a_change_does_not_set_the_number_of_requests():
    """It belongs to the whole run."""
    assert error_of({"changes": [{"at_request": 5, "requests": 9}]}) == (
        "changes[0].requests: can't change. hint: set it for the whole scenario"
    )


def test_a_change_keeps_what_it_does_not_name():
    """Phases add up: each is the one before with some keys replaced."""
    changes = [{"at_request": 5, "spread": 0.1}, {"at_request": 9, "effect": 0}]
    phases = parse({"plain_ms": 10, "effect": 0.2, "changes": changes})
    assert [(p.at_request, p.plain_ms, p.spread, p.effect) for p in phases] == [
        (0, 10, 0.25, 0.2),
        (5, 10, 0.1, 0.2),
        (9, 10, 0.1, 0),
    ]


def test_a_workload_takes_what_it_leaves_out_from_the_scenario():
    """So that six workloads don't repeat the same lengths."""
    workloads = [{"name": "a"}, {"name": "b", "spread": 0.5}]
    (phase,) = parse({"spread": 0.3, "acceptance": 0.6, "workloads": workloads})
    assert [(w.name, w.spread, w.acceptance) for w in phase.mix] == [
        ("a", 0.3, (0.6,)),
        ("b", 0.5, (0.6,)),
    ]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"{", ", line 1: not JSON: Expecting property name enclosed in double quotes"),
        (b'{\n"a" 1}', ", line 2: not JSON: Expecting ':' delimiter"),
        (b"\xff", ": not UTF-8 at byte 0"),
        (b'{"spread": 9}', f": spread: 9, must be 0..3. hint: {KEYS_HINT}"),
    ],
)
def test_an_error_in_a_file_names_the_file(tmp_path: Path, written: bytes, message: str):
    """With the line, where it isn't JSON."""
    path = tmp_path / "some.json"
    path.write_bytes(written)
    with pytest.raises(ConfigError) as failed:
        read(path)
    assert str(failed.value) == f"{path}{message}"


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    """Not a traceback."""
    with pytest.raises(ConfigError, match=r"gone\.json: No such file or directory\. hint: give a"):
        read(tmp_path / "gone.json")


def test_the_schema_beside_the_code_is_the_table_of_keys():
    """Made again with: python -m mlx_worker.control.scenario_schema."""
    assert SCHEMA.read_text(encoding="utf-8") == schema_text()


def test_the_schema_has_every_key_once():
    """Workloads and changes refer to the same definitions."""
    found = json.loads(json.dumps(schema()))
    parts = {name: list(part["properties"]) for name, part in found["$defs"].items()}
    root = [name for name in found["properties"] if name != "$schema"]
    assert sorted(parts["replies"] + parts["machine"] + root) == sorted([*keys(Scenario), CHANGES])
    assert sorted(parts["replies"] + parts["workload"]) == sorted(keys(Workload))
    assert parts["change"] == [AT_REQUEST]


def test_help_describes_every_key_with_its_limits():
    """--help is where an error sends people."""
    lines = list(described_keys())
    described = [line.split(" = ")[0].strip() for line in lines if " = " in line]
    own = [name for name in keys(Workload) if name not in keys(Replies)]
    assert described == [*keys(Scenario), *own, CHANGES]
    assert "  spread = 0.25    0..3" in lines


def test_the_scenarios_cover_what_traffic_and_machines_do():
    """None of them is lost by a rename."""
    assert {path.stem for path in FILES} == {
        *("slower_5", "slower_10", "slower_18", "slower_30"),
        *("faster_5", "faster_10", "faster_24", "faster_45", "level"),
        *("wide_spread", "picky", "bad_tenth", "mixed", "sampled"),
        *("short_replies", "long_replies", "long_context", "no_curve", "noisy_15"),
        *("gains_then_loses", "loses_then_gains", "drift_to_minus_5", "throttled", "bursts"),
        *("lookup_loses", "lookup_gains", "stalling", "tiny_replies"),
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_scenario_is_the_machine_that_it_asks_for(path: Path):
    """It says what it is about, and each of its phases has exactly its effect."""
    phases = read(path)
    assert phases[0].description.endswith(".")
    effects = [phase.effect for phase in phases]
    assert [solve(phase).truth for phase in phases] == pytest.approx(effects, abs=1e-6)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_scenario_named_by_its_effect_has_it(path: Path):
    """slower_18 is 18 % slower."""
    sign, _, percent = path.stem.partition("_")
    if sign in ("slower", "faster") and percent.isdigit():
        effect = int(percent) / 100 * (1 if sign == "faster" else -1)
        assert read(path)[0].effect == effect


def test_picking_requests_gains_where_every_fixed_depth_loses():
    """The scenario `picky` is one where the truth at the best depth is not the judge."""
    (phase,) = read(FOLDER / "picky.json")
    policy = policy_truth(phase)
    assert solve(phase).truth == pytest.approx(-0.18)
    assert policy is not None
    assert policy > 0.05
