"""What this machine says of its power and its heat, and whether it slept; what of it has changed.

Owns reading that: on a Mac from NSProcessInfo and `pmset`, on Linux from /sys; and comparing two
clocks. What isn't said is None: nothing is assumed. Leaves what a change means to control/.
Blocking; any thread, a `Watch` one at a time. What a Mac says was not seen yet (docs/MAC.md).
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from mlx_worker.records import Disturbance

SUPPLIES = Path("/sys/class/power_supply")
PMSET_S = 5.0  # that it may take
FULL_SPEED = 100  # percent
THERMAL = ("nominal", "fair", "serious", "critical")  # as NSProcessInfo counts them
ASK_S = 15.0  # between two processes of pmset that say the same
LOOK_S = 5.0  # between two looks at power and heat
GAP_S = 10.0  # that the wall clock must run ahead for a sleep


@dataclass(frozen=True)
class Power:
    """What a machine says of itself now.

    thermal       one of THERMAL: from serious on the machine is slowed down
    is_low_power  its owner asked it to save power, which slows it down
    """

    is_on_battery: bool | None = None
    thermal: str | None = None
    is_low_power: bool | None = None


class Pmset:
    """What `pmset` says. Each text is a process, so it is asked for every ASK_S at most."""

    def __init__(
        self,
        run: Callable[..., str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run or _pmset
        self._clock = clock
        self._said: dict[tuple[str, ...], tuple[float, str]] = {}

    def __call__(self, *what: str) -> str:
        known = self._said.get(what)
        if known is None or self._clock() - known[0] >= ASK_S:
            known = self._said[what] = self._clock(), self._run(*what)
        return known[1]


def power(pmset: Callable[..., str] | None = None) -> Power:
    """As it is now, by NSProcessInfo as far as it goes; the rest, on a Mac, by pmset's words."""
    pmset = pmset or _pmset
    if sys.platform != "darwin":
        return Power(from_supplies(SUPPLIES))
    thermal, is_low_power = from_process_info()
    if thermal is None or is_low_power is None:
        said = from_pmset("", pmset("-g", "therm"), pmset("-g"))
        thermal = said.thermal if thermal is None else thermal
        is_low_power = said.is_low_power if is_low_power is None else is_low_power
    return Power(from_pmset(pmset("-g", "batt")).is_on_battery, thermal, is_low_power)


def from_process_info(module: str = "Foundation") -> tuple[str | None, bool | None]:
    """Heat and low power mode from NSProcessInfo; None for what it, or this Python, can't say."""
    try:
        info: Any = import_module(module).NSProcessInfo.processInfo()
        state = int(info.thermalState())
    except Exception:  # Objective-C's own among them; whoever looks goes on without
        return None, None
    thermal = THERMAL[state] if 0 <= state < len(THERMAL) else None
    try:
        return thermal, bool(info.isLowPowerModeEnabled())
    except AttributeError:  # before macOS 12
        return thermal, None


def from_pmset(battery: str = "", heat: str = "", settings: str = "") -> Power:
    """Of the texts of `pmset -g batt`, `pmset -g therm` and `pmset -g`."""
    source = re.search("Now drawing from '(AC|Battery) Power'", battery)
    saving = re.search(r"^\s*lowpowermode\s+([01])\s*$", settings, re.MULTILINE)
    return Power(source and source[1] == "Battery", _thermal(heat), saving and saving[1] == "1")


def _thermal(heat: str) -> str | None:
    if limit := re.search(r"CPU_Speed_Limit\s*=\s*([0-9]+)", heat):
        return "nominal" if int(limit[1]) >= FULL_SPEED else "serious"
    return "nominal" if "No thermal warning level has been recorded" in heat else None


def from_supplies(folder: Path) -> bool | None:
    """Of Linux's list of supplies; None: it has no battery, or doesn't say."""
    status = [
        _read(one / "status") for one in _supplies(folder) if _read(one / "type") == "Battery"
    ]
    if not any(status):
        return None
    return "Discharging" in status


def _supplies(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _pmset(*what: str) -> str:
    command = ["/usr/bin/pmset", *what]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PMSET_S, check=False)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return ran.stdout


# --- what has changed -------------------------------------------------------------------------


def changes(before: Power, now: Power) -> list[Disturbance]:
    """What is otherwise now; what wasn't said, before or now, is no change."""
    pairs = (
        ("power source", before.is_on_battery, now.is_on_battery),
        ("thermal state", before.thermal, now.thermal),
        ("low power mode", before.is_low_power, now.is_low_power),
    )
    return [
        Disturbance(reason, lasts=True)
        for reason, was, is_ in pairs
        if was is not None and is_ is not None and was != is_
    ]


def kept(before: Power, now: Power) -> Power:
    """Now, and what it was where that isn't said: a look that failed hides no change."""
    said = {name: value for name, value in asdict(now).items() if value is not None}
    return replace(before, **said)


class Sleep:
    """Sees that the wall clock went on while the loop's clock stood still.

    clock, wall  seconds; the first only ever grows and may stop while the machine sleeps
    gap_s        that counts as sleep. A wall clock that is set back is none
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float], gap_s: float) -> None:
        self._clock = clock
        self._wall = wall
        self._gap_s = gap_s
        self._ahead_s = wall() - clock()

    def happened(self) -> bool:
        """Since the last look."""
        ahead_s = self._wall() - self._clock()
        slept = ahead_s - self._ahead_s > self._gap_s
        self._ahead_s = ahead_s
        return slept


class Watch:
    """Looks again and again at what the machine says, and tells what has changed since.

    power  as it was last; read  says it anew, every LOOK_S at most and after a sleep
    """

    def __init__(
        self,
        read: Callable[[], Power] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.power = self._known = Power()
        self._read = read or partial(power, Pmset())
        self._clock = clock
        self._sleep = Sleep(clock, wall, GAP_S)
        self._next_s = clock()

    def look(self) -> list[Disturbance]:
        """What has disturbed the machine since the last look."""
        slept = self._sleep.happened()
        found = [Disturbance("sleep", lasts=False)] if slept else []
        if slept or self._clock() >= self._next_s:
            self._next_s = self._clock() + LOOK_S
            now = self._read()
            found += changes(self._known, now)
            self.power, self._known = now, kept(self._known, now)
        return found
