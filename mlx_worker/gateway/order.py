"""One request at one worker, and what has come of it that its client has not taken yet.

Owns the order of its frames, and that a client which reads slowly holds up nobody: what it leaves
unread is bounded. Leaves what a chunk may hold to wire/relay.py, and which connection frames come
on to desk.py. Event loop; putting in never waits.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from mlx_worker.wire.link import (
    Accepted,
    BrokenLink,
    Chunk,
    DoneFrame,
    EndFrame,
    ErrorFrame,
    Rejected,
    Request,
)
from mlx_worker.wire.relay import BrokenReply, Json, Relay, is_opening
from mlx_worker.wire.sse import sse_event

MAX_UNREAD_BYTES = 1024**2
WORKER_LOST = "worker_lost"
CLIENT_SLOW = "client_too_slow"


@dataclass(frozen=True)
class Pieces:
    """The next events of a stream, ready to be sent."""

    body: bytes


@dataclass(frozen=True)
class Interrupted:
    """The worker's connection is lost; the reply goes on if it comes back in time."""


@dataclass(frozen=True)
class Broken:
    """It has ended without its reply, and not by a word of its worker."""

    code: str
    message: str


News = Pieces | Interrupted | Rejected | DoneFrame | ErrorFrame | Broken


class Order:
    """A request as it was given to one worker.

    request   the frame, which is sent again where it may not have come
    relay     checks what comes, and writes it again; None for a full reply's is the same
    seq       of the last frame of the reply; −1: none yet
    has_said  something of the reply itself has come, so that it can't be begun anew elsewhere
    is_over   nothing more comes of it
    n_given   how often it was sent again
    objects   of a full reply: the one object, once it is here
    """

    def __init__(self, request: Request, relay: Relay, *, is_streamed: bool) -> None:
        self.request = request
        self.seq = -1
        self.is_accepted = False
        self.has_said = False
        self.is_over = False
        self.n_given = 0
        self.objects: list[Json] = []
        self._relay = relay
        self._is_streamed = is_streamed
        self._openings: list[Json] = []
        self._pieces: list[bytes] = []
        self._n_bytes = 0
        self._news: deque[Interrupted | Rejected | DoneFrame | ErrorFrame | Broken] = deque()
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        return self.request.id

    # --- from the worker

    def take(self, frame: Accepted | Rejected | Chunk | EndFrame) -> None:
        """The next frame of it. Raises BrokenLink, BrokenReply."""
        match frame:
            case Accepted():
                self.is_accepted = True
            case Rejected():
                self._refuse(frame)
            case Chunk():
                self._count(frame.seq)
                self._say(self._relay.checked(frame.data))
            case _:
                self._count(frame.seq)
                self._end(frame)

    def interrupt(self) -> None:
        self._tell(Interrupted())

    def fail(self, code: str, message: str) -> None:
        if not self.is_over:
            self.is_over = True
            self._tell(Broken(code, message))

    def _refuse(self, frame: Rejected) -> None:
        if self.seq >= 0:
            raise BrokenLink(f"a request was rejected after chunk {self.seq} of its reply")
        self.is_over = True
        self._tell(frame)

    def _count(self, seq: int) -> None:
        if seq != self.seq + 1:
            raise BrokenLink(f"of a reply, frame {seq} came instead of {self.seq + 1}")
        self.seq = seq

    def _say(self, objects: list[Json]) -> None:
        if not self._is_streamed:
            self.has_said = True
            self.objects += objects
            if len(self.objects) > 1:
                raise BrokenReply(f"no reply: {len(self.objects)} objects, of one")
            return
        self._openings += objects
        if not self.has_said and all(map(is_opening, objects)):
            return  # until more is here, another worker could still take its place
        self.has_said = True
        self._flush()

    def _flush(self) -> None:
        openings, self._openings = self._openings, []
        body = b"".join(map(sse_event, openings))
        if self._n_bytes and self._n_bytes + len(body) > MAX_UNREAD_BYTES:
            self.fail(CLIENT_SLOW, f"{self._n_bytes:,} bytes of the stream were not read")
            return
        self._pieces.append(body)
        self._n_bytes += len(body)
        self._changed.set()

    def _end(self, frame: EndFrame) -> None:
        if isinstance(frame, DoneFrame):
            self._relay.end(frame)
            if self._openings:
                self._flush()
        self.is_over = True
        self._tell(frame)

    def _tell(self, news: Interrupted | Rejected | DoneFrame | ErrorFrame | Broken) -> None:
        self._news.append(news)
        self._changed.set()

    # --- to the client

    async def next(self) -> News:
        """What has come, in its order; waits until something has."""
        while not self._pieces and not self._news:
            self._changed.clear()
            await self._changed.wait()
        if self._pieces:
            body, self._pieces, self._n_bytes = b"".join(self._pieces), [], 0
            return Pieces(body)
        return self._news.popleft()
