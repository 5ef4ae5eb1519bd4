"""A real gateway on a free port with a real database, workers that say what they are told to, over
real sockets, and clients that read what comes.
"""

import asyncio
import io
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, cast

import aiohttp
from aiohttp import web
from pydantic import BaseModel

from mlx_worker.gateway.app import Runner, make_gateway
from mlx_worker.gateway.hub import join
from mlx_worker.gateway.records import Enrolled, Organisation
from mlx_worker.gateway.registry import Registry
from mlx_worker.gateway.settings import GatewaySettings
from mlx_worker.gateway.store import Store
from mlx_worker.gateway.times import Times
from mlx_worker.http.connection import allow_open_files
from mlx_worker.records import ReplyEvent, Started
from mlx_worker.wire.account import WorkerIdentity
from mlx_worker.wire.link import (
    DECIDES,
    FROM_GATEWAY,
    KV_PREFIX_CACHE,
    PATH,
    RUN_TOGETHER,
    SETTING,
    Accepted,
    BrokenLink,
    Cancel,
    Chunk,
    Connection,
    DoneFrame,
    ErrorFrame,
    Frame,
    Held,
    Hello,
    ModelReport,
    Ping,
    PlatformPart,
    Pong,
    Queue,
    Received,
    Rejected,
    Request,
    SettingsAck,
    SettingsFrame,
    SettingsPart,
    StatusReport,
    TimingPart,
    UsagePart,
    Welcome,
)
from mlx_worker.wire.openai import Asked, parse_chat, parse_completion
from mlx_worker.wire.reply import ChatReply, ChatStream, CompletionReply, CompletionStream
from mlx_worker.wire.sse import json_bytes
from tests.wire.events import CREATED, done, text

CAPABILITIES = (DECIDES, SETTING, KV_PREFIX_CACHE, RUN_TOGETHER)
MODEL = ModelReport(id="m", is_loaded=True, context_tokens=4096, draft="m-draft", draft_bytes=9)
QUICK = Times(hello=1.0, drain=1.0, close=0.5, grace=0.5, keep=0.01, unread=1.0, changes=0.01)
PATIENT_S = 10.0  # that a test waits for what must come
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

# --- a worker -----------------------------------------------------------------------------------


def known(part: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in part.model_fields}


def ending(completion_tokens: int) -> dict[str, Any]:
    """The chunk with which a stream of one choice ends."""
    return {
        "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": completion_tokens,
            "total_tokens": 7 + completion_tokens,
        },
        "pendra": {"timing": {"ttft_ms": 20.0, "tokens_per_second": 50.0}},
    }


@dataclass
class Job:
    """A request that a worker has: what it wrote, sent or not."""

    worker: "ScriptedWorker"
    request: Request
    frames: list[Frame] = field(default_factory=list[Frame])
    seq: int = -1
    is_cancelled: bool = False
    task: asyncio.Task[None] | None = None
    figures: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def asked(self) -> Asked:
        parse = parse_chat if self.request.endpoint == "chat" else parse_completion
        return parse(json_bytes(self.request.body), self.id)

    async def write(self, frame: Frame) -> None:
        async with self.worker.writing:
            self.frames.append(frame)
            self.seq = getattr(frame, "seq", self.seq)
            await self.worker.send(frame)
        await self.worker.notify()

    async def accept(self) -> None:
        await self.write(Accepted(id=self.id))

    async def reject(self, code: str = "overloaded", retry_after_ms: int = 3000) -> None:
        await self.write(Rejected(id=self.id, code=code, retry_after_ms=retry_after_ms))

    async def chunk(self, *data: dict[str, Any]) -> None:
        for one in data:
            if one.get("usage") and "pendra" in one:
                self.figures = {"usage": one["usage"], "timing": one["pendra"]["timing"]}
        await self.write(Chunk(id=self.id, seq=self.seq + 1, data=list(data)))

    async def done(self, **other: Any) -> None:
        """With the figures of the reply, or with other ones: usage's, timing's."""
        said = self.figures or ending(3)
        usage, timing = said["usage"], said.get("timing") or said["pendra"]["timing"]
        frame = DoneFrame(
            id=self.id,
            seq=self.seq + 1,
            finish_reason="stop",
            usage=UsagePart(**{**known(UsagePart, usage), **known(UsagePart, other)}),
            timing=TimingPart(**{**timing, **known(TimingPart, other)}),
        )
        await self.write(frame)

    async def finish(self, completion_tokens: int = 3) -> None:
        """The last chunk of a stream, and the end."""
        await self.chunk(ending(completion_tokens))
        await self.done()

    async def error(self, code: str = "generation_failed", status: int = 500, **more: Any) -> None:
        message = more.pop("message", "it broke")
        error = ErrorFrame(
            id=self.id, seq=self.seq + 1, code=code, message=message, status=status, **more
        )
        await self.write(error)


Script = Callable[[Job], Awaitable[None]]


def says(
    *words: str, step: Callable[[int], Awaitable[None]] | None = None, **timing: Any
) -> Script:
    """Writes these words as a real worker does, streamed or whole. step: awaited before each."""

    async def script(job: Job) -> None:
        await job.accept()
        events: list[Started | ReplyEvent] = [Started("m", 7, 2.5)]
        events += [text(word, i % 6) for i, word in enumerate(words)]
        events.append(done(len(words), decode_ms=20.0, **timing))
        identity = WorkerIdentity("liar", "liar", "0")
        is_chat = job.request.endpoint == "chat"
        if not job.asked.call.is_streamed:
            whole = (ChatReply if is_chat else CompletionReply)(job.asked, CREATED, identity)
            for event in events:
                whole.feed(event)
            await job.chunk(whole.finish())
        else:
            stream = (ChatStream if is_chat else CompletionStream)(job.asked, CREATED, identity)
            for i, event in enumerate(events):
                if step is not None and i:
                    await step(i - 1)
                if chunks := stream.feed(event):
                    await job.chunk(*chunks)
        await job.done()

    return script


COUNTS = says("one ", "two ", "three")
USUAL = SettingsPart()


class ScriptedWorker:
    """Keeps what the link asks a worker to keep, and says what its script tells it.

    heard     frames that came from the gateway, pings excepted
    reports   the status that it sends once it is connected; None: none
    is_ready  it answers pings, and acknowledges settings
    """

    def __init__(
        self,
        url: str,
        worker: Enrolled,
        secret: str,
        script: Script = COUNTS,
        *,
        models: Sequence[ModelReport] = (MODEL,),
        capabilities: Sequence[str] = CAPABILITIES,
        settings: SettingsPart | None = USUAL,
        slots: int = 4,
        **hello: Any,
    ) -> None:
        self.url = url
        self.worker = worker
        self.secret = secret
        self.script = script
        self.models = tuple(models)
        self.capabilities = tuple(capabilities)
        self.settings = settings
        self.revision = 0
        self.slots = slots
        self.hello = hello
        self.epoch = secrets.token_hex(8)
        self.heard: list[Frame] = []
        self.jobs: dict[str, Job] = {}
        self.ended: set[str] = set()
        self.n_begun = self.n_connections = 0
        self.reports: StatusReport | None = StatusReport(
            models=self.models, settings=settings, queue=Queue(slots=slots)
        )
        self.acknowledges = True
        self.answers_pings = True
        self.close_code: int | None = None
        self.welcome: Welcome | None = None
        self._changed = asyncio.Condition()
        self._session: aiohttp.ClientSession | None = None
        self.socket: aiohttp.ClientWebSocketResponse | None = None
        self.wire: Connection[Any] | None = None
        self.writing = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.worker.id

    @property
    def is_connected(self) -> bool:
        return self.socket is not None and not self.socket.closed

    # --- the connection

    async def open(self, **headers: str) -> aiohttp.ClientWebSocketResponse:
        """Dial, and nothing else."""
        self._session = self._session or aiohttp.ClientSession()
        self.socket = await self._session.ws_connect(
            self.url + PATH,
            headers={"Authorization": f"Bearer {self.secret}", **headers},
            max_msg_size=0,
            compress=0,
        )
        self.wire = Connection(FROM_GATEWAY, monotonic())
        return self.socket

    def hello_frame(self) -> Hello:
        values: dict[str, Any] = {
            "worker_id": self.worker.id,
            "epoch": self.epoch,
            "version": "1.0",
            "capabilities": self.capabilities,
            "models": self.models,
            "settings": self.settings,
            "settings_revision": self.revision,
            "resume": tuple(Held(id=job.id, seq=job.seq) for job in self.jobs.values()),
        }
        return Hello(**{**values, **self.hello})

    async def connect(self) -> "ScriptedWorker":
        """Dial, say hello, go on with what is held, report."""
        async with self.writing:
            await self.open()
            await self.send(self.hello_frame())
            async with asyncio.timeout(PATIENT_S):
                frame = await self.hear()
            if not isinstance(frame, Welcome):
                raise ConnectionError(f"{frame} instead of welcome, {self.close_code}")
            self.welcome = frame
            self.n_connections += 1
            await self._resume(frame.resume)
            if self.reports is not None:
                await self.send(self.reports)
        self._reader = asyncio.create_task(self._read())
        return self

    def persist(self) -> None:
        """From now on, dial again whenever the connection is lost."""
        self._keeper = asyncio.create_task(self._persist())

    async def _persist(self) -> None:
        while True:
            if self._reader:
                await asyncio.wait([self._reader])
            try:
                await self.again()
            except (OSError, aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.01)

    async def _resume(self, resume: dict[str, int]) -> None:
        for job in list(self.jobs.values()):
            if job.id in resume:
                await self._replay(job, resume[job.id])
            else:
                self._drop(job)

    async def _replay(self, job: Job, after: int) -> None:
        for frame in list(job.frames):
            if getattr(frame, "seq", -1) > after or isinstance(frame, Accepted | Rejected):
                await self.send(frame)

    def _drop(self, job: Job) -> None:
        job.is_cancelled = True
        self.jobs.pop(job.id, None)
        self.ended.add(job.id)
        if job.task:
            job.task.cancel()

    async def hear(self) -> Frame | None:
        """The next frame, pings answered; None: the connection is over."""
        assert self.socket
        assert self.wire
        while True:
            message = await self.socket.receive()
            if message.type is not aiohttp.WSMsgType.TEXT:
                self.close_code = self.socket.close_code
                return None
            try:
                frame = self.wire.read(message.data, monotonic())
            except BrokenLink as broken:
                await self.socket.close(code=broken.close)
                return None
            if isinstance(frame, Ping):
                if self.answers_pings:
                    await self.send(Pong())
            elif frame is not None:
                self.heard.append(frame)
                return frame

    async def send(self, frame: Frame) -> None:
        """Dropped while there is no connection."""
        if self.is_connected and self.wire:
            await self.send_text(self.wire.write(frame))

    async def send_text(self, message: str) -> None:
        if self.socket is not None and not self.socket.closed:
            with suppress(ConnectionError):
                await self.socket.send_str(message)

    async def cut(self) -> None:
        """The connection is gone, without a word."""
        assert self.socket
        response = self.socket._response.connection  # aiohttp has no public way to break one off
        if response is not None and response.transport is not None:
            response.transport.abort()
        await self._stop_reading()

    async def again(self) -> None:
        """Dial anew."""
        await self._stop_reading()
        await self.connect()

    async def _stop_reading(self) -> None:
        if self._reader:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self.socket is not None and not self.socket.closed:
            with suppress(Exception):
                async with asyncio.timeout(0.2):
                    await self.socket.close()

    async def stop(self) -> None:
        if self._keeper:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for job in list(self.jobs.values()):
            if job.task:
                job.task.cancel()
        await self._stop_reading()
        if self._session:
            await self._session.close()

    # --- what it does

    async def _read(self) -> None:
        while (frame := await self.hear()) is not None:
            match frame:
                case Request():
                    await self._take(frame)
                case Cancel():
                    await self._cancel(frame.id)
                case Received():
                    if frame.id in self.jobs:
                        self.ended.add(frame.id)
                        self.jobs.pop(frame.id)
                case SettingsFrame():
                    await self._change(frame)
                case _:
                    pass
            await self.notify()
        await self.notify()

    async def _take(self, request: Request) -> None:
        if job := self.jobs.get(request.id):
            async with self.writing:
                await self._replay(job, request.after)
            return
        assert request.id not in self.ended, "a request that was done came again"
        job = self.jobs[request.id] = Job(self, request)
        self.n_begun += 1
        job.task = asyncio.create_task(self._run(job))

    async def _run(self, job: Job) -> None:
        await cast("Any", self.script)(job)
        await self.notify()

    async def _cancel(self, id: str) -> None:
        if job := self.jobs.get(id):
            job.is_cancelled = True
            if job.task:
                job.task.cancel()
            await job.error("cancelled", 500)

    async def _change(self, frame: SettingsFrame) -> None:
        if not self.acknowledges:
            return
        if frame.revision > self.revision:
            assert self.settings
            self.settings = self.settings.model_copy(update=frame.changes)
            self.revision = frame.revision
        assert self.settings
        await self.send(SettingsAck(revision=self.revision, settings=self.settings))

    async def notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that a frame of either side, or the end of a script, brings about."""
        async with asyncio.timeout(PATIENT_S), self._changed:
            await self._changed.wait_for(is_so)

    def got(self, kind: type[Any]) -> list[Any]:
        return [frame for frame in self.heard if isinstance(frame, kind)]

    async def closed(self) -> int | None:
        """The code with which the gateway closes the connection."""
        async with asyncio.timeout(PATIENT_S):
            if self._reader:
                await self._reader
            else:
                while await self.hear() is not None:
                    pass
        return self.close_code

    @property
    def platform(self) -> list[PlatformPart]:
        return [frame for frame in self.heard if isinstance(frame, PlatformPart)]


# --- a gateway ----------------------------------------------------------------------------------


@dataclass
class Reply:
    """What a client got. events: of a stream, [DONE] as None."""

    status: int
    headers: Any
    body: bytes = b""
    events: list[Any] = field(default_factory=list[Any])

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return self.json()["error"]["code"]

    @property
    def text(self) -> str:
        return joined(self.events) if self.events else whole_text(self.json())

    @property
    def errors(self) -> list[Any]:
        return [event["error"] for event in self.events if event and "error" in event]


def joined(events: Iterable[Any]) -> str:
    """What a stream says, in all its chunks."""
    choices = [c for event in events if event for c in event.get("choices", ())]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)


def whole_text(reply: Any) -> str:
    choice = reply["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


async def read_event(content: aiohttp.StreamReader) -> Any:
    """The next of a stream; None: [DONE]; EOFError: it broke off."""
    line = (await content.readuntil(b"\n\n")).decode()
    if not line:
        raise EOFError
    assert line.startswith("data: ")
    assert line.count("\n") == 2
    value = line.removeprefix("data: ").strip()
    return None if value == "[DONE]" else json.loads(value)


class Client:
    """Of one key."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.key = key
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.session = aiohttp.ClientSession(
            connector=connector, headers={"Authorization": f"Bearer {key}"}
        )

    def post(self, body: Any = CHAT, path: str = "/v1/chat/completions", **headers: str) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = io.BytesIO(json.dumps(body).encode())
        named["Content-Type"] = "application/json"
        return self.session.post(self.url + path, data=data, headers=named)

    async def chat(self, **more: Any) -> Reply:
        """A whole reply. Names with a capital letter are headers."""
        headers = {name: more.pop(name) for name in list(more) if name[0].isupper()}
        path = more.pop("path", "/v1/chat/completions")
        body = more.pop("body", None) or {**CHAT, **more}
        async with asyncio.timeout(PATIENT_S), self.post(body, path, **headers) as got:
            return Reply(got.status, got.headers, await got.read())

    async def stream(self, **more: Any) -> Reply:
        """All of a stream, or the reply that stands in its place."""
        headers = {name: more.pop(name) for name in list(more) if name[0].isupper()}
        path = more.pop("path", "/v1/chat/completions")
        body = {**(more.pop("body", None) or CHAT), "stream": True, **more}
        async with asyncio.timeout(PATIENT_S), self.post(body, path, **headers) as got:
            if got.content_type != "text/event-stream":
                return Reply(got.status, got.headers, await got.read())
            reply = Reply(got.status, got.headers)
            while True:
                reply.events.append(await read_event(got.content))
                if reply.events[-1] is None:
                    return reply

    async def get(self, path: str) -> Reply:
        async with asyncio.timeout(PATIENT_S), self.session.get(self.url + path) as got:
            return Reply(got.status, got.headers, await got.read())


class Gateway:
    """A running one, with an organisation, its owner's key and a client that has it."""

    def __init__(
        self, store: Store, registry: Registry, organisation: Organisation, url: str, key: str
    ) -> None:
        self.store = store
        self.registry = registry
        self.organisation = organisation
        self.url = url
        self.client = Client(url, key)
        self._clients = [self.client]
        self._workers: list[ScriptedWorker] = []

    async def enrol(self, name: str = "w", organisation: Organisation | None = None) -> Any:
        return await self.store.add_worker((organisation or self.organisation).id, name)

    async def worker(self, script: Script = COUNTS, name: str = "w", **more: Any) -> ScriptedWorker:
        """One that is connected."""
        enrolled, secret = await self.enrol(name, more.pop("organisation", None))
        made = self.scripted(enrolled, secret, script=script, **more)
        await made.connect()
        await self.until_there(made)
        return made

    def scripted(
        self, enrolled: Enrolled, secret: str, *, script: Script = COUNTS, **more: Any
    ) -> ScriptedWorker:
        made = ScriptedWorker(more.pop("url", self.url), enrolled, secret, script, **more)
        self._workers.append(made)
        return made

    async def until_there(self, worker: ScriptedWorker) -> None:
        """Until the gateway has what the worker reports."""
        if worker.reports is not None:
            await self.until_reported(worker)

    async def until_reported(self, worker: ScriptedWorker) -> None:
        await self.until(lambda: bool((one := self.registry.get(worker.id)) and one.has_reported))

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Look whenever the gateway says that something has changed."""
        changes = self.registry.changes(self.organisation.id)
        async with asyncio.timeout(PATIENT_S):
            while not is_so():
                with suppress(TimeoutError):  # of another organisation nobody says so
                    async with asyncio.timeout(0.05):
                        await anext(changes)
                changes = self.registry.changes(self.organisation.id)
        await changes.aclose()

    async def member(self, organisation: Organisation | None = None) -> Client:
        _, key = await self.store.add_key((organisation or self.organisation).id, "other", "member")
        client = Client(self.url, key)
        self._clients.append(client)
        return client

    async def rows(self, n: int) -> list[Any]:
        """The usage, the newest first, once n rows have ended."""
        async with asyncio.timeout(PATIENT_S):
            while True:
                found, _ = await self.store.usage(self.organisation.id)
                if sum(row.ended_s is not None for row in found) >= n:
                    return found
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        for worker in self._workers:
            await worker.stop()
        for client in self._clients:
            await client.session.close()


@asynccontextmanager
async def gateway(
    folder: Path,
    times: Times = QUICK,
    *,
    port: int = 0,
    key: str | None = None,
    allowed_hosts: tuple[str, ...] = (),
) -> AsyncIterator[Gateway]:
    """For the length of a `with`. key: of an owner, where the database has one already."""
    allow_open_files()
    store = await Store.open(folder / "gateway.db")
    organisations = await store.organisations()
    mine = organisations[0] if organisations else await store.add_organisation("acme")
    if key is None:
        _, key = await store.add_key(mine.id, "owner", "owner")
    registry = Registry(store, times)
    settings = GatewaySettings(
        port=port, database=folder / "gateway.db", allowed_hosts=allowed_hosts
    )
    app = make_gateway(store, registry, settings)
    join(app, store, registry)
    runner = Runner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    host, bound = runner.addresses[0][:2]
    running = Gateway(store, registry, mine, f"http://{host}:{bound}", key)
    try:
        yield running
    finally:
        await running.close()
        await runner.cleanup()
        await store.close()


# --- what lies between a worker and its gateway ---------------------------------------------------

# direction, number of the frame on this connection, its text
Policy = Callable[[str, int, str], Awaitable[list[str] | None]]


@asynccontextmanager
async def proxy(url: str, policy: Policy) -> AsyncIterator[str]:
    """Its address. policy: what is sent on instead of a frame; None: both sides are cut off."""

    async def carry(source: Any, target: Any, direction: str) -> None:
        n = 0
        async for message in source:
            if message.type is not aiohttp.WSMsgType.TEXT:
                return
            instead = await policy(direction, n, message.data)
            n += 1
            if instead is None:
                return
            for line in instead:
                await target.send_str(line)

    async def handle(request: web.Request) -> web.StreamResponse:
        headers = {"Authorization": request.headers["Authorization"]}
        async with aiohttp.ClientSession() as session:
            there = await session.ws_connect(url + PATH, headers=headers, max_msg_size=0)
            here = web.WebSocketResponse(max_msg_size=0)
            await here.prepare(request)
            ways = [
                asyncio.create_task(carry(here, there, "up")),
                asyncio.create_task(carry(there, here, "down")),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            if there.close_code is not None and not here.closed:
                await here.close(code=there.close_code)
            if request.transport is not None:
                request.transport.abort()
        return here

    app = web.Application()
    app.router.add_get(PATH, handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
