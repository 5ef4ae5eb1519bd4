"""GET /api/v1/events: a stream that says when something that a console shows has changed.

Owns the stream: it ends with the session or the key that opened it, and with the gateway. Leaves
what has changed to registry.py; the console asks the API for it. Event loop.

    event: changed
    data: {"workers": true, "usage": false}
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web

from mlx_worker.errors import NotSignedIn
from mlx_worker.gateway.auth import caller_of
from mlx_worker.gateway.keys import CALLER, REGISTRY, STORE
from mlx_worker.http.replies import Refusal
from mlx_worker.http.stream import STREAM_HEADERS, write
from mlx_worker.wire.sse import json_bytes

PATH = "/api/v1/events"
HERE = b": here\n\n"  # a comment, which browsers ignore and proxies count as traffic
BEAT_S = 5.0  # of silence, after which a comment follows; and between two looks at the session
BEAT = web.AppKey("events_beat_s", float)
END = web.AppKey("events_end", asyncio.Event)  # set: the gateway goes
MOST_OPEN = 50  # streams of one key at a time: each asks the database again and again
OPEN: web.AppKey[Counter[str]] = web.AppKey("events_open")


async def events(request: web.Request) -> web.StreamResponse:
    """Raises Refusal for a key that has many open."""
    key_id, n_open = request[CALLER].key.id, request.app[OPEN]
    if n_open[key_id] >= MOST_OPEN:
        message = f"this key has {MOST_OPEN} event streams open. hint: close one"
        raise Refusal(429, "too_many_streams", message, {"Retry-After": "5"})
    n_open[key_id] += 1
    try:
        return await _events(request)
    finally:
        n_open[key_id] -= 1
        n_open += Counter()  # forgets those that are at 0


async def _events(request: web.Request) -> web.StreamResponse:
    """Whoever opens it asks for everything once it is open: what changes from then on is told."""
    organisation_id = request[CALLER].require("view_workers")
    changes = Changes(request.app[REGISTRY].changes(organisation_id), request.app[END])
    reply = web.StreamResponse(headers=STREAM_HEADERS)
    try:
        await changes.listen()
        await reply.prepare(request)
        await write(reply, HERE)
        while await changes.wait(request.app[BEAT]) and await is_signed_in(request):
            await write(reply, changes.told())
    finally:
        await changes.close()
    return reply


def add_to(app: web.Application, beat_s: float = BEAT_S) -> None:
    app.router.add_get(PATH, events, name="events", allow_head=False)
    app[BEAT] = beat_s
    app[END] = asyncio.Event()
    app[OPEN] = Counter()
    app.on_shutdown.append(end_all)


async def end_all(app: web.Application) -> None:
    """Streams that are silent would keep a gateway that goes waiting."""
    app[END].set()


async def is_signed_in(request: web.Request) -> bool:
    try:
        await caller_of(request, request.app[STORE])
    except NotSignedIn:
        return False
    return True


class Changes:
    """Waits for the next change, or the end, and neither for ever. Next: close()."""

    def __init__(self, source: AsyncIterator[Mapping[str, bool]], end: asyncio.Event) -> None:
        self._source = source
        self._end = asyncio.ensure_future(end.wait())
        self._next: asyncio.Future[Any] = self._ask()

    def _ask(self) -> asyncio.Future[Any]:
        return asyncio.ensure_future(anext(self._source, None))

    async def listen(self) -> None:
        """From here on no change is missed: the source counts whoever has begun to ask it."""
        await asyncio.sleep(0)

    async def wait(self, beat_s: float) -> bool:
        """Until something changed, at most for beat_s. False: there is nothing more to come."""
        either = {self._next, self._end}
        await asyncio.wait(either, timeout=beat_s, return_when=asyncio.FIRST_COMPLETED)
        is_over = self._next.done() and self._next.result() is None
        return not self._end.done() and not is_over

    def told(self) -> bytes:
        """The event of what has changed; a comment where nothing has."""
        if not self._next.done():
            return HERE
        change = dict(self._next.result())
        self._next = self._ask()
        return b"event: changed\ndata: " + json_bytes(change) + b"\n\n"

    async def close(self) -> None:
        self._end.cancel()
        self._next.cancel()
        with suppress(asyncio.CancelledError):
            await self._next
