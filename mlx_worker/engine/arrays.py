"""Small crossings between MLX arrays and plain Python, typed once.

Engine thread only.
"""

from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


def ints(array: mx.array) -> list[int]:
    """Read a one-dimensional integer array; waits for the device."""
    return cast(list[int], array.tolist())


def module_arrays(module: nn.Module) -> dict[str, mx.array]:
    """Every parameter of a module under its dotted name."""
    flat = tree_flatten(module.parameters())
    return {name: array for name, array in flat if isinstance(array, mx.array)}
