"""How the local hub sends a file: the range that was asked for, at a rate, with its faults.

Runs on the hub's own loop. A body is sent in small pieces, each only after the kernel has the one
before, so that a cut or a stop is at its byte.
"""

import asyncio
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from tests.hub_faults import Fault

PIECE_BYTES = 16 * 1024
PIECE_S = 0.05  # of a slow body: its pieces are at most this long
FLUSH_S = 0.001
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER on, for 0 s


class Unsatisfiable(ValueError):
    """The range begins behind the file's end: 416."""


@dataclass
class Body:
    """One body under way.

    start, stop  of the file, in bytes
    rate         bytes per second, asked before each piece; None: as fast as the client reads
    count        told the bytes of each piece, just before it is sent
    """

    source: Path
    start: int
    stop: int
    faults: list[Fault]
    rate: Callable[[], float | None]
    count: Callable[[int], None]

    def next_stop(self, sent: int) -> Fault | None:
        """The first fault that stands at a byte from here on, before the end."""
        ahead = range(sent, self.stop - self.start)
        standing = [f for f in self.faults if f.after_bytes in ahead]
        return min(standing, key=lambda f: f.after_bytes or 0, default=None)

    def read(self, at: int, n: int) -> bytes:
        with self.source.open("rb") as f:
            f.seek(at)
            data = bytearray(f.read(n))
        for fault in self.faults:
            where = -1 if fault.kind != "flip" or fault.offset is None else fault.offset - at
            if 0 <= where < len(data):
                data[where] ^= 0xFF
        return bytes(data)

    def bytes_per_s(self) -> float | None:
        rates = [f.bytes_per_s for f in self.faults if f.kind == "slow"] + [self.rate()]
        return min((r for r in rates if r is not None), default=None)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(start, stop) of a Range header; None: the whole file, as for what we do not understand.

    Raises Unsatisfiable.
    """
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if not found or found[0] == "bytes=-":
        return None
    first, last = found[1], found[2]
    if not first:
        if int(last) == 0:
            raise Unsatisfiable(header)
        return max(0, size - int(last)), size
    if int(first) >= size:
        raise Unsatisfiable(header)
    stop = min(size, int(last) + 1) if last else size
    return (int(first), stop) if stop > int(first) else None


async def send(request: web.Request, response: web.StreamResponse, body: Body) -> None:
    """Send the headers and the body, or as much of it as its faults allow."""
    length = body.stop - body.start
    response.content_length = length
    await response.prepare(request)
    transport = request.transport
    sent = 0
    while transport is not None and not transport.is_closing():
        fault = body.next_stop(sent)
        end = length if fault is None or fault.after_bytes is None else fault.after_bytes
        if sent < end:
            sent += await _send_piece(transport, response, body, sent, end)
        elif fault is None:
            await response.write_eof()
            return
        elif fault.kind == "stall":
            body.faults.remove(fault)
            await fault.gate.wait()
        else:
            _close(transport, by_reset=fault.kind == "reset")


async def _send_piece(
    transport: asyncio.Transport, response: web.StreamResponse, body: Body, sent: int, end: int
) -> int:
    """Returns the bytes of the piece, which the kernel has."""
    rate = body.bytes_per_s()
    n = min(PIECE_BYTES, end - sent, max(1, int(rate * PIECE_S)) if rate else PIECE_BYTES)
    body.count(n)  # before the client can have them: who has the whole file finds it counted
    await response.write(body.read(body.start + sent, n))
    # aiohttp lets 64 KiB wait, and has no public way to wait for the last of them.
    while transport.get_write_buffer_size() and not transport.is_closing():  # noqa: ASYNC110
        await asyncio.sleep(FLUSH_S)
    # A client that reads as fast as we write would keep the loop from everybody else.
    await asyncio.sleep(n / rate if rate else 0)
    return n


def _close(transport: asyncio.Transport, *, by_reset: bool) -> None:
    """What was flushed reaches the client, except by a reset, which may overtake it."""
    if by_reset:
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        transport.abort()
    else:
        transport.close()
