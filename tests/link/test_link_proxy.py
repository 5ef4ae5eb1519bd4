"""A proxy before the gateway that delays, swallows, doubles or cuts what passes, mid-frame too."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from mlx_worker.wire.link import Pong, Received
from tests.link.switchboard import MS, TIMES, Line, Script, id_of, linked, switchboard, text_of

HARM_AFTER_BYTES = 600  # behind the handshake
PIECE = 512


class Proxy:
    """Does one kind of harm, now and then, in both directions."""

    def __init__(self, url: str, kind: str, chance: random.Random) -> None:
        self.port = int(url.split(":")[2].partition("/")[0])
        self.kind = kind
        self.chance = chance
        self.n_harmed = 0
        self.is_harming = True

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ahead, behind = await asyncio.open_connection("127.0.0.1", self.port)
        pumps = [
            asyncio.create_task(self.pump(reader, behind)),
            asyncio.create_task(self.pump(ahead, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (*pumps, behind.transport, writer.transport):
                one.abort() if isinstance(one, asyncio.Transport) else one.cancel()  # type: ignore[union-attr]

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        n_bytes = 0
        with suppress(OSError):
            while piece := await reader.read(PIECE):
                n_bytes += len(piece)
                if self.is_harming and n_bytes > HARM_AFTER_BYTES and self.chance.random() < 0.08:
                    self.n_harmed += 1
                    piece = await self.harmed(piece)
                    if piece is None:
                        return
                writer.write(piece)
                await writer.drain()

    async def harmed(self, piece: bytes) -> bytes | None:
        match self.kind:
            case "delays":
                await asyncio.sleep(self.chance.uniform(0, 40 * MS))
                return piece
            case "swallows":
                return b""
            case "doubles":
                return piece + piece
            case "truncates":
                return piece[: len(piece) // 2]
            case _:
                return None  # cuts


@asynccontextmanager
async def through(url: str, kind: str, seed: int) -> AsyncIterator[tuple[str, Proxy]]:
    proxy = Proxy(url, kind, random.Random(seed))
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    try:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/ws/worker", proxy
    finally:
        server.close()


class Gateway:
    """Asks for some streams, and takes what comes until all have ended."""

    def __init__(self, wanted: dict[str, int]) -> None:
        self.wanted = wanted
        self.got: dict[str, list[Any]] = {id: [] for id in wanted}
        self.ended: set[str] = set()

    async def serve(self, line: Line) -> None:
        """One connection, as long as it lasts."""
        held = {one.id for one in line.hello.resume}
        live = [id for id in self.wanted if id not in self.ended]
        await line.welcome({id: len(self.got[id]) - 1 for id in live if id in held})
        for id in live:
            if id not in held:
                assert not self.got[id], "it forgot what it had begun"
                await line.ask(id, f"count {self.wanted[id]}")
        while len(self.ended) < len(self.wanted):
            frame = await line.came.get()
            if frame is None:
                return
            if frame.type == "ping":
                await line.say(Pong())
            elif frame.type in ("chunk", "done"):
                await self.take(line, frame)

    async def take(self, line: Line, frame: Any) -> None:
        assert frame.seq == len(self.got[frame.id]), "lost or doubled"
        self.got[frame.id].append(frame)
        if frame.type == "done":
            self.ended.add(frame.id)
            await line.say(Received(id=frame.id))


@pytest.mark.parametrize("kind", ["delays", "swallows", "doubles", "truncates", "cuts"])
async def test_nothing_is_lost_doubled_or_mixed_whatever_a_proxy_does(kind: str):
    """Streams come whole, each generated once."""
    engine = Script(pace=0.002)
    times = replace(TIMES, ping=30 * MS, silence=250 * MS, hello=0.3, dial=0.3, grace=30.0)
    async with switchboard() as board, through(board.url, kind, seed=5) as (url, proxy):
        board.is_lenient = True
        gateway = Gateway({id_of(n): 60 + 5 * n for n in range(5)})
        direct, board.url = board.url, url
        async with linked(board, engine, times=times), asyncio.timeout(40):
            while len(gateway.ended) < len(gateway.wanted):
                line = await board.line()
                with suppress(ConnectionError):
                    await gateway.serve(line)
        board.url = direct
        assert proxy.n_harmed > 0
        for id, length in gateway.wanted.items():
            assert text_of(gateway.got[id]) == "".join(f"{n} " for n in range(length))
        assert len(engine.calls) == len(gateway.wanted)
