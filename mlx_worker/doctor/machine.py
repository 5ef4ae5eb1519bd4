"""The machine, its system and the Python on it.

Owns looking and judging. Leaves MLX to device.py. Blocking; any thread. Needs no MLX, so that it
can say why MLX can't be loaded.

Sources: mlx's documentation (macOS 14 or later, an Apple silicon Mac, a Python that Rosetta
doesn't translate; set_wired_limit has an effect from macOS 15 on). What a Mac answers was not seen
yet (docs/MAC.md).
"""

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mlx_worker.bench.chip import chip_name, output_or_empty
from mlx_worker.config import machine_bytes
from mlx_worker.doctor.check import Check, fault, ok, warning

OLDEST_MACOS = (14, 0)  # that MLX runs on
WIRING_MACOS = (15, 0)  # that keeps a model's memory from being paged out
ARM = "arm64"
NATIVE_PYTHON = (
    "install mlx-worker again with a Python for arm64; "
    "`python3 -c 'import platform; print(platform.machine())'` then prints arm64"
)


@dataclass(frozen=True)
class Machine:
    """system_version: of macOS; elsewhere of the kernel.

    architecture   of this Python
    is_translated  Rosetta runs this Python
    """

    system: str
    system_version: str
    chip: str
    architecture: str
    cores: int
    memory_bytes: int
    python: str
    is_translated: bool = False

    @property
    def is_mac(self) -> bool:
        return self.system == "Darwin"

    @property
    def generation(self) -> int | None:
        """3 of an Apple M3 Max; None: no chip of Apple's."""
        found = re.match(r"Apple M([0-9]+)", self.chip)
        return int(found[1]) if found else None

    @property
    def version(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"[0-9]+", self.system_version)[:2])


def look() -> Machine:
    is_mac = platform.system() == "Darwin"
    return Machine(
        system=platform.system(),
        # Not platform.mac_ver(): a Python that was built for an old macOS is told an old version.
        system_version=_sysctl("kern.osproductversion") if is_mac else platform.release(),
        chip=chip_name(),
        architecture=platform.machine(),
        cores=os.cpu_count() or 1,
        memory_bytes=machine_bytes(),
        python=platform.python_version(),
        is_translated=is_mac and _sysctl("sysctl.proc_translated") == "1",
    )


def _sysctl(name: str) -> str:
    """Its value; empty where there is none, as of proc_translated on an Intel Mac."""
    return output_or_empty(["sysctl", "-n", name]).strip()


def checks(machine: Machine) -> list[Check]:
    return [*_chip(machine), *_system(machine), *_python(machine)]


def _chip(machine: Machine) -> Iterator[Check]:
    value = f"{machine.chip}, {machine.cores} cores, {machine.memory_bytes / 1e9:.0f} GB of memory"
    is_intel = machine.is_mac and machine.architecture != ARM and not machine.is_translated
    if is_intel:
        step = "use a Mac with Apple silicon (M1 or later)"
        yield fault("machine", f"{value}; MLX needs Apple silicon", step)
    elif machine.generation:
        yield ok("machine", f"{value}; generation M{machine.generation}")
    elif machine.is_mac:
        yield ok("machine", value)
    else:
        yield ok("machine", f"{value}; no Apple silicon, so MLX computes on the CPU")


def _system(machine: Machine) -> Iterator[Check]:
    if not machine.is_mac:
        yield ok("system", f"{machine.system} {machine.system_version}")
        return
    value = f"macOS {machine.system_version or 'of an unknown version'}"
    if machine.version and machine.version < OLDEST_MACOS:
        yield fault("system", f"{value}; MLX needs 14 or later", "update macOS")
    elif not machine.version:
        yield warning("system", value, "see `sw_vers -productVersion`: it must be 14 or later")
    else:
        yield ok("system", value)


def _python(machine: Machine) -> Iterator[Check]:
    value = f"Python {machine.python}, {machine.architecture}"
    if machine.is_translated:
        what = f"{value}: for Intel, translated by Rosetta, where MLX can't run"
        yield fault("python", what, NATIVE_PYTHON)
    else:
        yield ok("python", value)
