"""The two endpoints that write replies, on real sockets with a scripted engine."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from mlx_worker.errors import EngineDied, InvalidParameter, Overloaded, WorkerError
from mlx_worker.http import stream as bodies
from mlx_worker.records import Call, Done, Progress, ReplyEvent, Started, Text, Timing, Usage
from mlx_worker.server.chat import ROUTES
from tests.server.local import JSON, Local, ScriptedEngine, lines, serving

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
DONE = Done("stop", Usage(3, 2, 1), Timing(30.0, 10.0, 20.0, 2, 1, 2, 2, 4, 1))
STARTED = Started("demo", 3, 5.0)


class ReplyingEngine(ScriptedEngine):
    """Writes "Hi there" to whatever it is asked.

    obstacle raised before it starts; breaking: after the first text
    gate     what it waits for after the first text, which comes n_texts times
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.is_asked = asyncio.Event()
        self.obstacle: WorkerError | None = None
        self.breaking: WorkerError | None = None
        self.text, self.n_texts = "Hi", 1
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_left = asyncio.Event()

    async def submit(self, call: Call) -> AsyncGenerator[Started | ReplyEvent, None]:
        self.calls.append(call)
        self.is_asked.set()
        if self.obstacle:
            raise self.obstacle
        try:
            yield STARTED
            for choice in range(call.n):
                yield ReplyEvent(choice, Progress(3, 3))
                for _ in range(self.n_texts):
                    yield ReplyEvent(choice, Text((1,), self.text))
                await self.gate.wait()
                if self.breaking:
                    raise self.breaking
                yield ReplyEvent(choice, Text((2,), " there"))
                yield ReplyEvent(choice, DONE)
        except (GeneratorExit, asyncio.CancelledError):
            self.is_left.set()
            raise


@asynccontextmanager
async def replying(**settings: Any) -> AsyncIterator[tuple[Local, ReplyingEngine]]:
    engine = ReplyingEngine()
    async with serving(engine, ROUTES, **settings) as local:
        yield local, engine


async def ask(local: Local, body: Any, path: str = CHAT) -> tuple[int, Any, dict[str, str]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{local.port}{path}", json=body) as reply,
    ):
        return reply.status, await reply.json(), {k.lower(): v for k, v in reply.headers.items()}


async def stream(local: Local, body: dict[str, Any], path: str = CHAT) -> list[Any]:
    """The events of a stream; the last one is its [DONE]."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://127.0.0.1:{local.port}{path}", json={**body, "stream": True}
        ) as reply,
    ):
        assert reply.status == 200
        assert reply.content_type == "text/event-stream"
        text = await reply.text()
    data = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]] + ["[DONE]"]


async def metric(local: Local, name: str) -> float:
    text = (await local.get("/metrics")).body.decode()
    found = [line.split()[-1] for line in text.splitlines() if line.startswith(name)]
    assert found, f"{name} is not in /metrics"
    return float(found[0])


@pytest.mark.parametrize(
    ("path", "body", "content"),
    [
        (CHAT, HELLO, lambda choice: choice["message"]["content"]),
        (COMPLETION, {"prompt": "Hello"}, lambda choice: choice["text"]),
    ],
)
async def test_a_reply_comes_whole(path: str, body: Any, content: Callable[[Any], str]):
    """With usage, what it took, and the request's id in body and header."""
    async with replying() as (local, _):
        status, reply, headers = await ask(local, body, path)
    assert status == 200
    assert content(reply["choices"][0]) == "Hi there"
    assert reply["usage"]["completion_tokens"] == 2
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    assert reply["pendra"]["timing"]["draft_acceptance_rate"] == 0.25
    assert reply["pendra"]["request_id"] == headers["x-request-id"]
    assert "decode;dur=20" in headers["server-timing"]


async def test_a_reply_comes_in_pieces():
    """As they are written; usage and timing come with the last."""
    async with replying() as (local, _):
        *chunks, _done = await stream(local, HELLO)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "Hi there"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["total_tokens"] == 5
    assert chunks[-1]["pendra"]["timing"]["draft_acceptance_rate"] == 0.25


async def test_a_piece_is_sent_when_it_is_written():
    """Not when the next one is."""
    async with replying() as (local, engine):
        engine.gate.clear()
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"http://127.0.0.1:{local.port}{CHAT}", json={**HELLO, "stream": True}
            ) as reply,
        ):
            async with asyncio.timeout(5):
                while b'"Hi"' not in await reply.content.readline():
                    pass
            engine.gate.set()
            assert (await reply.text()).rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("32 requests wait already", retry_after_s=7), 503),
        (InvalidParameter("top_p", 7, "at most 1"), 400),
        (EngineDied("no progress for 120 s"), 500),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_is_wrong_before_the_start_has_a_status(
    error: WorkerError, status: int, is_stream: bool
):
    """Also where a stream was asked for."""
    async with replying() as (local, engine):
        engine.obstacle = error
        found, reply, headers = await ask(local, {**HELLO, "stream": is_stream})
    assert found == status
    assert reply["error"]["message"] == str(error)
    assert headers.get("retry-after") == ("7" if status == 503 else None)


async def test_what_breaks_in_a_stream_is_said_in_it():
    """Then the stream ends as streams do."""
    async with replying() as (local, engine):
        engine.breaking = EngineDied("no progress for 120 s")
        events = await stream(local, HELLO)
        assert events[-2]["error"]["code"] == "engine_died"
        assert await metric(local, 'mlx_worker_requests_total{endpoint="chat",outcome="failed"}')


async def test_what_breaks_in_a_whole_reply_has_a_status():
    """Nothing was sent yet."""
    async with replying() as (local, engine):
        engine.breaking = EngineDied("no progress for 120 s")
        status, reply, _ = await ask(local, HELLO)
    assert (status, reply["error"]["code"]) == (500, "engine_died")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_goes_is_noticed(is_stream: bool):
    """Its slot is free, it counts as cancelled, and nothing else changes."""
    async with replying() as (local, engine):
        engine.gate.clear()
        body = json.dumps({**HELLO, "stream": is_stream}).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{local.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        _, writer = await asyncio.open_connection(local.host, local.port)
        writer.write(head.encode() + body)
        await engine.is_asked.wait()
        writer.transport.abort()
        async with asyncio.timeout(5):
            await engine.is_left.wait()
        assert await metric(local, "mlx_worker_running") == 0
        cancelled = 'mlx_worker_requests_total{endpoint="chat",outcome="cancelled"}'
        assert await metric(local, cancelled) == 1


async def test_a_client_that_never_reads_its_stream_is_let_go(monkeypatch: pytest.MonkeyPatch):
    """Once the connection holds no more; its slot is free, and it counts as cancelled."""
    monkeypatch.setattr(bodies, "UNREAD_S", 0.1)
    async with replying() as (local, engine):
        engine.text = "endless " * 10_000
        engine.n_texts = 1_000_000
        body = json.dumps({**HELLO, "stream": True}).encode()
        _, writer = await asyncio.open_connection(local.host, local.port, limit=1024)
        writer.write(head(local, len(body)) + body)
        async with asyncio.timeout(10):
            await engine.is_left.wait()
        assert await metric(local, "mlx_worker_running") == 0
        cancelled = 'mlx_worker_requests_total{endpoint="chat",outcome="cancelled"}'
        assert await metric(local, cancelled) == 1
        writer.close()


async def test_what_the_body_asks_for_reaches_the_engine():
    """Parsed once, with the request's id and whose it is."""
    async with replying() as (local, engine):
        await ask(local, {**HELLO, "n": 2, "temperature": 0.5, "seed": 7, "speculation": "on"})
    (call,) = engine.calls
    assert call.n == 2
    assert call.sampling == {"temperature": 0.5, "seed": 7}
    assert call.speculation == "on"
    assert call.scope == "local"


def head(local: Local, length: int) -> bytes:
    return lines(
        f"POST {CHAT} HTTP/1.1", f"Host: 127.0.0.1:{local.port}", JSON, f"Content-Length: {length}"
    )


async def test_an_upload_that_breaks_off_is_counted():
    """As one that its client left; it used to be in no figure of the endpoint's."""
    async with replying() as (local, engine):
        _, writer = await asyncio.open_connection(local.host, local.port)
        writer.write(head(local, 1000) + b'{"mess')
        await writer.drain()
        writer.transport.abort()
        cancelled = 'mlx_worker_requests_total{endpoint="chat",outcome="cancelled"}'
        async with asyncio.timeout(5):
            while cancelled not in (await local.get("/metrics")).body.decode():
                pass
        assert engine.calls == []


async def test_an_upload_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch):
    """It used to hold its connection for ever, and a worker that was told to stop for a minute."""
    monkeypatch.setattr(bodies, "UPLOAD_S", 0.05)
    async with replying() as (local, _):
        reply = await local.send(head(local, 1000) + b'{"mess')
        assert (reply.status, reply.code) == (408, "upload_timeout")
        assert await metric(local, "mlx_worker_queued") == 0


async def test_a_long_body_is_read_while_others_are_answered():
    """By another thread; the reply is the same."""
    async with replying() as (local, engine):
        text = "long " * 100_000
        status, _, _ = await ask(local, {"messages": [{"role": "user", "content": text}]})
    assert status == 200
    assert engine.calls[0].messages == ({"role": "user", "content": text},)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": 3}', b"\xff"])
async def test_a_bad_body_is_refused_and_counted(body: bytes):
    """As the client's doing."""
    async with replying() as (local, engine):
        reply = await local.post("Content-Type: application/json", body=body, path=CHAT)
        assert reply.status == 400
        assert reply.code == "invalid_request" or reply.code == "invalid_parameter"
        assert engine.calls == []
        refused = 'mlx_worker_requests_total{endpoint="chat",outcome="refused"}'
        assert await metric(local, refused) == 1
