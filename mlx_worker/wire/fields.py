"""Readers of single JSON values: one value in, a checked Python value out.

Owns what kinds of value there are and how an error names the one at fault: its path, the value, its
limit. Wording as in the engine's own checks. Leaves to openai.py which key takes which kind. The
first fault ends the reading, so a hostile body costs no more than a good one. Pure; any thread.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, cast

from mlx_worker.errors import MAX_VALUE_CHARS, InvalidParameter, RequestError, shown

Reader = Callable[[str, Any], Any]  # (path, value) → the value as records have it, or RequestError

MAX_WHOLE = (1 << 63) - 1  # where a whole number has no other limit
ID = re.compile("0|[1-9][0-9]{0,17}", re.ASCII)
NAME = re.compile("[A-Za-z0-9_-]{1,64}", re.ASCII)
MAX_LISTED = 8  # names that one message spells out


def flag(path: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidParameter(path, value, "true or false")
    return value


def text(path: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidParameter(path, value, "a text")
    return value


def anything(path: str, value: Any) -> Any:
    return value


def name(path: str, value: Any) -> str:
    """What a client calls a function or a schema of its own."""
    if not NAME.fullmatch(text(path, value)):
        raise InvalidParameter(path, value, "1 to 64 of A-Z, a-z, 0-9, _ and -")
    return value


def free_object(path: str, value: Any) -> dict[str, Any]:
    """An object whose keys are the client's own."""
    if not isinstance(value, dict):
        raise InvalidParameter(path, value, "an object")
    return cast("dict[str, Any]", value)


def items(path: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidParameter(path, value, "a list")
    return cast("list[Any]", value)


def is_whole(value: Any) -> bool:
    """Whether it is an integer; true and false are not."""
    return type(value) is int


def whole(least: int, most: int | None = None) -> Reader:
    limit = f"a whole number of at least {least}" if most is None else f"{least} to {most}"

    def read(path: str, value: Any) -> int:
        if not is_whole(value) or value < least or (most is not None and value > most):
            raise InvalidParameter(path, value, limit)
        if value > MAX_WHOLE and most is None:
            raise InvalidParameter(path, value, f"at most {MAX_WHOLE}")
        return value

    return read


def number(least: float, most: float = math.inf, *, is_open: bool = False) -> Reader:
    """Finite, least ≤ value ≤ most; least itself is excluded if is_open."""
    bound = f"above {least:g}" if is_open else f"at least {least:g}"
    limit = f"a number {bound}" + (f", at most {most:g}" if math.isfinite(most) else "")

    def read(path: str, value: Any) -> float:
        found = _as_float(value)
        if not least <= found <= most or math.isinf(found) or (is_open and found == least):
            raise InvalidParameter(path, value, limit)
        return found

    return read


def _as_float(value: Any) -> float:
    """NaN for what is no number, which is within no limits; true and false are none."""
    if not is_whole(value) and not isinstance(value, float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def word(*words: str) -> Reader:
    def read(path: str, value: Any) -> str:
        if value not in words:
            raise InvalidParameter(path, value, f"one of {', '.join(words)}")
        return value

    return read


def only(allowed: Any, limit: str) -> Reader:
    """One value, of that very type: 1 is not true."""

    def read(path: str, value: Any) -> Any:
        if type(value) is not type(allowed) or value != allowed:
            raise InvalidParameter(path, value, limit)
        return value

    return read


def replaced(key: str) -> Reader:
    """No value: another key has taken this one's place."""

    def read(path: str, value: Any) -> Any:
        raise RequestError(f"{path}: replaced by {key}", param=path, hint=f"send {key}")

    return read


def check_type(path: str, value: Any, known: str, why: str, hint: str | None = None) -> None:
    """Raises for an object of another type, whose keys would all be unknown."""
    kind = free_object(path, value).get("type")
    if kind is not None and kind != known:
        raise InvalidParameter(f"{path}.type", kind, f"{known}: {why}", hint)


def each(reader: Reader) -> Reader:
    """A list with at least one item, every one read by `reader`, as a tuple."""

    def read(path: str, value: Any) -> tuple[Any, ...]:
        if not items(path, value):
            raise InvalidParameter(path, value, "a list of at least one")
        return tuple(reader(f"{path}[{i}]", item) for i, item in enumerate(value))

    return read


def record(readers: Mapping[str, Reader], required: Sequence[str] = ()) -> Reader:
    """An object with known keys only. null is the same as an absent key."""

    def read(path: str, value: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, item in free_object(path, value).items():
            if item is None:
                continue
            if key not in readers:
                raise unknown_key(_joined(path, key), key, readers)
            found[key] = readers[key](_joined(path, key), item)
        for key in required:
            if key not in found:
                raise missing(path, key)
        return found

    return read


def missing(path: str, key: str, hint: str | None = None) -> RequestError:
    where = _joined(path, key)
    return RequestError(f"{where}: missing", param=where, hint=hint or f"send {key}")


def agreed(given: Mapping[str, Any], key: str, alias: str, path: str = "") -> Any:
    """The value of a parameter with two names; None: neither was given."""
    value, other = given.get(key), given.get(alias)
    if value is None or other is None:
        return other if value is None else value
    if value != other:
        limit = f"the same as {key}: {shown(value)}"
        raise InvalidParameter(_joined(path, alias), other, limit, "send one of them")
    return value


def listed(names: Iterable[str]) -> str:
    """Names as a message has them; of many, the first few."""
    few = [name[:MAX_VALUE_CHARS] for name in islice(names, MAX_LISTED + 1)]
    return ", ".join([*few[:MAX_LISTED], "…"] if len(few) > MAX_LISTED else few)


def unknown_key(path: str, key: str, known: Mapping[str, Reader]) -> RequestError:
    """The error for a key that nothing reads: ignoring it could change the text unnoticed."""
    near = difflib.get_close_matches(key[:MAX_VALUE_CHARS], known, n=1)
    hint = f"did you mean {near[0]}?" if near else "leave it out"
    return RequestError(f"unknown parameter: {path}", param=path, hint=hint)


def token_ids(path: str, value: Any) -> tuple[int, ...]:
    """A list of ids; whether the model has them is the engine's to say."""
    ids = items(path, value)
    if not ids:
        raise InvalidParameter(path, value, "at least one id long")
    for id in ids:
        if not is_whole(id) or not 0 <= id <= MAX_WHOLE:
            raise InvalidParameter(path, id, "token ids, whole numbers of at least 0")
    return tuple(ids)


def biases(least: float, most: float) -> Reader:
    """A map from token id to number; JSON has the ids as texts."""
    bias = number(least, most)

    def read(path: str, value: Any) -> dict[int, float]:
        if not isinstance(value, dict):
            raise InvalidParameter(path, value, "a map from token id to bias")
        given = cast("dict[str, Any]", value)
        for key in given:
            if not ID.fullmatch(key):
                raise InvalidParameter(path, key, "token ids, whole numbers of at least 0")
        return {int(key): bias(path, item) for key, item in given.items()}

    return read


def _joined(path: str, key: str) -> str:
    key = key[:MAX_VALUE_CHARS]
    return f"{path}.{key}" if path else key
