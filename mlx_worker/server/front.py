"""Who comes in, and that every request is counted, whatever becomes of it.

Owns the order of the checks and which routes need no key. Leaves the checks to security.py, and
what all replies have in common to http/front.py. Event loop.
"""

from time import perf_counter

from aiohttp import web

from mlx_worker.http.checks import check_content_type, check_length, check_target
from mlx_worker.http.front import (
    CLIENT_GONE,
    Handler,
    bytes_of,
    dress_plainly,
    request_id,
    route_of,
    write_line,
)
from mlx_worker.http.keys import IS_BEGUN
from mlx_worker.server.keys import IS_TRUSTED, METRICS, RULES, SCOPE
from mlx_worker.server.lag import LAG
from mlx_worker.server.security import (
    check_host,
    check_key,
    check_origin,
    cors_headers,
    has_key,
    is_preflight,
    preflight_reply,
)

ANYONE = frozenset({"health", "page", "page.file"})  # names of the routes that need no key


# --- middlewares, outermost first --------------------------------------------------------------


@web.middleware
async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the request and write its line, also when its client has gone."""
    began = perf_counter()
    request_id(request)
    reply = None
    try:
        with request.app[LAG].open():
            reply = await handler(request)
        return reply
    finally:
        status = reply.status if reply is not None else CLIENT_GONE
        request.app[METRICS].replied(route_of(request), status)
        write_line(request, status, bytes_of(request, reply), 1000 * (perf_counter() - began))


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let in who may come in; the checks are ordered so that a stranger learns least."""
    rules = request.app[RULES]
    check_target(request)
    check_host(request, rules)
    if is_preflight(request):
        return preflight_reply(request, rules)
    check_origin(request, rules)
    request[IS_TRUSTED] = has_key(request, rules)
    request[SCOPE] = rules.scope
    if request.match_info.route.name not in ANYONE:
        check_key(request, rules)
    check_content_type(request)
    check_length(request)
    return await handler(request)


async def dress(request: web.Request, reply: web.StreamResponse) -> None:
    """Headers of every reply, put in just before the first byte: streams have them too."""
    request[IS_BEGUN] = True
    dress_plainly(request, reply)
    reply.headers.update(cors_headers(request, request.app[RULES]))
