"""/api/v1/platform: the platform's switch of drafting, and to which organisations it is offered.

Platform keys alone come in; they do nothing else. Leaves telling the workers to registry.py. Event
loop.
"""

from typing import Any

from aiohttp import web

from mlx_worker.errors import NotFound
from mlx_worker.gateway.api_reading import body_of, exact, id_of
from mlx_worker.gateway.api_session import organisation_json
from mlx_worker.gateway.keys import CALLER, REGISTRY, STORE
from mlx_worker.gateway.records import PlatformState
from mlx_worker.http.replies import json_reply
from mlx_worker.wire.fields import each, flag, text, word

SWITCH = exact({"mode": word("auto", "off"), "workers": each(text)}, required=["mode"])
OFFER = exact({"is_speculation_available": flag}, required=["is_speculation_available"])


async def switch(request: web.Request) -> web.Response:
    """On all workers, or on those that are listed, whoever's they are."""
    caller, store = request[CALLER], request.app[STORE]
    caller.require_platform()
    body = await body_of(request, SWITCH)
    workers = body.get("workers")
    state = await store.switch_platform(body["mode"], workers)
    whom = "all workers" if workers is None else f"{len(workers)} workers: {', '.join(workers)}"
    await store.note(
        None, caller.actor, "platform.speculative_decoding", "platform", f"{body['mode']}, {whom}"
    )
    await request.app[REGISTRY].platform_changed()
    return json_reply(state_json(state))


async def organisations(request: web.Request) -> web.Response:
    request[CALLER].require_platform()
    found = await request.app[STORE].organisations()
    return json_reply({"data": [organisation_json(one) for one in found]})


async def offer(request: web.Request) -> web.Response:
    caller, store = request[CALLER], request.app[STORE]
    caller.require_platform()
    id = id_of(request, "organisation")
    if await store.organisation(id) is None:
        raise NotFound("organisation", id)
    body = await body_of(request, OFFER)
    is_available = body["is_speculation_available"]
    await store.offer_speculation(id, is_available)
    details = "available" if is_available else "not available"
    await store.note(None, caller.actor, "organisation.speculative_decoding", id, details)
    await request.app[REGISTRY].platform_changed()
    found = await store.organisation(id)
    assert found, "organisations are never removed"
    return json_reply(organisation_json(found))


def state_json(state: PlatformState) -> dict[str, Any]:
    return {
        "speculative_decoding": state.speculative_decoding,
        "display_name": state.display_name,
        "revision": state.revision,
    }


ROUTES = [
    web.patch("/api/v1/platform/speculative-decoding", switch),
    web.get("/api/v1/platform/organisations", organisations),
    web.patch("/api/v1/platform/organisations/{id}", offer),
]
