"""What the handlers of the management API share: bodies, queries, ids, pages.

Owns how what a client sent becomes checked values, and the 422 where it can't. Event loop.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from aiohttp import web

from mlx_worker.errors import BadValue, InvalidParameter, NotFound, RequestError
from mlx_worker.gateway.store import MOST_ROWS
from mlx_worker.http.stream import uploaded
from mlx_worker.wire.fields import Reader, free_object, missing, text, unknown_key, whole
from mlx_worker.wire.openai import read_body

MOST_NAME_CHARS = 64
MOST_FILTER_CHARS = 256
USUAL_ROWS = 100
MOST_SECONDS = 253_402_300_799.0  # the last of the year 9999
_ID = re.compile("[0-9a-f]{16}", re.ASCII)
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?", re.ASCII)
_WHOLE = re.compile("0|[1-9][0-9]{0,17}", re.ASCII)


async def body_of(request: web.Request, reader: Reader) -> dict[str, Any]:
    """The body as an object that `reader` accepts. Raises BadValue."""
    try:
        return read_body(await uploaded(request), reader)
    except RequestError as error:
        raise _bad(error) from None


def query_of(request: web.Request, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """The query's values, each key at most once. Raises BadValue."""
    found: dict[str, Any] = {}
    try:
        for key, value in request.query.items():
            if key not in readers:
                raise unknown_key(key, key, readers)
            if key in found:
                raise RequestError(f"{key}: is there twice", param=key)
            found[key] = readers[key](key, value)
    except RequestError as error:
        raise _bad(error) from None
    return found


def exact(readers: Mapping[str, Reader], required: Sequence[str] = ()) -> Reader:
    """An object with known keys only. null is a value, which none of them takes: were it the same
    as an absent key, "workers": null would switch all of them.
    """

    def read(path: str, value: Any) -> dict[str, Any]:
        given = free_object(path, value)
        for key in given:
            if key not in readers:
                raise unknown_key(key, key, readers)
        for key in required:
            if key not in given:
                raise missing(path, key)
        return {key: readers[key](key, item) for key, item in given.items()}

    return read


def id_of(request: web.Request, kind: str) -> str:
    """The id in the path; what can be none is nobody's. Raises NotFound."""
    id = request.match_info["id"]
    if not _ID.fullmatch(id):
        raise NotFound(kind, id)
    return id


def label(path: str, value: Any) -> str:
    """A name that a person gives."""
    name = text(path, value).strip()
    if not name.isprintable() or not name or len(value) > MOST_NAME_CHARS:
        raise InvalidParameter(path, value, f"1 to {MOST_NAME_CHARS} visible characters")
    return name


def filter_text(path: str, value: Any) -> str:
    if not value.isprintable() or not 1 <= len(value) <= MOST_FILTER_CHARS:
        raise InvalidParameter(path, value, f"1 to {MOST_FILTER_CHARS} visible characters")
    return value


def moment(path: str, value: str) -> float:
    """Unix seconds, or a date as in 2026-11-30 or 2026-11-30T12:00:00Z; UTC if it doesn't say."""
    try:
        seconds = float(value) if _NUMBER.fullmatch(value) else _parsed(value)
    except (ValueError, OverflowError):
        seconds = -1.0
    if not isfinite(seconds) or not 0 <= seconds <= MOST_SECONDS:
        limit = "Unix seconds or a date, as in 2026-11-30T12:00:00Z"
        raise InvalidParameter(path, value, limit)
    return seconds


def _parsed(value: str) -> float:
    at = datetime.fromisoformat(value)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _digits(reader: Reader) -> Reader:
    """A whole number of a query, where all is text."""

    def read(path: str, value: str) -> Any:
        return reader(path, int(value) if _WHOLE.fullmatch(value) else value)

    return read


PAGE: Mapping[str, Reader] = {
    "cursor": _digits(whole(0)),
    "limit": _digits(whole(1, MOST_ROWS)),
}


def cursor_text(cursor: int | None) -> str | None:
    return None if cursor is None else str(cursor)


def _bad(error: RequestError) -> BadValue:
    return BadValue(error.message, param=error.param, hint=error.hint)
