"""A line between worker and gateway that carries little: long frames pass, or are given up."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.gateway.fleet import QUICK, gateway, proxy
from tests.gateway.test_through import LINKED, linked
from tests.link.switchboard import Script

NARROW = 64 * 1024
A_SECOND = 10 * 1024**2
ANY = ("127.0.0.1",)  # at any port
IMPATIENT = 0.2  # s that a peer may leave what is sent to it unread
LONG = "x " * (5 * 1024**2)
BODY: dict[str, Any] = {
    "model": "gemma-4",
    "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "count 8"}],
}


@asynccontextmanager
async def narrow(url: str) -> AsyncIterator[str]:
    """The address of a line on which A_SECOND bytes pass, and little is on its way."""
    host, port = url.removeprefix("http://").split(":")

    async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(NARROW):
            await asyncio.sleep(len(data) / A_SECOND)
            target.write(data)
            await target.drain()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = socket.socket()
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW)
        there.setblocking(False)
        await asyncio.get_running_loop().sock_connect(there, (host, int(port)))
        far_reader, far_writer = await asyncio.open_connection(sock=there)
        ways = [
            asyncio.create_task(carry(reader, far_writer)),
            asyncio.create_task(carry(far_reader, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (writer, far_writer):
            end.transport.abort()

    here = socket.socket()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW)
    here.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(handle, sock=here)
    try:
        yield f"http://127.0.0.1:{here.getsockname()[1]}"
    finally:
        server.close()


async def test_a_long_request_passes_over_a_narrow_line(tmp_path: Path):
    """It is not taken for a worker that reads nothing."""
    times = replace(QUICK, drain=IMPATIENT, grace=5.0)
    async with gateway(tmp_path, times, allowed_hosts=ANY) as hub, narrow(hub.url) as url:
        async with linked(hub, Script(), url):
            reply = await hub.client.chat(body=BODY)
            assert (reply.status, reply.text) == (200, "0 1 2 3 4 5 6 7 ")


async def test_a_long_reply_passes_over_a_narrow_line(tmp_path: Path):
    """It is not taken for a gateway that reads nothing."""
    body = {**BODY, "messages": [{"role": "user", "content": f"long 10 {1024**2}"}]}
    times = replace(LINKED, drain=IMPATIENT)
    patient = replace(QUICK, grace=5.0)
    async with gateway(tmp_path, patient, allowed_hosts=ANY) as hub, narrow(hub.url) as url:
        async with linked(hub, Script(), url, times=times):
            reply = await hub.client.chat(body=body)
            assert (reply.status, len(reply.text)) == (200, 10 * 1024**2)


async def test_a_request_that_breaks_every_connection_is_given_up(tmp_path: Path):
    """Its client is told, instead of waiting for ever."""

    async def policy(way: str, n: int, text: str) -> list[str] | None:
        return None if '"request"' in text[:200] else [text]

    async with gateway(tmp_path, replace(QUICK, grace=5.0)) as hub, proxy(hub.url, policy) as url:
        async with linked(hub, Script(), url):
            reply = await hub.client.chat(body={**BODY, "messages": BODY["messages"][1:]})
            assert (reply.status, reply.code) == (502, "worker_lost")


async def test_a_reply_that_breaks_every_connection_is_given_up(tmp_path: Path):
    """Its client is told, instead of waiting for ever."""

    async def policy(way: str, n: int, text: str) -> list[str] | None:
        return None if len(text) > 1024**2 else [text]

    body = {**BODY, "messages": [{"role": "user", "content": f"long 2 {1024**2}"}]}
    async with gateway(tmp_path, replace(QUICK, grace=5.0)) as hub, proxy(hub.url, policy) as url:
        async with linked(hub, Script(), url):
            reply = await hub.client.chat(body=body)
            assert (reply.status, reply.code) == (500, "reply_lost")


async def test_what_a_worker_gave_up_while_it_was_welcomed_is_lost(tmp_path: Path):
    """The gateway took it to go on; nothing would ever come of it."""
    is_cut = False
    engine = Script()
    engine.gate.clear()
    engine.held_from = 2

    async def policy(way: str, n: int, text: str) -> list[str] | None:
        nonlocal is_cut
        if way == "down" and is_cut and n == 0:
            await asyncio.sleep(0.4)  # the worker gives up meanwhile
        if engine.n_running and not is_cut:
            is_cut = True
            return None
        return [text]

    times = replace(LINKED, grace=0.2)
    async with gateway(tmp_path, replace(QUICK, ping=0.05, grace=5.0)) as hub:
        async with proxy(hub.url, policy) as url, linked(hub, engine, url, times=times):
            body = {**BODY, "messages": BODY["messages"][1:]}
            async with asyncio.timeout(5):
                reply = await hub.client.chat(body=body)
            assert (reply.status, reply.code) == (502, "worker_lost")


async def test_what_a_worker_gave_up_before_it_came_back_is_lost(tmp_path: Path):
    """Nobody is told that it was answered before: it wasn't."""
    cuts = 0
    engine = Script()
    engine.gate.clear()
    engine.held_from = 2

    async def policy(way: str, n: int, text: str) -> list[str] | None:
        nonlocal cuts
        if way == "up" and n == 0 and cuts == 1:
            cuts = 2
            await asyncio.sleep(0.3)  # of this connection the gateway hears after the grace
            return None
        if engine.n_running and cuts == 0:
            cuts = 1
            return None
        return [text]

    times = replace(LINKED, grace=0.15)
    async with gateway(tmp_path, replace(QUICK, ping=0.05, grace=5.0)) as hub:
        async with proxy(hub.url, policy) as url, linked(hub, engine, url, times=times):
            body = {**BODY, "messages": BODY["messages"][1:]}
            async with asyncio.timeout(5):
                reply = await hub.client.chat(body=body)
            assert (reply.status, reply.code) == (502, "worker_lost")
