"""What doctor says of a machine, its system, its Python and MLX, from described facts."""

from dataclasses import replace
from typing import Any

import pytest

from mlx_worker.doctor import device, energy, machine
from mlx_worker.doctor.check import Check
from mlx_worker.doctor.device import Device
from mlx_worker.doctor.machine import Machine
from mlx_worker.power import Power

GB = 1_000_000_000
MAC = Machine("Darwin", "15.3", "Apple M3 Max", "arm64", 16, 64 * GB, "3.13.1")
METAL = Device("metal", "0.32.4", "0.32.2", working_set_bytes=48 * GB, wired_limit_mb=0)


def of(checks: list[Check], name: str) -> Check:
    return next(one for one in checks if one.name == name)


@pytest.mark.parametrize(
    ("chip", "generation"),
    [
        ("Apple M1", 1),
        ("Apple M2 Ultra", 2),
        ("Apple M3 Max", 3),
        ("Apple M4 Pro", 4),
        ("Apple M5", 5),
        ("Apple M1 (Virtual)", 1),
        ("Intel(R) Core(TM) i7-9750H", None),
        ("VirtualApple @ 2.50GHz", None),
    ],
)
def test_the_generation_is_read_from_the_chips_name(chip: str, generation: int | None):
    """As sysctl gives it on each."""
    assert replace(MAC, chip=chip).generation == generation


def test_a_sound_mac_is_ok_in_every_line():
    """With nothing to do."""
    told = [*machine.checks(MAC), *device.checks(MAC, METAL, None)]
    assert [(one.level, one.next_step) for one in told] == [("ok", None)] * 6
    assert of(told, "machine").value.endswith("generation M3")


def test_an_x86_python_under_rosetta_is_named():
    """MLX can't run there, and pip's own message doesn't say why."""
    told = of(machine.checks(replace(MAC, architecture="x86_64", is_translated=True)), "python")
    assert told.level == "fault"
    assert "Rosetta" in told.value
    assert "arm64" in (told.next_step or "")


def test_a_translated_python_does_not_make_the_machine_an_intel_mac():
    """Only one of the two lines is a fault."""
    facts = replace(MAC, architecture="x86_64", is_translated=True, chip="VirtualApple @ 2.50GHz")
    assert of(machine.checks(facts), "machine").level == "ok"


def test_an_intel_mac_is_a_fault():
    """MLX needs Apple silicon."""
    facts = replace(MAC, architecture="x86_64", chip="Intel(R) Core(TM) i7-9750H")
    assert of(machine.checks(facts), "machine").level == "fault"


@pytest.mark.parametrize(
    ("version", "system", "wired"),
    [
        ("13.7", "fault", "warning"),
        ("14.6.1", "ok", "warning"),
        ("15.0", "ok", "ok"),
        ("26.1", "ok", "ok"),
        ("", "warning", "ok"),
    ],
)
def test_a_macos_that_is_too_old_is_named(version: str, system: str, wired: str):
    """14 for MLX itself, 15 for memory that stays."""
    facts = replace(MAC, system_version=version)
    assert of(machine.checks(facts), "system").level == system
    assert of(device.checks(facts, METAL, None), "wired_limit").level == wired


def test_a_budget_above_what_may_be_wired_is_a_fault_with_both_ways_out():
    """MLX refuses such a limit when the worker starts."""
    told = of(device.checks(MAC, METAL, 56.0), "wired_limit")
    assert told.level == "fault"
    assert "lower limits.memory_gb to 48" in (told.next_step or "")
    assert "iogpu.wired_limit_mb=53406" in (told.next_step or "")


def test_a_wired_limit_that_leaves_the_system_nothing_is_a_warning():
    """macOS then has no memory to take back, and panics."""
    facts = replace(METAL, working_set_bytes=62 * GB, wired_limit_mb=59_600)
    assert of(device.checks(MAC, facts, None), "wired_limit").level == "warning"


def test_a_budget_above_the_memory_is_a_fault():
    """Whatever the system."""
    told = of(device.checks(MAC, METAL, 100.0), "memory")
    assert (told.level, told.next_step) == ("fault", "set limits.memory_gb to less than 64")


def test_a_mac_without_metal_is_a_fault():
    """As in a virtual machine without a GPU."""
    assert of(device.checks(MAC, replace(METAL, kind="cpu"), None), "mlx").level == "fault"


def test_an_mlx_that_cannot_be_loaded_is_told_with_its_own_words():
    """A library for another architecture, most often."""
    broken = Device(mlx="0.32.4", problem="ImportError: incompatible architecture")
    told = of(device.checks(MAC, broken, None), "mlx")
    assert told.level == "fault"
    assert "incompatible architecture" in told.value


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("print('noise'); print('{\"kind\": \"cpu\"}')", None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "ended by signal 4"),
        ("raise SystemExit('dyld: missing symbol')", "dyld: missing symbol"),
        ("import time; time.sleep(60)", "no answer within"),
    ],
)
def test_a_process_that_loads_mlx_may_end_in_any_way(
    script: str, error: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    """Doctor's own process goes on and says what happened."""
    (tmp_path / "stand_in.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(device, "NUMBERS", "stand_in")
    found = device.run_numbers(["device"], 0.5 if "sleep" in script else 30.0)
    assert error in found["error"] if error else found == {"kind": "cpu"}


@pytest.mark.parametrize(
    ("power", "levels"),
    [
        (Power(None, None), ["ok", "ok"]),
        (Power(True, "nominal"), ["ok", "ok"]),
        (Power(False, "fair"), ["ok", "ok"]),
        (Power(False, "serious"), ["warning", "ok"]),
    ],
)
def test_heat_that_slows_the_machine_is_a_warning(power: Power, levels: list[str]):
    """What isn't said is not held against it."""
    assert [one.level for one in energy.checks(power)] == levels
