"""Heat, the power source and low-power mode, which all decide how fast this machine computes.

Owns judging. Leaves reading them to power.py. Any thread.
"""

from mlx_worker.doctor.check import Check, ok, warning
from mlx_worker.power import Power

COOL = ("nominal", "fair")


def checks(power: Power) -> list[Check]:
    return [_thermal(power.thermal), _source(power)]


def _thermal(thermal: str | None) -> Check:
    if thermal is None:
        return ok("thermal", "this machine doesn't say")
    if thermal in COOL:
        return ok("thermal", thermal)
    return warning("thermal", f"{thermal}: heat slows it down", "let it cool, then measure again")


def _source(power: Power) -> Check:
    words = {True: "on battery", False: "on mains", None: "this machine doesn't say its source"}
    value, is_low = words[power.is_on_battery], getattr(power, "is_low_power", None)
    if is_low:
        step = "switch Low Power Mode off under System Settings > Battery"
        return warning("power", f"{value}; low-power mode slows it down", step)
    return ok("power", value)
