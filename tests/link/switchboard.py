"""A gateway for the worker's link to dial, which does as it is told and fails on misuse; and an
engine that writes what a script says.

    async with switchboard() as board:
        async with linked(board, engine) as link:
            line = await board.line()          # a connection, once its hello is here
            await line.welcome()
            await line.ask("0" * 32, "hi")
            frame = await line.next("accepted")
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from aiohttp import WSMsgType, web
from pydantic import SecretStr

from mlx_worker.config import GatewaySection
from mlx_worker.errors import ConfigError
from mlx_worker.link.client import Link
from mlx_worker.link.retry import Times
from mlx_worker.records import (
    Call,
    Done,
    Health,
    Platform,
    ReplyEvent,
    ServedModel,
    Settings,
    Started,
    Text,
    Timing,
    Usage,
)
from mlx_worker.wire.link import (
    FROM_WORKER,
    MAX_FRAME,
    PATH,
    BrokenLink,
    Connection,
    Frame,
    Hello,
    PlatformPart,
    Received,
    Request,
    Welcome,
    WorkerFrame,
)

MS = 0.001
WAIT_S = 10.0  # that a test waits for what must come
KEY = "mww_0123456789abcdef_" + "k" * 43
TIMES = Times(
    first=10 * MS, most=20 * MS, refused=50 * MS, slow_down=50 * MS, dial=2.0, hello=2.0,
    drain=1.0, grace=2.0, coalesce=20 * MS, look=5 * MS, flush=1.0,
)  # fmt: skip
TALK = {"status", "ping", "pong"}  # frames that come whenever they like


def id_of(n: int) -> str:
    return f"{n:032x}"


class Line:
    """One connection of a worker, seen from the gateway."""

    def __init__(self, socket: web.WebSocketResponse, request: web.Request) -> None:
        self.socket = socket
        self.headers = dict(request.headers)
        self.frames: Connection[WorkerFrame] = Connection(FROM_WORKER, 0.0)
        self.hello = Hello(worker_id="?", epoch="?", version="?")
        self.statuses: list[Any] = []
        self.came: asyncio.Queue[WorkerFrame | None] = asyncio.Queue()
        self.is_over = asyncio.Event()
        self.is_listening = asyncio.Event()
        self.is_listening.set()

    async def read(self) -> None:
        """Everything that comes, checked."""
        async for message in self.socket:
            assert message.type is WSMsgType.TEXT, message
            frame = self.frames.read(message.data, 0.0)
            assert frame is not None, "a frame came twice"
            if frame.type == "status":
                self.statuses.append(frame)
            await self.came.put(frame)
            await self.is_listening.wait()

    async def say(self, frame: Frame) -> None:
        await self.socket.send_str(self.frames.write(frame))

    async def welcome(self, resume: Mapping[str, int] | None = None, **fields: Any) -> None:
        platform = PlatformPart(**fields.pop("platform", {}))
        given = {"name": "Mac of Olga", "platform": platform, "resume": dict(resume or {})}
        await self.say(Welcome(**{**given, **fields}))

    async def ask(self, id: str, text: str = "hi", *, after: int = -1, **body: Any) -> None:
        body = {"messages": [{"role": "user", "content": text}], "stream": True, **body}
        scope, endpoint = "scope", "chat"
        deadline_ms = body.pop("deadline_ms", None)
        await self.say(
            Request(
                id=id, endpoint=endpoint, body=body, cache_scope=scope, after=after,
                deadline_ms=deadline_ms,
            )
        )  # fmt: skip

    async def next(self, *types: str) -> Any:
        """The next frame that isn't talk, which must be one of these."""
        async with asyncio.timeout(WAIT_S):
            while True:
                frame = await self.came.get()
                assert frame is not None, f"the line ended before {types}"
                if frame.type in types:
                    return frame
                assert frame.type in TALK, f"{frame} came, {types} were expected"

    async def reply(self, id: str, after: int = -1, *, is_confirmed: bool = True) -> list[Any]:
        """The rest of a reply, in order, to its end."""
        frames: list[Any] = []
        while not frames or frames[-1].type not in ("done", "error", "rejected"):
            frame = await self.next("accepted", "chunk", "done", "error", "rejected")
            assert frame.id == id
            if frame.type in ("chunk", "done", "error"):
                after += 1
                assert frame.seq == after, f"{frame.seq} came, {after} was expected"
            frames.append(frame)
        if is_confirmed:
            await self.say(Received(id=id))
        return frames

    async def ended(self) -> int | None:
        """The code that the worker closed with."""
        async with asyncio.timeout(WAIT_S):
            await self.is_over.wait()
        return self.socket.close_code

    def cut(self) -> None:
        """Without a word, as a cable is."""
        transport = self.socket._req.transport if self.socket._req else None
        if transport:
            transport.abort()


Answer = Callable[[web.Request], web.StreamResponse | None]


class Switchboard:
    """Where workers dial. Each connection is a Line; `answers` are for handshakes, in order."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: list[Answer] = []
        self.dials: list[float] = []
        self.failure: BaseException | None = None
        self.is_lenient = False  # what is wrong with frames is the test's own doing
        self._lines: asyncio.Queue[Line] = asyncio.Queue()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.dials.append(asyncio.get_running_loop().time())
        if self.answers and (answer := self.answers.pop(0)(request)) is not None:
            return answer
        socket = web.WebSocketResponse(max_msg_size=MAX_FRAME, compress=False, timeout=1.0)
        await socket.prepare(request)
        line = Line(socket, request)
        try:
            message = await socket.receive()
            if message.type is WSMsgType.TEXT:
                hello = line.frames.read(message.data, 0.0)
                assert isinstance(hello, Hello)
                line.hello = hello
                await self._lines.put(line)
                await line.read()
        except (AssertionError, BrokenLink) as wrong:
            if not self.is_lenient:
                self.failure = wrong
            with suppress(ConnectionError):
                await socket.close(code=4400)
        finally:
            line.came.put_nowait(None)
            line.is_over.set()
        return socket

    async def line(self) -> Line:
        """The next connection; its hello is here, and a welcome is due."""
        async with asyncio.timeout(WAIT_S):
            return await self._lines.get()

    async def welcomed(self, resume: Mapping[str, int] | None = None, **fields: Any) -> Line:
        line = await self.line()
        await line.welcome(resume, **fields)
        return line


@asynccontextmanager
async def switchboard() -> AsyncIterator[Switchboard]:
    board = Switchboard()
    app = web.Application()
    app.router.add_get(PATH, board.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    board.url = f"ws://127.0.0.1:{runner.addresses[0][1]}{PATH}"
    try:
        yield board
    finally:
        await runner.cleanup()
    if board.failure:
        raise board.failure


MODELS = [
    {
        "id": "gemma-4", "is_loaded": True, "context_limit": 8192, "target_bytes": 5_000_000,
        "draft": "gemma-4-assistant", "draft_bytes": 70_000, "draft_problem": None,
        "measured": None,
    }
]  # fmt: skip


class Script:
    """An engine that answers a chat by its last word: `count N` writes N pieces.

    pace        seconds between pieces; gate: pieces from `held_from` on wait for it
    n_begun     of each prompt, how often it was generated
    """

    def __init__(self, pace: float = 0.0) -> None:
        self.pace = pace
        self.gate = asyncio.Event()
        self.gate.set()
        self.held_from = 0
        self.error: Exception | None = None  # before Started
        self.late_error: Exception | None = None  # after the first piece
        self.calls: list[Call] = []
        self.cancelled: list[str] = []
        self.n_running = 0
        self.platform = Platform()
        self.in_force = Settings()
        self.revision = 0
        self.problem: str | None = None
        self.facts: list[dict[str, Any]] = [dict(model) for model in MODELS]
        self.n_waiting = 0

    async def submit(self, call: Call) -> AsyncGenerator[Started | ReplyEvent, None]:
        self.calls.append(call)
        if self.error:
            raise self.error
        self.n_running += 1
        is_done = False
        try:
            pieces = self.pieces(call)
            yield Started("gemma-4", 7, 1.5)
            for n, piece in enumerate(pieces):
                if n >= self.held_from:
                    await self.gate.wait()
                if self.pace:
                    await asyncio.sleep(self.pace)
                yield ReplyEvent(0, Text((n,), piece))
                if self.late_error:
                    raise self.late_error
            usage = Usage(7, len(pieces), cached_tokens=2)
            yield ReplyEvent(0, Done("stop", usage, Timing(9.0, 5.0, 4.0, 3, 1, 2, 3, 4, 3)))
            is_done = True
        finally:
            self.n_running -= 1
            if not is_done:
                self.cancelled.append(call.id)

    def pieces(self, call: Call) -> list[str]:
        assert call.messages
        words = str(call.messages[-1]["content"]).split()
        if words[0] == "count":
            return [f"{n} " for n in range(int(words[1]))]
        if words[0] == "long":
            return ["x" * int(words[2])] * int(words[1])
        return ["Once ", "upon ", "a ", "time"]

    def models(self) -> Sequence[ServedModel]:
        return [ServedModel(model["id"], 0) for model in self.facts]

    def health(self) -> Health:
        return Health(True)

    def status(self) -> dict[str, Any]:
        asyncio.get_running_loop()
        return {
            "state": "ready",
            "queue": {"running": self.n_running, "waiting": self.n_waiting, "limit": 32},
            "memory": {"active_bytes": 5, "peak_bytes": 6},
            "settings": {
                "speculative_decoding": self.in_force.speculative_decoding,
                "kv_prefix_cache": self.in_force.kv_prefix_cache,
                "run_requests_together": self.in_force.run_requests_together,
            },
            "settings_revision": self.revision,
            "settings_problem": self.problem,
            "platform": {"revision": self.platform.revision},
            "models": self.facts,
        }

    def settings(self) -> Settings:
        return self.in_force

    async def change(self, changes: Mapping[str, Any], revision: int | None = None) -> Settings:
        await asyncio.sleep(0)
        if self.problem:
            raise ConfigError(self.problem)
        revision = self.revision + 1 if revision is None else revision
        if revision > self.revision:
            self.in_force, self.revision = replace(self.in_force, **changes), revision
        return self.in_force

    def set_platform(self, platform: Platform) -> None:
        self.platform = platform

    async def refresh_models(self) -> None: ...

    async def forget(self, id: str) -> None:
        raise AssertionError(f"a gateway removes no models: {id}")


@asynccontextmanager
async def linked(board: Switchboard, engine: Script, **options: Any) -> AsyncIterator[Link]:
    gateway = GatewaySection(url=board.url, key=SecretStr(KEY))
    link = Link(engine, gateway, **{"times": TIMES, **options})
    link.start()
    try:
        yield link
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await link.close()


def text_of(frames: Sequence[Any]) -> str:
    """What the chunks of a reply say."""
    pieces: list[str] = []
    for frame in frames:
        for one in frame.data if frame.type == "chunk" else ():
            assert one["object"] == "chat.completion.chunk"
            pieces += [choice["delta"].get("content") or "" for choice in one["choices"]]
    return "".join(pieces)


async def until(is_so: Callable[[], bool]) -> None:
    """Looked at every few ms; for what nobody tells of."""
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(2 * MS)
