"""Draw speed-up by depth and workload into a picture file.

Owns the picture. Needs matplotlib, the `plot` extra, imported only when drawing. Any thread.
"""

import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from mlx_worker.bench.run import Row
from mlx_worker.bench.workloads import ALL
from mlx_worker.control.decide import Estimate
from mlx_worker.errors import ConfigError

MARKERS = "osD^v<>Ph*X"  # so that lines differ without colour too


def check(path: Path) -> None:
    """Fail before the minutes of measuring, not after them.

    Raises ConfigError: matplotlib is missing, or it writes no such kind of file.
    """
    kinds = _figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(
            f"--plot: {path}: no picture format", hint="end the name in .png, .svg or .pdf"
        )


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """One panel a mode: lines by workload over depth, the total with its 90 % interval."""
    modes = list(dict.fromkeys(row.arm.mode for row in rows if row.arm.depth))
    figure = _figure(figsize=(1 + 5 * max(1, len(modes)), 4.5), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, max(1, len(modes)), sharey=True, squeeze=False)[0]
    for panel, mode in zip(panels, modes, strict=False):
        _panel(panel, mode, [row for row in rows if row.arm.mode == mode])
    panels[0].set_ylabel("speed-up over plain decoding, %")
    figure.savefig(path, dpi=150)


def _figure(**options: Any):
    """A figure without a window or global state.

    Raises ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib", hint=f"{sys.executable} -m pip install matplotlib"
        ) from None
    return Figure(**options)


def interval_or_point(estimate: Estimate) -> tuple[float, float]:
    """Low and high; twice the figure itself where there is no interval."""
    if estimate.low is None or estimate.high is None:
        return estimate.speedup, estimate.speedup
    return estimate.low, estimate.high


def _panel(panel: Any, mode: str, rows: Sequence[Row]) -> None:
    panel.axhline(0, color="black", linewidth=0.8)
    workloads = dict.fromkeys(row.workload for row in rows)
    for workload, marker in zip(workloads, cycle(MARKERS), strict=False):
        known = [
            (row.arm.depth, row.estimate)
            for row in rows
            if row.workload == workload and row.estimate is not None
        ]
        depths = [depth for depth, _ in known]
        speedups = [100 * estimate.speedup for _, estimate in known]
        if workload != ALL:
            panel.plot(depths, speedups, marker=marker, markersize=4, label=workload)
            continue
        ends = [interval_or_point(estimate) for _, estimate in known]
        below = [speedup - 100 * low for speedup, (low, _) in zip(speedups, ends, strict=True)]
        above = [100 * high - speedup for speedup, (_, high) in zip(speedups, ends, strict=True)]
        style = {"color": "black", "linewidth": 2, "capsize": 4}
        panel.errorbar(depths, speedups, [below, above], label=ALL, **style)
    panel.set_title(mode)
    panel.set_xlabel("drafted ids a round")
    panel.set_xticks(sorted({row.arm.depth for row in rows}))
    panel.legend()
