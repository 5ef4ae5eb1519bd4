"""/api/v1/keys and /api/v1/audit: who may do what in an organisation, and who did.

Owns that no key gives another what it hasn't itself, nor takes away one that has more. Event loop.
"""

from typing import Any

from aiohttp import web

from mlx_worker.errors import NotFound, NotPermitted
from mlx_worker.gateway.api_reading import (
    PAGE,
    USUAL_ROWS,
    body_of,
    cursor_text,
    exact,
    id_of,
    label,
    query_of,
)
from mlx_worker.gateway.keys import CALLER, STORE
from mlx_worker.gateway.records import ALLOWED, PERMISSIONS, AuditEntry, Key, Permission
from mlx_worker.http.replies import json_reply
from mlx_worker.wire.fields import items, word


def _permissions(path: str, value: Any) -> frozenset[Permission]:
    one = word(*PERMISSIONS)
    return frozenset(one(f"{path}[{n}]", item) for n, item in enumerate(items(path, value)))


NEW = exact(
    {"name": label, "role": word(*ALLOWED), "permissions": _permissions},
    required=["name", "role"],
)


async def show_all(request: web.Request) -> web.Response:
    organisation_id = request[CALLER].require("manage_keys")
    found = await request.app[STORE].keys(organisation_id)
    return json_reply({"data": [key_json(key) for key in found]})


async def create(request: web.Request) -> web.Response:
    """The one reply that ever holds the key itself."""
    caller, store = request[CALLER], request.app[STORE]
    organisation_id = caller.require("manage_keys")
    body = await body_of(request, NEW)
    role, extra = body["role"], body.get("permissions", frozenset())
    _check_within(caller.key, ALLOWED[role] | extra)
    key, secret = await store.add_key(organisation_id, body["name"], role, extra)
    await store.note(organisation_id, caller.actor, "key.create", key.id, _words(key))
    return json_reply({**key_json(key), "secret": secret}, status=201)


async def revoke(request: web.Request) -> web.Response:
    caller, store = request[CALLER], request.app[STORE]
    organisation_id = caller.require("manage_keys")
    id = id_of(request, "key")
    key = next((one for one in await store.keys(organisation_id) if one.id == id), None)
    if key is None:
        raise NotFound("key", id)
    _check_within(caller.key, key.permissions)
    await store.revoke_key(organisation_id, id)
    await store.note(organisation_id, caller.actor, "key.revoke", id, _words(key))
    return web.Response(status=204)


async def audit(request: web.Request) -> web.Response:
    """Of the organisation; with a platform key, what the platform did."""
    caller = request[CALLER]
    organisation_id = None if caller.key.is_platform else caller.require("manage_keys")
    page = query_of(request, PAGE)
    found, following = await request.app[STORE].audit(
        organisation_id, page.get("cursor"), page.get("limit", USUAL_ROWS)
    )
    shown = [entry_json(entry) for entry in found]
    return json_reply({"data": shown, "next_cursor": cursor_text(following)})


def _check_within(own: Key, wanted: frozenset[Permission]) -> None:
    """Raises NotPermitted for a key that may do what its maker may not."""
    more = [one for one in PERMISSIONS if one in wanted - own.permissions]
    if more:
        raise NotPermitted(
            f"the key {own.name} has not itself: {', '.join(more)}",
            hint="an owner of the organisation has every permission",
        )


def _words(key: Key) -> str:
    more = f" with {', '.join(sorted(key.extra))}" if key.extra else ""
    return f"{key.name}: {key.role}{more}"


def key_json(key: Key) -> dict[str, Any]:
    """permissions: those beside its role's."""
    return {
        "id": key.id,
        "name": key.name,
        "role": key.role,
        "permissions": [one for one in PERMISSIONS if one in key.extra],
        "hint": key.hint,
        "created": key.created_s,
    }


def entry_json(entry: AuditEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "at": entry.at_s,
        "actor": entry.actor,
        "action": entry.action,
        "target": entry.target,
        "details": entry.details,
    }


ROUTES = [
    web.get("/api/v1/keys", show_all),
    web.post("/api/v1/keys", create),
    web.delete("/api/v1/keys/{id}", revoke),
    web.get("/api/v1/audit", audit),
]
