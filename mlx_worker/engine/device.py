"""What MLX computes on. Imports nothing but MLX itself, so that asking is quick. Any thread."""

from typing import Any

import mlx.core as mx


def kind() -> str:
    """metal or cpu."""
    return "metal" if mx.default_device().type == mx.DeviceType.gpu else "cpu"


def working_set_bytes() -> int | None:
    """What Metal recommends to hold; None: there is no Metal."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    return recommended if isinstance(recommended, int) and recommended else None


def device() -> dict[str, Any]:
    """Both, as plain values."""
    return {"kind": kind(), "working_set_bytes": working_set_bytes()}
