"""The numeric probe in doctor: what a process of its own measured, and what that means.

Owns judging. Leaves measuring to engine/probe_rows.py, run by numbers.py. Blocking; any thread.
"""

import math
from collections.abc import Mapping
from typing import Any

from mlx_worker.doctor.check import Check, fault, ok, warning
from mlx_worker.doctor.device import run_numbers
from mlx_worker.errors import parted

PROBE_S = 180.0  # loading a large model from a slow disk is most of it
REPORT = "run it again on `--model demo`; if that is ok, pull the model again, else report it"


def look(model: str, draft: str) -> Mapping[str, Any]:
    """As engine/probe_rows.py's RowsProbe, or {"error"}."""
    return run_numbers(["rows", model, draft], PROBE_S)


def checks(model: str, found: Mapping[str, Any]) -> list[Check]:
    if str(found.get("error", "")).startswith("ModelNotFound: "):
        problem, step = parted(found["error"].removeprefix("ModelNotFound: "))
        return [fault("numbers", problem.rstrip("."), step or REPORT)]
    if "error" in found:
        return [fault("numbers", f"{model} can't be probed: {found['error']}", REPORT)]
    return [_numbers(found), _times(found)]


def _numbers(found: Mapping[str, Any]) -> Check:
    rows = ", ".join(str(n) for n in found["rows"])
    largest, flips, tie = found["largest_difference"], found["flips"], found["near_tie"]
    value = (
        f"{found['model']}, {found['dtype']}: 1 row against {rows} rows at {found['n_positions']} "
        f"positions: largest difference {largest:.2g}, {_flips(flips)}"
    )
    clear = [flip for flip in flips if not flip["margin"] <= tie]
    if clear:
        return fault("numbers", f"{value}; {len(clear)} above {tie:g}, more than rounding", REPORT)
    if not math.isfinite(largest):
        return fault("numbers", f"{value}; not all are numbers", REPORT)
    if not largest <= tie * 4:
        return warning("numbers", f"{value}; rounding alone differs by less", REPORT)
    if flips:
        return ok("numbers", f"{value}: near-ties below {tie:g}, which rounding may flip")
    return ok("numbers", value)


def _flips(flips: list[Mapping[str, Any]]) -> str:
    """3 flips with margins to 0.12."""
    if not flips:
        return "no flips"
    what = "1 flip" if len(flips) == 1 else f"{len(flips)} flips"
    return f"{what} with margins to {max(flip['margin'] for flip in flips):.2g}"


def _times(found: Mapping[str, Any]) -> Check:
    """What a verify pass costs by rows."""
    times = {int(rows): float(ms) for rows, ms in found["pass_ms"].items()}
    listed = ", ".join(f"{rows}: {ms:.1f}" for rows, ms in sorted(times.items()))
    draft = found["draft_ms"]
    step = f"; a step of {found['draft']}: {draft:.1f} ms" if draft else ""
    return ok("pass_times", f"ms by rows {listed}{step}")
