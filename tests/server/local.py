"""A real server on a free port, an engine that fails on misuse, and ways to talk to both."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from mlx_worker.config import ServerSection
from mlx_worker.errors import UnknownModel
from mlx_worker.models.hub import Hub
from mlx_worker.models.store import Store
from mlx_worker.records import Call, Health, Platform, ReplyEvent, ServedModel, Settings, Started
from mlx_worker.server.app import Runner, make_app
from mlx_worker.server.keys import SCOPE

KEY = "mwk-0123456789abcdef"
KEYED: dict[str, Any] = {"api_key": KEY}
BEARER = f"Authorization: Bearer {KEY}"
PAGE = "https://chat.example.com"  # an origin that tests list
JSON = "Content-Type: application/json"
MODELS = (
    ServedModel("gemma-4", 1_700_000_000, context_tokens=8192, draft="gemma-4-assistant"),
    ServedModel("org/other", 1_700_000_001, is_loaded=False),
)
WELL = Health(True)


class ScriptedEngine:
    """Says what it was given, on an event loop only, and writes no replies."""

    def __init__(self, status: dict[str, Any] | None = None, health: Health = WELL) -> None:
        self.facts = status or {}
        self.state = health
        self.error: Exception | None = None
        self.in_force = Settings()
        self.refusal: Exception | None = None  # of a change of settings

    def submit(self, call: Call) -> AsyncGenerator[Started | ReplyEvent, None]:
        raise AssertionError(f"nobody here may ask for a reply: {call}")

    def models(self) -> Sequence[ServedModel]:
        return self._on_loop(MODELS)

    def health(self) -> Health:
        return self._on_loop(self.state)

    def status(self) -> dict[str, Any]:
        if self.error:
            raise self.error
        return self._on_loop(self.facts)

    def settings(self) -> Settings:
        return self._on_loop(self.in_force)

    async def change(self, changes: Mapping[str, Any], revision: int | None = None) -> Settings:
        if self.refusal:
            raise self.refusal
        self.in_force = replace(self.in_force, **changes)
        return self.in_force

    def set_platform(self, platform: Platform) -> None:
        raise AssertionError(f"no gateway is here: {platform}")

    async def refresh_models(self) -> None:
        pass

    async def forget(self, id: str) -> None:
        if all(model.id != id for model in MODELS):
            raise UnknownModel(id, [model.id for model in MODELS])

    def _on_loop(self, value: Any) -> Any:
        asyncio.get_running_loop()
        return value


@dataclass
class Reply:
    """What came back. Header names are in lower case; one that came twice has both values."""

    status: int
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of an error; the whole shape is checked on the way."""
        content = self.json()
        assert self.headers["content-type"] == "application/json; charset=utf-8"
        assert content.keys() == {"error"}
        assert content["error"].keys() == {"message", "type", "param", "code"}
        return content["error"]["code"]


async def echo(request: web.Request) -> web.Response:
    """Reads the whole body, says how long it was."""
    body = await request.read()
    return web.json_response({"length": len(body), "scope": request[SCOPE]})


ECHO = [web.route(method, "/echo", echo) for method in ("POST", "PATCH", "PUT", "DELETE")]


class Local:
    """One running server; talks to it through a socket, byte by byte where asked."""

    def __init__(self, engine: ScriptedEngine, runner: Runner) -> None:
        self.engine = engine
        self.app = runner.app
        self.host, self.port = runner.addresses[0][:2]

    async def get(self, path: str = "/v1/models", *headers: str, host: str | None = None) -> Reply:
        return await self.ask("GET", path, *headers, host=host)

    async def post(self, *headers: str, body: bytes = b"{}", path: str = "/echo") -> Reply:
        return await self.ask("POST", path, *headers, body=body)

    async def ask(
        self, method: str, path: str, *headers: str, body: bytes = b"", host: str | None = None
    ) -> Reply:
        """One request. host None: the right one."""
        named = f"Host: {host or f'127.0.0.1:{self.port}'}"
        length = [f"Content-Length: {len(body)}"] if body else []
        head = lines(f"{method} {path} HTTP/1.1", named, *headers, *length)
        return await self.send(head + body, has_body=method != "HEAD")

    async def send(self, *pieces: bytes, has_body: bool = True) -> Reply:
        """Send bytes as they are, and read one reply, whatever it is."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            for piece in pieces:
                writer.write(piece)
            return await read_reply(reader, has_body)
        finally:
            writer.close()

    async def is_closed_after(self, request: bytes) -> bool:
        """Whether the server ends the connection once it has replied."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(request)
        async with asyncio.timeout(5):
            received = await reader.read()
        writer.close()
        return received.startswith(b"HTTP/1.")


@asynccontextmanager
async def serving(
    engine: ScriptedEngine | None = None,
    routes: Iterable[web.AbstractRouteDef] = ECHO,
    store: Store | None = None,
    hub: Hub | None = None,
    budget_bytes: int | None = None,
    link: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Local]:
    """A server for the length of a `with`, on a free port of 127.0.0.1 unless told otherwise."""
    engine = engine or ScriptedEngine()
    section = ServerSection(**{"port": 0, **settings})
    app = make_app(
        engine, section, routes, store=store, hub=hub, budget_bytes=budget_bytes, link=lambda: link
    )
    runner = Runner(app, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, section.host, section.port).start()
        yield Local(engine, runner)
    finally:
        await runner.cleanup()


def lines(*text: str) -> bytes:
    """A request's head: lines as latin-1, then the empty line."""
    return "".join(f"{line}\r\n" for line in (*text, "")).encode("latin-1")


async def read_reply(reader: asyncio.StreamReader, has_body: bool = True) -> Reply:
    status, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()[:-1]
    headers: dict[str, str] = {}
    for line in rest:
        name, _, value = line.partition(": ")
        name = name.lower()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    size = int(headers.get("content-length", "0")) if has_body else 0
    body = await reader.readexactly(size)
    return Reply(int(status.split()[1]), headers, body)
