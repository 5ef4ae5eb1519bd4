"""GET /api/v1/usage: one row a request, as pages of JSON or as a whole table in CSV.

Owns the filters and both forms. Leaves the rows to store.py. Event loop.
"""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from mlx_worker.gateway.api_reading import (
    PAGE,
    USUAL_ROWS,
    cursor_text,
    filter_text,
    moment,
    query_of,
)
from mlx_worker.gateway.keys import CALLER, STORE
from mlx_worker.gateway.records import UsageRow
from mlx_worker.gateway.store import MOST_ROWS, UsageFilter
from mlx_worker.http.replies import json_reply
from mlx_worker.http.stream import write
from mlx_worker.wire.fields import Reader, word

QUERY: Mapping[str, Reader] = {
    "worker": filter_text,
    "key": filter_text,
    "model": filter_text,
    "error": filter_text,
    "since": moment,
    "until": moment,
    "format": word("json", "csv"),
    **PAGE,
}
COLUMNS = (
    "id", "request_id", "at", "key_id", "key_name", "worker_id", "worker_name", "model",
    "endpoint", "is_streamed", "prompt_tokens", "completion_tokens", "ttft_ms",
    "tokens_per_second", "draft_acceptance_rate", "finish_reason", "error", "ended",
)  # fmt: skip
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a cell that begins so is run by spreadsheets
CSV_HEADERS = {
    "Content-Type": "text/csv; charset=utf-8",
    "Content-Disposition": 'attachment; filename="usage.csv"',
}


@dataclass(frozen=True)
class Asked:
    """limit None: a page of JSON has the usual number, a table in CSV has all rows."""

    organisation_id: str
    filters: UsageFilter
    cursor: int | None
    limit: int | None


async def usage(request: web.Request) -> web.StreamResponse:
    organisation_id = request[CALLER].require("view_usage")
    query = query_of(request, QUERY)
    filters = UsageFilter(
        worker=query.get("worker"),
        key=query.get("key"),
        model=query.get("model"),
        since_s=query.get("since"),
        until_s=query.get("until"),
        error=query.get("error"),
    )
    asked = Asked(organisation_id, filters, query.get("cursor"), query.get("limit"))
    if query.get("format") == "csv":
        return await _table(request, asked)
    return await _page(request, asked)


async def _page(request: web.Request, asked: Asked) -> web.Response:
    found, following = await request.app[STORE].usage(
        asked.organisation_id, asked.filters, asked.cursor, asked.limit or USUAL_ROWS
    )
    shown = [row_json(row) for row in found]
    return json_reply({"data": shown, "next_cursor": cursor_text(following)})


async def _table(request: web.Request, asked: Asked) -> web.StreamResponse:
    """Page by page, so that a year of rows is never in memory."""
    reply = web.StreamResponse(headers=CSV_HEADERS)
    await reply.prepare(request)
    await write(reply, csv_text([COLUMNS]))
    cursor, is_last = asked.cursor, False
    while not is_last:
        found, cursor = await request.app[STORE].usage(
            asked.organisation_id, asked.filters, cursor, asked.limit or MOST_ROWS
        )
        await write(reply, csv_text([cells(row) for row in found]))
        is_last = cursor is None or asked.limit is not None
    await reply.write_eof()
    return reply


def row_json(row: UsageRow) -> dict[str, Any]:
    """Times are Unix seconds; ended null: it goes on."""
    values = {**vars(row), "at": row.at_s, "ended": row.ended_s}
    return {name: values[name] for name in COLUMNS}


def cells(row: UsageRow) -> list[Any]:
    values = {**row_json(row), "at": _date(row.at_s), "ended": _date(row.ended_s)}
    return [safe(value) for value in values.values()]


def safe(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula gets a quote in front."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def csv_text(lines: list[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(lines)
    return text.getvalue().encode("utf-8", "replace")


def _date(at_s: float | None) -> str | None:
    if at_s is None:
        return None
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")


ROUTES = [web.get("/api/v1/usage", usage)]
