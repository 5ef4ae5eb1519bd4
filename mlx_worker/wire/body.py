"""The bytes of a body → plain JSON values, so that no body costs others their time.

Owns what JSON may hold here: UTF-8, no NaN, no half of a surrogate pair, not too many values; and
the same of JSON that is a text in a body. Leaves what the values mean to openai.py. Pure; any
thread, a long body not the event loop's.

The library reads JSON in C and lets no other thread run until it is done: 16 MiB of brackets take a
second. A body with many values is therefore read by its slower reader in Python, which gives way.
"""

import json
import re
from collections.abc import Iterator
from json import scanner
from typing import Any, cast

from mlx_worker.errors import RequestError, shown

MANY_VALUES = 50_000  # C takes some 10 ms for so many
MAX_VALUES = 500_000  # no model takes so many ids, and text with more marks is longer still
MARKS = (b",", b"[", b"{")
HIDDEN_MARKS = (b"2c", b"2C", b"5b", b"5B", b"7b", b"7B")  # the same, as escapes of JSON in a text
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # the only way into a text that UTF-8 can't write


def read_json(body: bytes) -> Any:
    """Raises RequestError for what is no JSON, or can't be kept."""
    n_values = _count_values(body)
    if n_values > MAX_VALUES:
        limit = f"{MAX_VALUES:,} are the limit"
        raise RequestError(f"body has {n_values:,} commas and brackets, {limit}")
    reader = GivingWay if n_values > MANY_VALUES else json.JSONDecoder
    try:
        value = reader(parse_constant=_refuse_constant).decode(body.decode("utf-8"))
        if SURROGATE.search(body):
            _check_texts(value)
    except UnicodeDecodeError as broken:
        raise RequestError(f"body is not UTF-8 at byte {broken.start}") from None
    except RecursionError:
        raise RequestError("body is nested too deeply", hint="use fewer levels") from None
    except json.JSONDecodeError as broken:
        where = f"line {broken.lineno}, column {broken.colno}"
        raise RequestError(f"body is not JSON at {where}: {broken.msg}") from None
    except ValueError:  # Python reads no whole number beyond some thousand digits
        raise RequestError("body has a number with too many digits") from None
    return value


def read_inner_json(path: str, text: str) -> Any:
    """JSON that stands as text at `path` of a body, whose count of values has this one's in it."""
    try:
        return read_json(text.encode("utf-8"))
    except RequestError as error:
        message = path + error.message.removeprefix("body")
        raise RequestError(message, param=path, hint=error.hint) from None


class GivingWay(json.JSONDecoder):
    """The library's own reader in Python; other threads run while it does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scan_once = scanner.py_make_scanner(self)  # pyright: ignore[reportAttributeAccessIssue,reportUnknownMemberType]


def _count_values(body: bytes) -> int:
    """At least as many as it has, or more than may be."""
    n_values = sum(body.count(mark) for mark in MARKS)
    if n_values <= MAX_VALUES and b"\\u00" in body:
        n_values += sum(body.count(b"\\u00" + mark) for mark in HIDDEN_MARKS)
    return n_values


def _refuse_constant(name: str) -> None:
    raise RequestError(f"body is not JSON: {name} is no number there")


def _check_texts(value: Any) -> None:
    """Raises RequestError for half a surrogate pair, which JSON can write and UTF-8 can't."""
    for text in _texts(value):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as broken:
            half = broken.object[broken.start]
            raise RequestError(f"body: {shown(half)}, must be text that UTF-8 can write") from None


def _texts(value: Any) -> Iterator[str]:
    """Every text in the value, keys included."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, dict):
            left += [*cast("dict[str, Any]", found), *cast("dict[str, Any]", found).values()]
        elif isinstance(found, list):
            left += cast("list[Any]", found)
