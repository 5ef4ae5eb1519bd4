"""What MLX computes on. Imports nothing but MLX itself, so that asking is quick. Any thread."""

from typing import Any

import mlx.core as mx


def device() -> dict[str, Any]:
    """working_set_bytes: what Metal recommends to hold; None: there is no Metal."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    is_metal = mx.default_device().type == mx.DeviceType.gpu
    return {"kind": "metal" if is_metal else "cpu", "working_set_bytes": recommended or None}
