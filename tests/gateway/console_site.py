"""A real gateway with an organisation, and workers that dial in and say what they are told to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType, web

from mlx_worker.gateway.app import Runner, make_gateway
from mlx_worker.gateway.auth import LoginLimits
from mlx_worker.gateway.records import Enrolled, Organisation, Role
from mlx_worker.gateway.registry import Registry
from mlx_worker.gateway.settings import GatewaySettings
from mlx_worker.gateway.socket import Door
from mlx_worker.gateway.store import Store
from mlx_worker.records import Settings
from mlx_worker.wire.link import (
    DECIDES,
    FROM_GATEWAY,
    KV_PREFIX_CACHE,
    PATH,
    RUN_TOGETHER,
    SETTING,
    Connection,
    Hello,
    Memory,
    ModelReport,
    Ping,
    PlatformFrame,
    PlatformPart,
    Pong,
    Queue,
    SettingsAck,
    SettingsFrame,
    SettingsPart,
    Speculation,
    StatusReport,
    Welcome,
)

ALL = (DECIDES, SETTING, KV_PREFIX_CACHE, RUN_TOGETHER)
BEAT_S = 0.1
NAMES: dict[Role, str] = {"owner": "Ada", "operator": "Olaf", "member": "Mia"}
MEASURED: dict[str, Any] = {
    "speedup": 0.24, "low": 0.18, "high": 0.31, "depth": 4, "acceptance": 0.71,
    "tokens_per_round": 2.94, "requests": 38, "tokens": 4120,
    "why": "38 requests were 24 % faster with drafts",
}  # fmt: skip


def model(id: str = "gemma-4-e2b-it", state: str | None = "on", **facts: Any) -> ModelReport:
    """state None: nothing reported of its draft."""
    said = {"state": state, **MEASURED, "speedup": facts.pop("speedup", 0.24)}
    speculation = Speculation.model_validate(said) if state else None
    values: dict[str, Any] = {
        "id": id, "is_loaded": True, "context_tokens": 131072, "model_bytes": 5_120_000_000,
        "draft": "gemma-4-e2b-it-assistant", "draft_bytes": 157_000_000,
        "speculation": speculation, **facts,
    }  # fmt: skip
    return ModelReport(**values)


class ScriptedWorker:
    """One connection of a worker: takes settings and the platform's switch, answers no requests."""

    def __init__(self, worker: Enrolled, key: str, port: int, *models: ModelReport) -> None:
        self.worker = worker
        self.key = key
        self.port = port
        self.models = models or (model(),)
        self.version = "0.9.0"
        self.capabilities: tuple[str, ...] = ALL
        self.settings: Settings | None = Settings()
        self.problem: str | None = None
        self.revision = 0
        self.platform = PlatformPart()
        self.acks = asyncio.Event()  # cleared: changes are kept, and not acknowledged
        self.acks.set()
        self.reports = True  # a status follows the hello

    @asynccontextmanager
    async def connected(self) -> AsyncIterator["ScriptedWorker"]:
        headers = {"Authorization": f"Bearer {self.key}"}
        url = f"ws://127.0.0.1:{self.port}{PATH}"
        async with ClientSession() as session, session.ws_connect(url, headers=headers) as socket:
            self._socket = socket
            self._wire = Connection(FROM_GATEWAY, monotonic())
            await self._greet()
            reading = asyncio.create_task(self._read(socket))
            try:
                yield self
            finally:
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading

    async def _greet(self) -> None:
        hello = Hello(
            worker_id=self.worker.id,
            epoch="1",
            version=self.version,
            capabilities=self.capabilities,
            models=self.models,
            settings=self._part(),
            settings_revision=self.revision,
            settings_problem=self.problem,
        )
        await self._send(hello)
        welcome = self._wire.read((await self._socket.receive()).data, monotonic())
        assert isinstance(welcome, Welcome), welcome
        self.platform = welcome.platform
        if self.reports:
            await self.report()

    async def report(self, *models: ModelReport) -> None:
        """Its status, with these models from now on."""
        self.models = models or self.models
        status = StatusReport(
            models=self.models,
            settings=self._part(),
            settings_revision=self.revision,
            settings_problem=self.problem,
            platform_revision=self.platform.revision,
            memory=Memory(active_bytes=5_300_000_000),
            queue=Queue(running=1, waiting=0, limit=32),
        )
        await self._send(status)

    def _part(self) -> SettingsPart | None:
        return SettingsPart(**vars(self.settings)) if self.settings else None

    async def _send(self, frame: Any) -> None:
        await self._socket.send_str(self._wire.write(frame))

    async def _read(self, socket: ClientWebSocketResponse) -> None:
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await self._take(self._wire.read(message.data, monotonic()))

    async def _take(self, frame: Any) -> None:
        match frame:
            case Ping():
                await self._send(Pong())
            case PlatformFrame():
                self.platform = frame
            case SettingsFrame() if frame.revision > self.revision:
                await self.acks.wait()
                assert self.settings is not None
                self.settings = replace(self.settings, **frame.changes)
                self.revision = frame.revision
                part = self._part()
                assert part is not None
                await self._send(SettingsAck(revision=self.revision, settings=part))
            case _:
                pass


@dataclass
class Site:
    """A running gateway. keys: one of each role."""

    store: Store
    registry: Registry
    organisation: Organisation
    keys: dict[str, str]
    port: int = 0
    settings: GatewaySettings = field(default_factory=GatewaySettings)
    limits: LoginLimits = field(default_factory=LoginLimits)
    _runner: Runner | None = None

    async def start(self) -> None:
        door = Door(self.store, self.registry)
        app = make_gateway(
            self.store, self.registry, self.settings, door.routes, limits=self.limits, beat_s=BEAT_S
        )
        self._runner = Runner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    async def worker(self, name: str = "studio", *models: ModelReport) -> ScriptedWorker:
        worker, key = await self.store.add_worker(self.organisation.id, name)
        return ScriptedWorker(worker, key, self.port, *models)

    async def used(self, worker: Enrolled | None = None, **fields: Any) -> int:
        """A row of the usage log, ended."""
        key = (await self.store.keys(self.organisation.id))[0]
        id = await self.store.begin_usage(
            request_id="r-1", organisation_id=self.organisation.id, key_id=key.id,
            key_name=key.name, model=fields.pop("model", "gemma-4-e2b-it"), endpoint="chat",
            is_streamed=True, worker_id=worker and worker.id, worker_name=worker and worker.name,
        )  # fmt: skip
        given = {
            "prompt_tokens": 12, "completion_tokens": 340, "ttft_ms": 182.0,
            "tokens_per_second": 58.1, "draft_acceptance_rate": 0.71, "finish_reason": "stop",
        }  # fmt: skip
        await self.store.end_usage(id, **{**given, **fields})
        self.registry.tell(self.organisation.id, usage=True)
        return id


@asynccontextmanager
async def site(folder: Path, **given: Any) -> AsyncIterator[Site]:
    store = await Store.open(folder / "gateway.db")
    organisation = await store.add_organisation("Acme")
    keys: dict[str, str] = {}
    for role in NAMES:
        _, keys[role] = await store.add_key(organisation.id, NAMES[role], role)
    registry = Registry(store)
    found = Site(store, registry, organisation, keys, **given)
    await found.start()
    try:
        yield found
    finally:
        await registry.shut()
        await found.stop()
        await registry.settle()
        await store.close()
