"""GET /health, /v1/models, /v1/models/{id} and /status.

Owns what they say. Leaves what is true to the engine. Event loop; nothing here waits.
"""

from time import monotonic
from typing import Any

from aiohttp import web

from mlx_worker import __version__
from mlx_worker.errors import UnknownModel
from mlx_worker.http.replies import json_reply
from mlx_worker.records import ServedModel
from mlx_worker.server.keys import ENGINE, IS_TRUSTED, LINK, METRICS, STARTED_S
from mlx_worker.server.lag import LAG

OWNER = "mlx-worker"


async def health(request: web.Request) -> web.Response:
    """200 only if requests can be served now; the reason is for callers with the key."""
    found = request.app[ENGINE].health()
    if found.is_ok:
        return json_reply({"status": "ok"})
    failing = {"status": "failing"}
    if request[IS_TRUSTED]:
        failing["why"] = found.why
    return json_reply(failing, status=503)


async def models(request: web.Request) -> web.Response:
    served = [model_json(model) for model in request.app[ENGINE].models()]
    return json_reply({"object": "list", "data": served})


async def one_model(request: web.Request) -> web.Response:
    """Raises UnknownModel."""
    wanted = request.match_info["id"]
    served = {model.id: model for model in request.app[ENGINE].models()}
    if wanted not in served:
        raise UnknownModel(wanted, served)
    return json_reply(model_json(served[wanted]))


async def status(request: web.Request) -> web.Response:
    """All that the engine measured; version, uptime, the link to a gateway, the last replies."""
    shown = {
        "version": __version__,
        "uptime_s": round(monotonic() - request.app[STARTED_S], 1),
        "loop_lag_ms": request.app[LAG].shown(),
        **request.app[ENGINE].status(),
        "link": request.app[LINK](),
        "recent": request.app[METRICS].recent.shown(),
    }
    return json_reply(shown)


def model_json(model: ServedModel) -> dict[str, Any]:
    """As OpenAI writes a model; what it has no word for stands beside, under our name."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": OWNER,
        "pendra": {
            "context_tokens": model.context_tokens,
            "draft": model.draft,
            "is_loaded": model.is_loaded,
        },
    }
