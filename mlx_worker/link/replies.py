"""One request's frames: kept until the gateway has them all, and sent again from where it was.

Owns numbers, order and the bound of what is kept. Leaves writing replies to jobs.py and the socket
to session.py. Event loop.

Frames are numbered by `seq` for the request, whatever connection they go over. What was sent stays
for a resume; past MAX_KEPT_BYTES the oldest go, and a gateway that still needs those gets an error
in their place: half of a reply is never joined to another half.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from mlx_worker.wire.link import (
    MAX_FRAME,
    Accepted,
    Chunk,
    DoneFrame,
    ErrorFrame,
    Frame,
    Held,
    Rejected,
)
from mlx_worker.wire.sse import json_bytes

MAX_KEPT_BYTES = 4 * 1024**2
MOST_PENDING_BYTES = 64 * 1024  # of what waits to be sent together
MOST_PENDING = 1000
ROOM_BYTES = 1024  # of a frame, for what is around its data
LONG_BYTES = 1024**2  # of a frame that a bad line may never carry
MOST_TRIES = 3  # to send such a one
AT_ONCE = 2  # chunks that never wait: the opening, and the first token

Json = dict[str, Any]
End = DoneFrame | ErrorFrame | Rejected


class Reply:
    """The frames of one request.

    max_kept_bytes  of chunks, once they were sealed
    on_frame        hears that there is something to send
    """

    def __init__(
        self,
        id: str,
        on_frame: Callable[["Reply"], None] = lambda _: None,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self.id = id
        self.end: End | None = None
        self.is_accepted = False
        self.ended_s: float | None = None
        self.is_end_due = False  # on this connection
        self._is_closed = False
        self._on_frame = on_frame
        self._max_kept_bytes = max_kept_bytes
        self._chunks: deque[tuple[Chunk, int]] = deque()
        self._n_bytes = 0
        self._next = 0  # seq of the next frame to be sealed
        self._pending: list[Json] = []
        self._pending_bytes = 0
        self._sealed_s = float("-inf")
        # of the connection
        self._cursor = 0  # seq of the next frame to be sent
        self._tried = (-1, 0)  # the long frame that was sent last, and how often
        self._is_accept_due = False

    @property
    def held(self) -> Held:
        return Held(id=self.id, seq=self._next - 1)

    # --- what is written

    def accept(self) -> None:
        self.is_accepted = self._is_accept_due = True
        self._on_frame(self)

    def add(self, objects: list[Json], n_bytes: int, now_s: float, coalesce_s: float) -> bool:
        """The next of the reply; whether it waits for more, to be sealed in coalesce_s."""
        if not objects or self.end is not None or self._is_closed:
            return False
        was_waiting = bool(self._pending)
        self._pending += objects
        self._pending_bytes += n_bytes
        is_full = self._pending_bytes > MOST_PENDING_BYTES or len(self._pending) > MOST_PENDING
        if self._next < AT_ONCE or is_full or now_s - self._sealed_s >= coalesce_s:
            self.seal(now_s)
            return False
        return not was_waiting

    def seal(self, now_s: float) -> None:
        """What waits becomes a frame."""
        if not self._pending or self.end is not None:
            return
        chunk, size = Chunk(id=self.id, seq=self._next, data=self._pending), self._pending_bytes
        self._pending, self._pending_bytes, self._sealed_s = [], 0, now_s
        self._next += 1
        self._chunks.append((chunk, size))
        self._n_bytes += size
        while self._n_bytes > self._max_kept_bytes and len(self._chunks) > 1:
            self._n_bytes -= self._chunks.popleft()[1]
        self._on_frame(self)

    def finish(self, make: Callable[[int], End], now_s: float) -> None:
        """The last frame; `make` is given its seq. Nothing comes after it."""
        if self.end is not None:
            return
        self.seal(now_s)
        self.end, self.ended_s = make(self._next), now_s
        self._next += not isinstance(self.end, Rejected)
        self.is_end_due = True
        self._on_frame(self)

    def close(self) -> None:
        """Nobody wants any more of it."""
        self._is_closed = True
        self._chunks.clear()
        self._pending.clear()

    # --- what is sent

    def attach(self, after: int) -> None:
        """On a new connection, or asked for anew: what came after this seq goes out (again)."""
        last = self._next - 1 if isinstance(self.end, DoneFrame | ErrorFrame) else self._next
        self._cursor = min(after + 1, last)
        self._is_accept_due = self.is_accepted
        self.is_end_due = self.end is not None
        self._on_frame(self)

    def take(self, max_bytes: int = MAX_FRAME) -> tuple[Frame, int] | None:
        """The next frame to send, and about its size; None: all is sent so far."""
        if self._is_closed:
            return None
        if self._is_accept_due:
            self._is_accept_due = False
            return Accepted(id=self.id), 0
        first = self._chunks[0][0].seq if self._chunks else self._cursor
        if self._cursor < first:
            return self._lost("what was written meanwhile is too long to be kept; ask anew")
        if self._chunks and self._cursor <= self._chunks[-1][0].seq:
            chunk, size = self._chunks[self._cursor - first]
            if size > max_bytes - ROOM_BYTES:
                return self._lost("the reply is longer than a message of the link may be")
            if size > LONG_BYTES and self._is_hopeless():
                return self._lost("the connection broke each time that it was sent")
            self._cursor += 1
            return chunk, size
        if self.is_end_due and self.end is not None:
            self.is_end_due = False
            self._cursor = self._next
            return self.end, 0
        return None

    def _is_hopeless(self) -> bool:
        """Whether the next frame was sent too often already; it counts as sent once more."""
        seq, n = self._tried
        self._tried = (self._cursor, n + 1 if seq == self._cursor else 1)
        return self._tried[1] > MOST_TRIES

    def _lost(self, why: str) -> tuple[Frame, int]:
        self.end = ErrorFrame(
            id=self.id, seq=self._cursor, code="reply_lost", message=why, status=500
        )
        self._next = self._cursor + 1
        self._chunks.clear()
        self._pending.clear()
        self._n_bytes, self.is_end_due, self._cursor = 0, False, self._next
        return self.end, 0


def size_of(objects: list[Json]) -> int:
    """Bytes of such data as it is sent."""
    return len(json_bytes(objects))
