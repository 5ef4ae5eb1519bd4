"""Whether this machine runs on its battery, and whether heat slows it down, as it says itself.

Owns reading that, on a Mac from `pmset`, on Linux from /sys. What isn't said is None: nothing is
assumed. Blocking; any thread. What a Mac says was not seen yet (docs/MAC.md).
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SUPPLIES = Path("/sys/class/power_supply")
PMSET_S = 5.0  # that it may take
FULL_SPEED = 100  # percent


@dataclass(frozen=True)
class Power:
    """thermal: nominal, or throttled."""

    is_on_battery: bool | None = None
    thermal: str | None = None


def power() -> Power:
    """As it is now."""
    if sys.platform == "darwin":
        return from_pmset(_pmset("batt"), _pmset("therm"))
    return Power(from_supplies(SUPPLIES))


def from_pmset(battery: str, heat: str) -> Power:
    """Of the texts of `pmset -g batt` and `pmset -g therm`."""
    source = re.search("Now drawing from '(AC|Battery) Power'", battery)
    return Power(source and source[1] == "Battery", _thermal(heat))


def _thermal(heat: str) -> str | None:
    if limit := re.search(r"CPU_Speed_Limit\s*=\s*([0-9]+)", heat):
        return "nominal" if int(limit[1]) >= FULL_SPEED else "throttled"
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


def _pmset(what: str) -> str:
    command = ["/usr/bin/pmset", "-g", what]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PMSET_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout
