"""What the figures of a bench depend on: the machine, the versions, the cost of a pass.

Owns looking them up and measuring them. Leaves layout to report.py. Runs on the thread that owns
MLX.
"""

import importlib.metadata
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

import mlx_worker
from mlx_worker.bench.chip import chip_name, read_or_empty
from mlx_worker.config import machine_bytes
from mlx_worker.engine.costs import draft_step_ms, verify_pass_ms
from mlx_worker.engine.device import kind
from mlx_worker.engine.load import LoadedPair
from mlx_worker.records import MAX_DEPTH

PASS_ROWS = range(1, MAX_DEPTH + 2)
READ_REPEATS = 5


@dataclass(frozen=True)
class Machine:
    """Where the bench ran. blas None: the device does not use one, or it can't be told."""

    platform: str
    chip: str
    cores: int
    memory_bytes: int
    load_average: float
    device: str
    blas: str | None
    versions: Mapping[str, str]

    @property
    def is_busy(self) -> bool:
        """Whether others kept half of the processor's cores at work in the last minute."""
        return self.load_average > self.cores / 2


@dataclass(frozen=True)
class Costs:
    """What one step costs, each piece timed alone.

    verify_ms   rows → one pass over the target; 1 row is a plain step without its pipelining
    draft_ms    mode → one draft step; None where the drafter has no weights to time
    read_ms     reading as many bytes as the target has weights, once
    """

    verify_ms: Mapping[int, float]
    draft_ms: Mapping[str, float | None]
    read_bytes: int
    read_ms: float

    def break_even(self, mode: str, depth: int) -> float:
        """Tokens a round at this depth must give to be no slower than plain steps."""
        round_ms = self.verify_ms[depth + 1] + depth * (self.draft_ms.get(mode) or 0.0)
        return round_ms / self.verify_ms[1]

    def ceiling(self, mode: str, depth: int) -> float:
        """The speed-up, as a fraction, if every drafted id were kept."""
        return (depth + 1) / self.break_even(mode, depth) - 1


@dataclass(frozen=True)
class Facts:
    """Everything the card shows that isn't in the pair itself."""

    machine: Machine
    costs: Costs


def gather(pairs: Mapping[str, LoadedPair]) -> Facts:
    """Look at the machine and time the pieces. pairs: mode → pair, `off` among them."""
    return Facts(machine(), costs(pairs))


def machine() -> Machine:
    device = kind()
    versions = {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}
    return Machine(
        platform=platform.platform(terse=True),
        chip=chip_name(),
        cores=os.cpu_count() or 1,
        memory_bytes=machine_bytes(),
        load_average=os.getloadavg()[0],
        device=device,
        blas=blas_name(read_or_empty("/proc/self/maps")) if device == "cpu" else None,
        versions={
            **versions,
            "python": platform.python_version(),
            "mlx-worker": mlx_worker.__version__,
        },
    )


def costs(pairs: Mapping[str, LoadedPair]) -> Costs:
    target = pairs["off"]
    return Costs(
        verify_ms=verify_pass_ms(target, PASS_ROWS),
        draft_ms={
            mode: draft_step_ms(pair) for mode, pair in pairs.items() if mode not in ("off", "auto")
        },
        read_bytes=target.target_bytes,
        read_ms=read_ms(target.target_bytes),
    )


def read_ms(n_bytes: int) -> float:
    """The fastest of a few sums over an array of this size: memory, or the caches if it fits."""
    values = mx.zeros(max(1, n_bytes // 4), dtype=mx.float32) + 1
    mx.eval(values)
    return min(_timed_ms(values) for _ in range(READ_REPEATS))


def _timed_ms(values: mx.array) -> float:
    begin = time.perf_counter()
    mx.eval(values.sum())
    return (time.perf_counter() - begin) * 1000


def blas_name(maps: str) -> str | None:
    """The BLAS that answers MLX's matrix products, from the files mapped into this process.

    An OpenBLAS that was preloaded comes before the reference BLAS that the MLX wheel brings. The
    private copies inside numpy and scipy (libscipy_openblas) serve only these two.
    """
    loaded = {Path(line.split()[-1]).name for line in maps.splitlines() if ".so" in line}
    for start, name in (("libopenblas", "OpenBLAS, preloaded"), ("libblas", "reference BLAS")):
        if files := sorted(file for file in loaded if file.startswith(start)):
            return f"{name} ({files[0]})"
    return None
