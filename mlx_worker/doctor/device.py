"""MLX: whether it can be loaded, the device it computes on, and the memory it may hold.

Owns asking a process of its own (numbers.py), so that an MLX that ends the process ends no other,
and judging memory. Blocking; any thread.

Sources: mlx's documentation of set_wired_limit (a limit above the system's is an error; `sudo
sysctl iogpu.wired_limit_mb` raises that); mlx-lm#883 (a limit near all of the memory ends in a
kernel panic). What a Mac answers was not seen yet (docs/MAC.md).
"""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_worker.bench.chip import output_or_empty
from mlx_worker.config import memory_bytes
from mlx_worker.doctor.check import Check, fault, ok, warning
from mlx_worker.doctor.machine import WIRING_MACOS, Machine

NUMBERS = "mlx_worker.doctor.numbers"
DEVICE_S = 60.0  # the first import after an installation compiles
LEAST_FREE_BYTES = 4_000_000_000  # that the system should keep beside what may be wired
MIB = 1 << 20
AGAIN = "install mlx-worker again; `python -m mlx_worker.doctor.numbers device` shows the error"


@dataclass(frozen=True)
class Device:
    """kind: metal or cpu; empty where MLX can't be loaded, and `problem` says why.

    working_set_bytes  what Metal recommends to hold, which is also what may be wired
    wired_limit_mb     as iogpu.wired_limit_mb is set; 0: macOS chooses; None: it isn't told
    """

    kind: str = ""
    mlx: str = ""
    mlx_lm: str = ""
    working_set_bytes: int | None = None
    wired_limit_mb: int | None = None
    problem: str | None = None

    def budget_bytes(self, memory_gb: float | None) -> int:
        """What a worker here may hold, as engine/memory.py has it."""
        if memory_gb is None and self.working_set_bytes:
            return self.working_set_bytes
        return memory_bytes(memory_gb)


def look() -> Device:
    bare = Device(mlx=_version("mlx"), mlx_lm=_version("mlx-lm"))
    found = run_numbers(["device"], DEVICE_S)
    if "error" in found:
        return replace(bare, problem=str(found["error"]))
    return replace(bare, **found, wired_limit_mb=_wired_limit_mb())


def _wired_limit_mb() -> int | None:
    if sys.platform != "darwin":
        return None
    text = output_or_empty(["sysctl", "-n", "iogpu.wired_limit_mb"]).strip()
    return int(text) if text.isdecimal() else None


def run_numbers(arguments: Sequence[str], within_s: float) -> dict[str, Any]:
    """What numbers.py prints; {"error"} with the reason where it doesn't. Never raises."""
    # -P: a folder mlx_worker in the current one must not be taken for this package.
    command = [sys.executable, "-P", "-m", NUMBERS, *arguments]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=within_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {within_s:g} s"}
    except OSError as failed:
        return {"error": f"{Path(sys.executable).name} can't be run: {failed.strerror}"}
    return _said(ran)


def _said(ran: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """Its last line, which is JSON; what a library prints before is not looked at."""
    last = (ran.stdout.strip().splitlines() or [""])[-1]
    try:
        found = json.loads(last)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    if ran.returncode < 0:
        return {"error": f"its process was ended by signal {-ran.returncode}"}
    lines = ran.stderr.strip().splitlines() or [f"its process ended with code {ran.returncode}"]
    return {"error": lines[-1]}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def checks(machine: Machine, device: Device, memory_gb: float | None) -> list[Check]:
    return [
        *_mlx(machine, device),
        *_memory(machine, device, memory_gb),
        *_wired_limit(machine, device, memory_gb),
    ]


def _mlx(machine: Machine, device: Device) -> Iterator[Check]:
    value = f"mlx {device.mlx}, mlx-lm {device.mlx_lm}"
    if device.problem:
        yield fault("mlx", f"{value}: can't be used: {device.problem}", AGAIN)
    elif machine.is_mac and device.kind != "metal":
        step = "see that this Mac has a Metal GPU; in a virtual machine there may be none"
        yield fault("mlx", f"{value} on the CPU: Metal isn't available", step)
    else:
        yield ok("mlx", f"{value} on {device.kind}")


def _memory(machine: Machine, device: Device, memory_gb: float | None) -> Iterator[Check]:
    budget = device.budget_bytes(memory_gb)
    whose = "as limits.memory_gb says" if memory_gb is not None else "the default"
    value = f"the worker may hold {gb(budget)} of {gb(machine.memory_bytes)}, {whose}"
    if budget > machine.memory_bytes:
        step = f"set limits.memory_gb to less than {machine.memory_bytes / 1e9:.0f}"
        yield fault("memory", value, step)
    else:
        yield ok("memory", value)


def _wired_limit(machine: Machine, device: Device, memory_gb: float | None) -> Iterator[Check]:
    name, most = "wired_limit", device.working_set_bytes
    if not machine.is_mac:
        yield ok(name, "none: only macOS has one")
        return
    if machine.version and machine.version < WIRING_MACOS:
        what = f"macOS {machine.system_version} may page a model out, which slows it down"
        yield warning(name, what, "update to macOS 15 or later, which can keep it in memory")
        return
    if most is None:
        yield warning(name, "MLX doesn't say what may be wired", "see the line mlx")
        return
    set_mb = device.wired_limit_mb
    value = f"{gb(most)}, {'set by iogpu.wired_limit_mb' if set_mb else 'as macOS chooses'}"
    budget = device.budget_bytes(memory_gb)
    if budget > most:
        lower = f"lower limits.memory_gb to {most / 1e9:.0f}"
        step = f"{lower}, or `sudo sysctl iogpu.wired_limit_mb={-(-budget // MIB)}`"
        yield fault(name, f"{value}; limits.memory_gb asks for {gb(budget)}", step)
    elif set_mb and machine.memory_bytes - set_mb * MIB < LEAST_FREE_BYTES:
        what = f"{value}: leaves macOS less than {gb(LEAST_FREE_BYTES)}, which can end in a panic"
        yield warning(name, what, "`sudo sysctl iogpu.wired_limit_mb=0` lets macOS choose again")
    else:
        yield ok(name, value)


def gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f} GB"
