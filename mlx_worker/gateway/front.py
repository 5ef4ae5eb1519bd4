"""Who comes in to the gateway, and that every request leaves a line, whatever becomes of it.

Owns the order of the checks and which routes need no key. Leaves the checks to security.py and
auth.py, what all replies have in common to http/front.py. Event loop.
"""

from time import perf_counter

from aiohttp import web

from mlx_worker.gateway.auth import caller_of
from mlx_worker.gateway.keys import CALLER, RULES, STORE, TRAFFIC
from mlx_worker.gateway.security import check_host, check_origin, check_session_change
from mlx_worker.http.checks import check_content_type, check_length, check_target
from mlx_worker.http.front import (
    CLIENT_GONE,
    Handler,
    bytes_of,
    dress_plainly,
    request_id,
    write_line,
)
from mlx_worker.http.keys import IS_BEGUN
from mlx_worker.http.replies import Refusal

# Names of the routes that need no API key; "worker" has a key of its own kind.
ANYONE = frozenset({"health", "page", "page.file", "openapi", "sign_in", "worker"})


@web.middleware
async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Write the request's line, also when its client has gone."""
    began = perf_counter()
    request_id(request)
    reply = None
    try:
        with request.app[TRAFFIC].open(request.match_info.route.name):
            reply = await handler(request)
        return reply
    finally:
        status = reply.status if reply is not None else CLIENT_GONE
        write_line(request, status, bytes_of(request, reply), 1000 * (perf_counter() - began))


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let in who may come in; the checks are ordered so that a stranger learns least."""
    rules = request.app[RULES]
    check_target(request)
    check_host(request, rules)
    check_origin(request, rules)
    if request.app[TRAFFIC].is_ending:
        raise Refusal(503, "shutting_down", "the gateway is shutting down", {"Retry-After": "5"})
    if request.match_info.route.name not in ANYONE:
        caller = await caller_of(request, request.app[STORE])
        if caller.via_session:
            check_session_change(request)
        request[CALLER] = caller
    if request.method != "DELETE" or request.can_read_body:  # pages must ask before a DELETE
        check_content_type(request)
    check_length(request)
    return await handler(request)


async def dress(request: web.Request, reply: web.StreamResponse) -> None:
    """Headers of every reply, put in just before the first byte: streams have them too."""
    request[IS_BEGUN] = True
    dress_plainly(request, reply)
