"""The hub's part of the gateway's application: workers' door, clients' doors, their end.

Event loop.
"""

from aiohttp import web

from mlx_worker.gateway.registry import Registry
from mlx_worker.gateway.relay import Exchange
from mlx_worker.gateway.socket import Door
from mlx_worker.gateway.store import Store


def join(app: web.Application, store: Store, registry: Registry) -> None:
    """Add its routes, and what it does when the application ends."""

    async def shut(_: web.Application) -> None:
        await registry.shut()

    async def settle(_: web.Application) -> None:
        await registry.settle()

    app.router.add_routes(Door(store, registry).routes)
    app.router.add_routes(Exchange(store, registry).routes)
    app.on_shutdown.append(shut)
    app.on_cleanup.append(settle)
