"""What aiohttp answers before it reaches the application, in our shape and without its details.

Owns the replies to what is no HTTP, and to an Expect that we don't know; and how many connections
there may be, for each takes one of the few files that a process may open. Event loop.

aiohttp's own reply quotes the bytes it could not read and logs them with a traceback; a broken
line may well hold a key, so ours does neither.
"""

import asyncio
import logging
import resource
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from mlx_worker.http.front import dress_plainly, new_id, write_line
from mlx_worker.http.keys import IS_BEGUN, REQUEST_ID
from mlx_worker.http.replies import error_reply, reply_to, reply_to_bug

IDLE_S = 75.0  # that a connection may stay open without a request
MOST_CONNECTIONS = 1000
OPEN_FILES = 4 * MOST_CONNECTIONS

log = logging.getLogger(__name__)


def most_connections() -> int:
    """How many there may be at once, with room for as many more that are being accepted."""
    n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_endless = n_files == resource.RLIM_INFINITY
    return MOST_CONNECTIONS if is_endless else min(MOST_CONNECTIONS, n_files // 4)


def allow_open_files() -> None:
    """Raise this process's own limit on open files, which is low by default on a Mac."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Connection(web.RequestHandler):
    """One client's connection."""

    __slots__ = ()

    @property
    def is_idle(self) -> bool:
        """Whether no request of it is being answered."""
        return self._current_request is None and not self._messages

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The reply to bytes that are no request; the connection ends with it."""
        request.setdefault(REQUEST_ID, new_id())  # broken bytes have no headers to take it from
        if request.get(IS_BEGUN) or request.writer.output_size > 0:
            raise ConnectionResetError("the reply broke off after it had begun")
        if status >= 500:
            log.error("request %s failed outside its handler", request[REQUEST_ID], exc_info=exc)
            reply = reply_to_bug(request[REQUEST_ID])
        else:
            reply = error_reply(status, "bad_request", "the request is not valid HTTP")
        self._finish_unheard(request, reply)
        reply.force_close()
        return reply

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Only a refusal from before our middlewares is still one of aiohttp's own here."""
        if isinstance(resp, web.HTTPException):
            resp = reply_to(resp)
            self._finish_unheard(request, resp)
        return await super().finish_response(request, resp, start_time)

    def _finish_unheard(self, request: web.BaseRequest, reply: web.Response) -> None:
        dress_plainly(request, reply)
        write_line(request, reply.status, reply.content_length or 0, 0.0)


class NoAccessLog(AbstractAccessLogger):
    """aiohttp's own log stays silent: front.py writes ours, for cancelled requests too."""

    @property
    def enabled(self) -> bool:
        return False

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        raise AssertionError("not enabled")


class Server(web.Server):
    """Makes a Connection for each client; a newcomer takes the place of the oldest idle one."""

    def __call__(self) -> Connection:
        return Connection(
            self,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=IDLE_S,
            access_log_class=NoAccessLog,
        )

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._connections) > most_connections():
            idle = (one for one in self._connections if isinstance(one, Connection) and one.is_idle)
            next(idle, handler).force_close()


class Runner(web.AppRunner):
    """Runs an application with our connections; a handler is cancelled when its client goes.

    Next: setup(), then a web.TCPSite on it; cleanup() at the end.
    """

    __slots__ = ()

    async def _make_server(self) -> Any:
        # aiohttp has no public way to name the class of its connections.
        made = await super()._make_server()
        return Server(
            made.request_handler,
            request_factory=made.request_factory,  # pyright: ignore[reportArgumentType]
            handler_cancellation=True,
        )
