"""GET /ws/worker: a worker dials in.

Owns who may: a worker with its own key, no browser's page; and what is said to whom may not. Leaves
what follows to connected.py. Event loop.
"""

import asyncio
import logging

from aiohttp import web

from mlx_worker.errors import LinkLost
from mlx_worker.gateway.connected import Connected
from mlx_worker.gateway.records import Enrolled
from mlx_worker.gateway.registry import Registry
from mlx_worker.gateway.store import Store
from mlx_worker.gateway.times import Times
from mlx_worker.http.replies import Refusal
from mlx_worker.wire.link import MAX_FRAME, PATH, PROTOCOL, BrokenLink, Close, Hello

ROUTE = "worker"  # needs a worker's key instead of an API key
_BEARER = "Bearer "

log = logging.getLogger(__name__)


class Door:
    """Where workers come in."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store = store
        self._registry = registry

    @property
    def routes(self) -> list[web.RouteDef]:
        return [web.get(PATH, self.handle, name=ROUTE, allow_head=False)]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Raises Refusal before the upgrade; afterwards a close code says why."""
        worker = await self._known(request)
        times = self._registry.times
        socket = web.WebSocketResponse(
            timeout=times.close, heartbeat=times.heartbeat, max_msg_size=MAX_FRAME, compress=False
        )
        await socket.prepare(request)
        registry = self._registry
        desk = registry.desk_of(worker)
        one = Connected(worker, socket, desk, times, registry.changed, registry.acknowledged)
        try:
            await self._welcome(one, times)
            await one.run()
        except BrokenLink as broken:
            one.close(broken.close, broken.message)
        except LinkLost as lost:
            one.close(Close.GOING_AWAY, lost.message)
        finally:
            registry.detach(one)
            await one.hang_up()
        return socket

    async def _known(self, request: web.Request) -> Enrolled:
        if "Origin" in request.headers:
            raise Refusal(403, "forbidden", "a page in a browser can't be a worker")
        given = request.headers.getall("Authorization", [])
        secret = given[0] if len(given) == 1 else ""
        worker = None
        if secret.startswith(_BEARER):
            worker = await self._store.worker_of(secret.removeprefix(_BEARER).strip())
        if worker is None:
            raise Refusal(401, "unknown_worker_key", "no worker has this key; add one first")
        if worker.disabled_s is not None:
            raise Refusal(403, "worker_disabled", "this worker was disabled; add it again")
        return worker

    async def _welcome(self, one: Connected, times: Times) -> None:
        """Raises BrokenLink, LinkLost."""
        hello = await self._hello(one, times)
        organisation = await self._store.organisation(one.worker.organisation_id)
        platform = await self._store.platform()
        known = await self._store.worker(None, one.worker.id)
        if known is None or organisation is None:
            raise BrokenLink("the worker was disabled", Close.DISABLED)
        one.worker = known
        self._registry.attach(one, hello, organisation, platform)

    async def _hello(self, one: Connected, times: Times) -> Hello:
        try:
            async with asyncio.timeout(times.hello):
                hello = await one.hear()
        except TimeoutError:
            raise BrokenLink(f"no hello came within {times.hello:g} s") from None
        if not isinstance(hello, Hello):
            raise BrokenLink("the first frame is no hello")
        if hello.worker_id != one.worker.id:
            raise BrokenLink("the key belongs to another worker", Close.KEY_REFUSED)
        if hello.protocol < PROTOCOL:
            reason = f"protocol {hello.protocol}, must be {PROTOCOL}: update the worker"
            raise BrokenLink(reason, Close.UPDATE_NEEDED)
        return hello
