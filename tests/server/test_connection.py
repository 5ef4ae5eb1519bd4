"""Connections: how many there are, and who makes room."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web

from mlx_worker.http import connection
from tests.server.local import ECHO, JSON, Local, lines, serving

MOST = 4


@asynccontextmanager
async def opened(local: Local, n: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """n connections on which nothing is sent."""
    async with AsyncExitStack() as stack:
        readers = []
        for _ in range(n):
            reader, writer = await asyncio.open_connection(local.host, local.port)
            stack.callback(writer.close)
            readers.append(reader)
        yield readers


async def test_idle_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch):
    """The oldest idle one goes. A few hundred used to end the worker for everyone, for good."""
    monkeypatch.setattr(connection, "MOST_CONNECTIONS", MOST)
    async with serving() as local, opened(local, 5 * MOST) as readers:
        assert (await local.get("/health")).status == 200
        async with asyncio.timeout(5):
            assert await readers[0].read() == b""


async def test_a_request_in_progress_is_not_closed_for_a_newcomer(monkeypatch: pytest.MonkeyPatch):
    """Where all are busy, the newcomer is the one to go."""
    monkeypatch.setattr(connection, "MOST_CONNECTIONS", 2)
    gate, busy = asyncio.Event(), asyncio.Semaphore(0)

    async def wait(_: web.Request) -> web.Response:
        busy.release()
        await gate.wait()
        return web.Response()

    async with serving(routes=[*ECHO, web.post("/wait", wait)]) as local:
        head = ("POST /wait HTTP/1.1", f"Host: 127.0.0.1:{local.port}", JSON, "Content-Length: 0")
        asked = [asyncio.create_task(local.send(lines(*head))) for _ in range(2)]
        async with asyncio.timeout(5):
            await busy.acquire()
            await busy.acquire()
            async with opened(local, 1) as (newcomer,):
                assert await newcomer.read() == b""
        gate.set()
        assert [(await one).status for one in asked] == [200, 200]


@pytest.mark.parametrize(
    ("n_files", "most"), [(256, 64), (100_000, 1000), (resource.RLIM_INFINITY, 1000)]
)
def test_the_limit_on_open_files_leaves_room(
    monkeypatch: pytest.MonkeyPatch, n_files: int, most: int
):
    """For files that are no connections, and for those being accepted."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (n_files, n_files))
    assert connection.most_connections() == most
