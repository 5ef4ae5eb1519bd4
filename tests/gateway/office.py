"""A real gateway on a free port, workers that are there without a link, and keys to ask it with."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import web

from mlx_worker.errors import NotConnected
from mlx_worker.gateway.app import Runner, make_gateway
from mlx_worker.gateway.auth import USUAL_LIMITS, LoginLimits
from mlx_worker.gateway.records import Enrolled, Key, Organisation, Report
from mlx_worker.gateway.registry import check_takes
from mlx_worker.gateway.settings import GatewaySettings
from mlx_worker.gateway.store import Store
from mlx_worker.records import Settings
from mlx_worker.wire.link import DECIDES, KV_PREFIX_CACHE, RUN_TOGETHER, SETTING, Queue

ALL = frozenset({DECIDES, SETTING, KV_PREFIX_CACHE, RUN_TOGETHER})
NEW = Report("1.0", ALL, Settings())
OLD = Report("0.9", frozenset({DECIDES}), None)
JSON = {"Content-Type": "application/json"}
COOKIE = "mlx_gateway_session"


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class ScriptedFleet:
    """Workers that are connected because a test says so; keeps what it was asked."""

    def __init__(self) -> None:
        self.here: dict[str, Any] = {}
        self.changed: list[tuple[str, Mapping[str, Any]]] = []
        self.closed: list[tuple[str, int]] = []
        self.n_platform = 0
        self.has_closed = asyncio.Event()

    def connect(self, worker: Enrolled) -> None:
        self.here[worker.id] = SimpleNamespace(
            worker=worker,
            report=worker.report,
            since_s=1_800_000_000.0,
            has_reported=True,
            is_draining=False,
            n_requests=0,
            queue=Queue(),
            memory=None,
            power=None,
            desk=SimpleNamespace(pending={}),
        )

    def get(self, worker_id: str) -> Any | None:
        return self.here.get(worker_id)

    def all(self, organisation_id: str) -> Sequence[Any]:
        found = self.here.values()
        return [one for one in found if one.worker.organisation_id == organisation_id]

    async def change(self, worker: Enrolled, changes: Mapping[str, Any]) -> int:
        check_takes(worker, changes)
        if worker.id not in self.here:
            raise NotConnected(worker.name)
        self.changed.append((worker.id, changes))
        return len(self.changed)

    async def platform_changed(self) -> None:
        self.n_platform += 1

    async def close(self, worker_id: str, code: int, reason: str) -> None:
        self.here.pop(worker_id, None)
        self.closed.append((worker_id, code))
        self.has_closed.set()

    async def changes(self, organisation_id: str) -> AsyncIterator[Any]:
        assert organisation_id
        yield {"workers": True, "usage": False}


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of an error; the whole shape is checked on the way."""
        found = self.json()
        assert found.keys() == {"error"}
        assert found["error"].keys() == {"message", "type", "param", "code"}
        return found["error"]["code"]

    @property
    def cookie(self) -> str:
        return self.headers["Set-Cookie"].split(";")[0].removeprefix(f"{COOKIE}=")


@dataclass
class Office:
    """A running gateway with its organisation, an owner's key and a worker that is connected."""

    url: str
    store: Store
    fleet: ScriptedFleet
    http: aiohttp.ClientSession
    organisation: Organisation
    owner: Key
    secret: str
    worker: Enrolled
    worker_key: str
    others: dict[str, Any] = field(default_factory=dict[str, Any])

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = "owner",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One request. key: "owner", a secret, or None: without one."""
        sent = dict(headers or {})
        if key is not None:
            sent["Authorization"] = f"Bearer {self.secret if key == 'owner' else key}"
        data = body if isinstance(body, bytes) else None
        if body is not None and data is None:
            data = json.dumps(body).encode()
        if data is not None:
            sent = {**JSON, **sent}
        url = f"{self.url}{path}"
        async with self.http.request(
            method, url, data=data, headers=sent, allow_redirects=False
        ) as reply:
            return Answer(reply.status, dict(reply.headers), await reply.read())

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.ask("GET", path, **options)

    async def key(self, role: Any, *extra: Any, of: str | None = "own") -> str:
        id = self.organisation.id if of == "own" else of
        _, secret = await self.store.add_key(id, f"a {role}", role, extra)
        return secret

    async def sign_in(self, secret: str | None = None) -> Answer:
        return await self.ask("POST", "/api/v1/session", {"key": secret or self.secret}, key=None)

    def session(self, token: str) -> dict[str, str]:
        """What the console's scripts send."""
        return {"Cookie": f"{COOKIE}={token}", "Origin": self.url, "X-CSRF": "1"}


@asynccontextmanager
async def opened(
    folder: Path,
    *,
    limits: LoginLimits = USUAL_LIMITS,
    now_s: Clock | None = None,
    routes: Sequence[web.AbstractRouteDef] = (),
    **settings: Any,
) -> AsyncIterator[Office]:
    path = folder / "gateway.db"
    store = await Store.open(path, now_s) if now_s else await Store.open(path)
    fleet = ScriptedFleet()
    section = GatewaySettings(**{"port": 0, "database": path, **settings})
    runner = Runner(
        make_gateway(store, fleet, section, routes, limits=limits),
        shutdown_timeout=1,
    )
    organisation = await store.add_organisation("acme")
    owner, secret = await store.add_key(organisation.id, "boss", "owner")
    worker, worker_key = await enrol(store, fleet, organisation.id, "mac", NEW)
    try:
        await runner.setup()
        await web.TCPSite(runner, section.host, section.port).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http:
            yield Office(url, store, fleet, http, organisation, owner, secret, worker, worker_key)
    finally:
        await runner.cleanup()
        await store.close()


async def enrol(
    store: Store, fleet: ScriptedFleet, organisation_id: str, name: str, report: Report | None
) -> tuple[Enrolled, str]:
    """A worker that is connected; report None: one that never was."""
    worker, key = await store.add_worker(organisation_id, name)
    if report is not None:
        await store.keep_report(worker.id, report)
        worker = replace(worker, report=report)
        fleet.connect(worker)
    return worker, key
