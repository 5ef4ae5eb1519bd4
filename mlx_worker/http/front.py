"""What every request and every reply of an HTTP server here has in common, whatever became of it.

Owns the request id, the headers that all replies carry, the way an exception becomes a reply, and
the line in the access log. Leaves who may come in to each server. Event loop.

A line of the access log is JSON: id, method, path (without query), status, ms, bytes,
is_loopback. Status 499: the client went away before the reply was whole. It has no bodies, no
keys, no prompts.
"""

import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web

from mlx_worker.errors import WorkerError
from mlx_worker.http.checks import is_loopback
from mlx_worker.http.keys import IS_BEGUN, REQUEST_ID
from mlx_worker.http.replies import Refusal, error_reply, reply_to, reply_to_bug

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CLIENT_GONE = 499
MAX_LOGGED_CHARS = 200
COMMON_HEADERS = {
    "Server": "mlx-worker",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NO_CONTENT_POLICY = "default-src 'none'; frame-ancestors 'none'"
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

log = logging.getLogger(__name__)
access_log = logging.getLogger("mlx_worker.access")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@web.middleware
async def translate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every exception becomes a reply in our shape; a mistake of ours shows nothing of itself."""
    try:
        return await handler(request)
    except (WorkerError, Refusal, web.HTTPException) as error:
        reply = reply_to(error)
    except web.RequestPayloadError:
        reply = error_reply(400, "bad_request", "the body is not what its headers say")
    except Exception as error:
        if isinstance(error, ConnectionError) and is_gone(request):
            raise
        log.exception("request %s failed", request_id(request))
        reply = reply_to_bug(request_id(request))
    if request.get(IS_BEGUN):
        cut_off(request)
    return reply


def is_gone(request: web.Request) -> bool:
    """Whether the client has closed its connection, so that writing to it failed."""
    return request.transport is None or request.transport.is_closing()


def cut_off(request: web.Request) -> None:
    """End a reply that has begun, so that the client sees it is not whole."""
    log.warning("request %s: its reply broke off", request_id(request))
    request.protocol.force_close()
    raise ConnectionResetError("the reply broke off after it had begun")


# --- ids, headers, lines -----------------------------------------------------------------------


def request_id(request: web.BaseRequest) -> str:
    """The client's own X-Request-Id if it is a plain word, else a random one; then always that."""
    known = request.get(REQUEST_ID)
    if known is None:
        given = request.headers.getall("X-Request-Id", [])
        is_plain = len(given) == 1 and _REQUEST_ID.fullmatch(given[0])
        known = request[REQUEST_ID] = given[0] if is_plain else new_id()
    return known


def new_id() -> str:
    return secrets.token_hex(16)


def dress_plainly(request: web.BaseRequest, reply: web.StreamResponse) -> None:
    """The same for a request that never reached the application. A page may set its own policy."""
    is_page = reply.content_type == "text/html"
    policy = PAGE_POLICY if is_page else NO_CONTENT_POLICY
    reply.headers.update(COMMON_HEADERS)
    reply.headers["X-Request-Id"] = request_id(request)
    reply.headers.setdefault("Content-Security-Policy", policy)
    reply.headers.setdefault("Cache-Control", "no-store")


def route_of(request: web.Request) -> str:
    """The route's pattern, of which there are few, never the path; "none" where none fits."""
    resource = request.match_info.route.resource
    return resource.canonical if resource else "none"


def bytes_of(request: web.Request, reply: web.StreamResponse | None) -> int:
    """Of a whole reply its body; of a stream all that was written, its head included."""
    if isinstance(reply, web.Response):
        return reply.content_length or 0
    return request.writer.output_size


def write_line(request: web.BaseRequest, status: int, size: int, ms: float) -> None:
    line = {
        "id": request_id(request),
        "method": request.method,
        "path": logged_path(request),
        "status": status,
        "ms": round(ms, 1),
        "bytes": size,
        "is_loopback": is_loopback(request.remote or ""),
    }
    access_log.info(json.dumps(line))


def logged_path(request: web.BaseRequest) -> str | None:
    """Without query; None where the request line has a URL, which may hold a password."""
    path = request.raw_path.partition("?")[0].partition("#")[0]
    return path[:MAX_LOGGED_CHARS] if path.startswith("/") else None
