"""The local API as one aiohttp application.

Owns which middlewares and routes there are, and their order. Leaves everything else to the files
it names. Event loop.

Next: runner = Runner(make_app(engine, settings)); await runner.setup(); then a site on it.
"""

from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from aiohttp import web

from mlx_worker import __version__
from mlx_worker.config import ServerSection
from mlx_worker.http.connection import Runner
from mlx_worker.http.front import translate
from mlx_worker.http.replies import MAX_BODY_BYTES
from mlx_worker.models.store import Store
from mlx_worker.records import Engine
from mlx_worker.server import models as library
from mlx_worker.server.chat import ROUTES
from mlx_worker.server.console import FILE_PATH, index, part
from mlx_worker.server.front import dress, guard, record
from mlx_worker.server.keys import BUDGET_BYTES, ENGINE, IDENTITY, LINK, METRICS, RULES, STARTED_S
from mlx_worker.server.lag import LAG, LoopLag, watched
from mlx_worker.server.metrics import CONTENT_TYPE, Metrics
from mlx_worker.server.pulls import NO_DRAFTS, PULLS, Pulls, closed
from mlx_worker.server.security import make_rules
from mlx_worker.server.settings import change_settings, show_settings
from mlx_worker.server.status import health, models, one_model, status
from mlx_worker.wire.account import WorkerIdentity

if TYPE_CHECKING:
    from mlx_worker.models.hub import Hub

NOBODY = WorkerIdentity("local", "local", __version__)

__all__ = ["Runner", "make_app"]


def make_app(
    engine: Engine,
    settings: ServerSection,
    routes: Iterable[web.AbstractRouteDef] = ROUTES,
    identity: WorkerIdentity = NOBODY,
    *,
    store: Store | None = None,
    hub: "Hub | None" = None,
    drafts: Mapping[str, str] = NO_DRAFTS,
    budget_bytes: int | None = None,
    link: Callable[[], dict[str, Any] | None] = lambda: None,
) -> web.Application:
    """The application that answers for `engine`.

    routes        those that write replies; they pass the same checks
    identity      who answers, as every reply says it
    store, hub    where models are and come from; None: the usual ones
    drafts        of models for which the configuration names one
    budget_bytes  memory that models may take; None: a share of this machine's
    link          how the link to a gateway is; None where there is no gateway

    Raises ConfigError: the host can be reached from outside, and there is no key.
    """
    app = web.Application(middlewares=[record, translate, guard], client_max_size=MAX_BODY_BYTES)
    app[ENGINE] = engine
    app[LAG] = lag = LoopLag()
    app[METRICS] = Metrics(engine, lag)
    app[RULES] = make_rules(settings)
    app[IDENTITY] = identity
    app[PULLS] = Pulls(engine, store, hub, drafts)
    app[BUDGET_BYTES] = budget_bytes
    app[LINK] = link
    app[STARTED_S] = monotonic()
    app.on_response_prepare.append(dress)
    app.cleanup_ctx.append(watched)
    app.on_shutdown.append(closed)
    app.router.add_get("/", index, name="page")
    app.router.add_get(FILE_PATH, part, name="page.file")
    app.router.add_get("/health", health, name="health")
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{id:.+}", one_model)
    app.router.add_get("/status", status)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/api/settings", show_settings)
    app.router.add_patch("/api/settings", change_settings)
    app.router.add_routes(library.ROUTES)
    app.router.add_routes(routes)
    return app


async def metrics(request: web.Request) -> web.Response:
    text = request.app[METRICS].text()
    return web.Response(body=text, headers={"Content-Type": f"{CONTENT_TYPE}; charset=utf-8"})
