"""The gateway as one aiohttp application.

Owns which middlewares and routes there are, and their order. Leaves everything else to the files
it names. Event loop.

Next: runner = Runner(make_gateway(store, registry, settings)); await runner.setup(); then a site.
"""

from collections.abc import Iterable

from aiohttp import web

from mlx_worker.gateway import api, console, events, openapi
from mlx_worker.gateway.auth import USUAL_LIMITS, LoginLimits, Logins
from mlx_worker.gateway.fleet import Fleet
from mlx_worker.gateway.front import dress, guard, record
from mlx_worker.gateway.keys import LOGINS, REGISTRY, RULES, SETTINGS, STORE, TRAFFIC
from mlx_worker.gateway.security import make_rules
from mlx_worker.gateway.settings import GatewaySettings
from mlx_worker.gateway.store import Store
from mlx_worker.gateway.traffic import Traffic
from mlx_worker.http.connection import Runner
from mlx_worker.http.front import translate
from mlx_worker.http.replies import MAX_BODY_BYTES, json_reply

__all__ = ["Runner", "make_gateway"]


def make_gateway(
    store: Store,
    registry: Fleet,
    settings: GatewaySettings,
    routes: Iterable[web.AbstractRouteDef] = (),
    *,
    limits: LoginLimits = USUAL_LIMITS,
    beat_s: float = events.BEAT_S,
) -> web.Application:
    """The application that answers for the workers in `registry`. routes: more, as in tests."""
    app = web.Application(middlewares=[record, translate, guard], client_max_size=MAX_BODY_BYTES)
    app[STORE] = store
    app[REGISTRY] = registry
    app[SETTINGS] = settings
    app[RULES] = make_rules(settings)
    app[TRAFFIC] = Traffic()
    app[LOGINS] = Logins(limits)
    app.on_response_prepare.append(dress)
    app.router.add_get("/health", health, name="health")
    app.router.add_routes(openapi.ROUTES)
    console.add_to(app)
    events.add_to(app, beat_s)
    app.router.add_routes(api.ROUTES)
    app.router.add_routes(routes)
    return app


async def health(request: web.Request) -> web.Response:
    return json_reply({"status": "ok"})
