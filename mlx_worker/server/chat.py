"""POST /v1/chat/completions and /v1/completions.

Owns the way of one call: body in, engine asked, reply or stream out. Leaves what a body may say and
how a reply reads to wire/, and the answer to the engine. Event loop.

A client that goes away cancels its handler, which leaves the engine's events, which frees the
engine within a round or a prefill chunk. A stream's headers are sent once the engine has taken the
call up, so that whatever is wrong with it before still gets a status of its own.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from mlx_worker.errors import WorkerError
from mlx_worker.http.keys import REQUEST_ID
from mlx_worker.http.stream import STREAM_HEADERS, uploaded, write
from mlx_worker.records import Done, ReplyEvent, Started
from mlx_worker.server.keys import ENGINE, IDENTITY, METRICS, SCOPE
from mlx_worker.server.metrics import Ongoing, outcome_of
from mlx_worker.wire.failure import error_body
from mlx_worker.wire.openai import Asked, parse_chat, parse_completion
from mlx_worker.wire.reply import (
    ChatReply,
    ChatStream,
    CompletionReply,
    CompletionStream,
    FullReply,
    ReplyStream,
)
from mlx_worker.wire.sse import DONE, json_bytes, json_bytes_by_pieces, sse_event

LONG_BODY_BYTES = 64 * 1024  # shorter ones are read in a few ms

Events = AsyncGenerator[Started | ReplyEvent, None]


@dataclass(frozen=True)
class Endpoint:
    """What the two doors differ in."""

    name: str
    parse: Callable[[bytes, str, str], Asked]
    full: type[FullReply]
    stream: type[ReplyStream]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Raises WorkerError before the first byte; in a stream, later ones are its last event."""
        app = request.app
        with app[METRICS].began(self.name) as ongoing:
            asked = await self._asked(request)
            ongoing.waits()
            async with aclosing(app[ENGINE].submit(asked.call)) as events:
                told = Told(events, ongoing)
                if asked.call.is_streamed:
                    writer = self.stream(asked, int(time.time()), app[IDENTITY])
                    return await streamed(request, writer, told)
                return await whole(self.full(asked, int(time.time()), app[IDENTITY]), told)

    async def _asked(self, request: web.Request) -> Asked:
        """What the body asks for; a long one is read by another thread, so that nobody waits."""
        body = await uploaded(request)
        parse = partial(self.parse, body, request[REQUEST_ID], request[SCOPE])
        return parse() if len(body) < LONG_BODY_BYTES else await asyncio.to_thread(parse)


class Told:
    """The events of one call, counted on their way."""

    def __init__(self, events: Events, ongoing: Ongoing) -> None:
        self._events = events
        self._ongoing = ongoing
        self._dones: list[Done] = []

    async def next(self) -> Started | ReplyEvent | None:
        """None after the last one."""
        event = await anext(self._events, None)
        if isinstance(event, Started):
            self._ongoing.took_up(event.queue_wait_ms)
        elif event is None:
            self._ongoing.ended("ok", self._dones)
        elif isinstance(event.event, Done):
            self._dones.append(event.event)
        return event

    def failed(self, error: WorkerError) -> None:
        """It ended in the middle, and its client is told in the stream."""
        self._ongoing.ended(outcome_of(error), self._dones)


async def whole(writer: FullReply, told: Told) -> web.Response:
    while (event := await told.next()) is not None:
        writer.feed(event)
    return web.Response(
        body=await written(writer),
        headers={"Server-Timing": writer.server_timing()},
        content_type="application/json",
    )


async def written(writer: FullReply) -> bytes:
    """The reply's body; one that may have half a million values is written by another thread."""
    if not writer.is_large:
        return json_bytes(writer.finish())
    return await asyncio.to_thread(lambda: json_bytes_by_pieces(writer.finish()))


async def streamed(request: web.Request, writer: ReplyStream, told: Told) -> web.StreamResponse:
    event = await told.next()
    reply = web.StreamResponse(headers=STREAM_HEADERS)
    await reply.prepare(request)
    last = DONE
    try:
        while event is not None:
            if chunks := writer.feed(event):
                await write(reply, b"".join(map(sse_event, chunks)))
            event = await told.next()
    except WorkerError as error:
        told.failed(error)
        last = sse_event(error_body(error)) + DONE
    await write(reply, last)
    await reply.write_eof()
    return reply


CHAT = Endpoint("chat", parse_chat, ChatReply, ChatStream)
COMPLETION = Endpoint("completion", parse_completion, CompletionReply, CompletionStream)
ROUTES = (
    web.post("/v1/chat/completions", CHAT.handle),
    web.post("/v1/completions", COMPLETION.handle),
)
