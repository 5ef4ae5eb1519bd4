"""JSON of a client's own inside a body: schemas, arguments of calls.

Owns how deep and how long it may be, so that whoever walks or compiles it needs no limit of its
own. Leaves what it means to the engine. Pure; any thread.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

from mlx_worker.errors import InvalidParameter
from mlx_worker.wire.fields import free_object
from mlx_worker.wire.sse import json_bytes

MAX_LEVELS = 64  # of objects and lists, the outermost counted


def document(path: str, value: Any) -> dict[str, Any]:
    """An object that JSON can write again, of at most MAX_LEVELS."""
    level: Sequence[Any] = [free_object(path, value)]
    n_levels = 0
    while level:
        _check_numbers(path, level)
        n_levels += any(isinstance(one, dict | list) for one in level)
        level = [inner for one in level for inner in _inside(one)]
    if n_levels > MAX_LEVELS:
        raise InvalidParameter(path, f"{n_levels} levels", f"at most {MAX_LEVELS}")
    return value


def written(path: str, value: Any, most: int) -> str:
    """Its JSON, in the client's order of keys. most: bytes that it may have."""
    data = json_bytes(value)
    if len(data) > most:
        raise InvalidParameter(path, f"{len(data):,} bytes", f"at most {most:,}")
    return data.decode("utf-8")


def _inside(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else ()


def _check_numbers(path: str, values: Sequence[Any]) -> None:
    """Raises for 1e999: JSON has it, a float is infinite then, and JSON can't write that."""
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidParameter(path, value, "numbers that a float can hold")
