"""Bodies that come slowly and streams that are read slowly. Event loop."""

import asyncio

from aiohttp import web

from mlx_worker.http.replies import Refusal

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy that gathers a stream makes it no stream
}
UPLOAD_S = 60.0  # that a body may take to come
UNREAD_S = 30.0  # that a client may leave a stream unread before it counts as gone


async def uploaded(request: web.Request) -> bytes:
    """The whole body. Raises Refusal for one that takes too long to come."""
    try:
        async with asyncio.timeout(UPLOAD_S):
            return await request.read()
    except TimeoutError:
        message = f"the body was not here after {UPLOAD_S:g} s"
        raise Refusal(408, "upload_timeout", message) from None


async def write(reply: web.StreamResponse, data: bytes) -> None:
    """Raises ConnectionResetError for a client that has left, or reads no more."""
    try:
        async with asyncio.timeout(UNREAD_S):
            await reply.write(data)
    except TimeoutError:
        raise ConnectionResetError(f"the stream was not read for {UNREAD_S:g} s") from None
