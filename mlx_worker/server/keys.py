"""What handlers find in the application and in each request, by typed keys.

Owns the names alone; app.py puts the parts in, front.py fills the request.

    engine = request.app[ENGINE]
    async for event in engine.submit(Call(id=request[REQUEST_ID], scope=request[SCOPE], …)): …
"""

from collections.abc import Callable
from typing import Any

from aiohttp import web

from mlx_worker.records import Engine
from mlx_worker.server.metrics import Metrics
from mlx_worker.server.security import Rules
from mlx_worker.wire.account import WorkerIdentity

ENGINE = web.AppKey("engine", Engine)
METRICS = web.AppKey("metrics", Metrics)
RULES = web.AppKey("rules", Rules)
IDENTITY = web.AppKey("identity", WorkerIdentity)
LINK = web.AppKey[Callable[[], dict[str, Any] | None]]("link")  # how it is; None: no gateway
BUDGET_BYTES = web.AppKey[int | None]("budget_bytes")  # that models may take; None: not known
STARTED_S = web.AppKey("started_s", float)  # monotonic, when the application was made

IS_TRUSTED = web.RequestKey("is_trusted", bool)  # it has the key, or none is needed
SCOPE = web.RequestKey("scope", str)  # whose prefix cache it may use: Call.scope
