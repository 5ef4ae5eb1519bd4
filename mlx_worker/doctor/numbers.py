"""A process of doctor's own that loads MLX: its device, or the numeric probe of one pair.

    python -m mlx_worker.doctor.numbers device
    python -m mlx_worker.doctor.numbers rows MODEL DRAFT

Owns what is printed: one line of JSON, or {"error"} in its place. Leaves the measurement to
engine/probe_rows.py. Main thread.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any


def device() -> dict[str, Any]:
    from mlx_worker.engine import device

    return device.device()


def rows(model: str, draft: str) -> dict[str, Any]:
    from dataclasses import asdict

    from mlx_worker.engine.load import load_pair
    from mlx_worker.engine.probe_rows import probe_rows
    from mlx_worker.models.locate import locate, locate_draft

    pair = load_pair(locate(model), locate_draft(draft, of=model))
    return asdict(probe_rows(pair))


def main(arguments: Sequence[str]) -> None:
    try:
        found = device() if arguments[0] == "device" else rows(*arguments[1:])
        line = json.dumps(found)
    except Exception as error:  # MLX can fail in any way; who asked tells it in a line
        line = json.dumps({"error": f"{type(error).__name__}: {error}"})
    print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
