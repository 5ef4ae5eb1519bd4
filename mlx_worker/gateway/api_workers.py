"""/api/v1/workers: the organisation's workers, and what is set on them.

Owns the order of the refusals: 401, 403, 404, 422, 409, 503. Leaves what a worker looks like to
status.py, the last two and telling it to registry.py. Event loop.
"""

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from mlx_worker.errors import BadValue, NotAvailable, NotFound
from mlx_worker.gateway.api_reading import body_of, exact, id_of, label
from mlx_worker.gateway.keys import CALLER, REGISTRY, STORE
from mlx_worker.gateway.records import Enrolled, Organisation, Permission
from mlx_worker.gateway.status import worker_json
from mlx_worker.http.replies import json_reply
from mlx_worker.wire.fields import flag, word
from mlx_worker.wire.link import Close

NEW = exact({"name": label}, required=["name"])
MODE = exact({"mode": word("auto", "off")}, required=["mode"])
SETTINGS = exact({"kv_prefix_cache": flag, "run_requests_together": flag})


async def show_all(request: web.Request) -> web.Response:
    organisation = await _organisation(request, "view_workers")
    workers = await request.app[STORE].workers(organisation.id)
    return json_reply({"data": [await _shown(request, one, organisation) for one in workers]})


async def show(request: web.Request) -> web.Response:
    organisation = await _organisation(request, "view_workers")
    worker = await _worker(request, organisation.id)
    return json_reply(await _shown(request, worker, organisation))


async def add(request: web.Request) -> web.Response:
    """The one reply that ever holds the worker's key."""
    organisation = await _organisation(request, "manage_workers")
    body = await body_of(request, NEW)
    worker, secret = await request.app[STORE].add_worker(organisation.id, body["name"])
    await _note(request, "worker.add", worker, worker.name)
    found = await _shown(request, worker, organisation)
    return json_reply({**found, "key": secret}, status=201)


async def disable(request: web.Request) -> web.Response:
    organisation_id = request[CALLER].require("manage_workers")
    id = id_of(request, "worker")
    worker = await request.app[STORE].disable_worker(organisation_id, id)
    await _note(request, "worker.disable", worker, worker.name)
    await request.app[REGISTRY].close(id, Close.DISABLED, "this worker was disabled")
    return web.Response(status=204)


async def switch_speculation(request: web.Request) -> web.Response:
    organisation = await _organisation(request, "manage_workers")
    if not organisation.is_speculation_available:
        raise NotAvailable("speculative decoding", organisation.name)
    worker = await _worker(request, organisation.id)
    body = await body_of(request, MODE)
    return await _change(request, worker, {"speculative_decoding": body["mode"]})


async def change_settings(request: web.Request) -> web.Response:
    organisation_id = request[CALLER].require("manage_workers")
    worker = await _worker(request, organisation_id)
    changes = await body_of(request, SETTINGS)
    if not changes:
        raise BadValue("nothing to change", hint="send kv_prefix_cache or run_requests_together")
    return await _change(request, worker, changes)


async def _change(
    request: web.Request, worker: Enrolled, changes: Mapping[str, Any]
) -> web.Response:
    """Sent, which is not yet obeyed: the worker says so in its next status."""
    revision = await request.app[REGISTRY].change(worker, changes)
    details = ", ".join(f"{key}: {_word(value)}" for key, value in changes.items())
    await _note(request, "worker.settings", worker, details)
    return json_reply({"revision": revision}, status=202)


def _word(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


async def _organisation(request: web.Request, permission: Permission) -> Organisation:
    id = request[CALLER].require(permission)
    found = await request.app[STORE].organisation(id)
    if found is None:
        raise NotFound("organisation", id)
    return found


async def _worker(request: web.Request, organisation_id: str) -> Enrolled:
    """Raises NotFound, for another organisation's as for one that never was."""
    id = id_of(request, "worker")
    found = await request.app[STORE].worker(organisation_id, id)
    if found is None:
        raise NotFound("worker", id)
    return found


async def _shown(
    request: web.Request, worker: Enrolled, organisation: Organisation
) -> dict[str, Any]:
    connected = request.app[REGISTRY].get(worker.id)
    platform = await request.app[STORE].platform()
    return worker_json(worker, connected, organisation, platform)


async def _note(request: web.Request, action: str, worker: Enrolled, details: str) -> None:
    actor = request[CALLER].actor
    await request.app[STORE].note(worker.organisation_id, actor, action, worker.id, details)


ROUTES = [
    web.get("/api/v1/workers", show_all),
    web.post("/api/v1/workers", add),
    web.get("/api/v1/workers/{id}", show),
    web.delete("/api/v1/workers/{id}", disable),
    web.patch("/api/v1/workers/{id}/speculative-decoding", switch_speculation),
    web.patch("/api/v1/workers/{id}/settings", change_settings),
]
