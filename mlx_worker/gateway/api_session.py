"""POST and DELETE /api/v1/session, GET /api/v1/me: signing in to the console, and out of it.

Owns the cookie. Leaves what a session is to store.py, wrong keys to auth.py. Event loop.
"""

from aiohttp import web

from mlx_worker.errors import NotFound, NotSignedIn
from mlx_worker.gateway.api_reading import body_of, exact
from mlx_worker.gateway.auth import COOKIE
from mlx_worker.gateway.keys import CALLER, LOGINS, RULES, STORE
from mlx_worker.gateway.records import PERMISSIONS, Key, Organisation
from mlx_worker.gateway.security import address_of, needs_secure_cookie
from mlx_worker.gateway.store import SESSION_S
from mlx_worker.http.replies import json_reply
from mlx_worker.wire.fields import text

SIGN_IN = exact({"key": text}, required=["key"])


async def sign_in(request: web.Request) -> web.Response:
    """A key for a cookie. Raises TooManyTries before the key is looked at, NotSignedIn."""
    store, rules = request.app[STORE], request.app[RULES]
    body = await body_of(request, SIGN_IN)
    logins = request.app[LOGINS]
    begun = logins.begin(address_of(request, rules))
    key = await store.key_of(body["key"].strip())
    if key is None or key.organisation_id is None:
        raise NotSignedIn(
            "this is no key of an organisation, or it was revoked",
            hint="mlx-worker gateway key create makes one",
        )
    logins.forgive(begun)
    await _end_old(request)
    reply = web.Response(status=204)
    reply.set_cookie(
        COOKIE,
        await store.begin_session(key.id),
        max_age=int(SESSION_S),
        path="/",
        httponly=True,
        samesite="Strict",
        secure=needs_secure_cookie(request, rules),
    )
    return reply


async def sign_out(request: web.Request) -> web.Response:
    await _end_old(request)
    reply = web.Response(status=204)
    reply.del_cookie(COOKIE, path="/", httponly=True, samesite="Strict")
    return reply


async def _end_old(request: web.Request) -> None:
    if token := request.cookies.get(COOKIE):
        await request.app[STORE].end_session(token)


async def me(request: web.Request) -> web.Response:
    caller, store = request[CALLER], request.app[STORE]
    organisation = await store.organisation(caller.organisation_id)
    if organisation is None:
        raise NotFound("organisation", caller.organisation_id)
    key, platform = caller.key, await store.platform()
    return json_reply(
        {
            "organisation": organisation_json(organisation),
            "key": {"id": key.id, "name": key.name, "role": key.role, "hint": key.hint},
            "permissions": permissions(key),
            "display_name": platform.display_name,
        }
    )


def permissions(key: Key) -> list[str]:
    """All that it has, by its role or beside it."""
    return [one for one in PERMISSIONS if one in key.permissions]


def organisation_json(organisation: Organisation) -> dict[str, object]:
    return {
        "id": organisation.id,
        "name": organisation.name,
        "is_speculation_available": organisation.is_speculation_available,
    }


ROUTES = [
    web.post("/api/v1/session", sign_in, name="sign_in"),
    web.delete("/api/v1/session", sign_out),
    web.get("/api/v1/me", me),
]
