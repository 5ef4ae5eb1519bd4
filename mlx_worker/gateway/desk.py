"""The requests that one worker has, over all its connections.

Owns which of them go on after a connection was lost, and which are lost with it; and that a frame
of a request which nobody asked for ends a connection, while one that comes late is ignored. Leaves
frames to wire/link.py and the connection to connected.py. Event loop; nothing here waits.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from mlx_worker.gateway.order import WORKER_LOST, Order
from mlx_worker.wire.link import (
    ALREADY_DONE,
    Accepted,
    BrokenLink,
    Cancel,
    Chunk,
    DoneFrame,
    EndFrame,
    ErrorFrame,
    Frame,
    Hello,
    Received,
    Rejected,
    Request,
)
from mlx_worker.wire.relay import WORKER_FAULT

MOST_GIVEN = 5  # times that a request is sent which never comes
MOST_ENDED = 2000  # that are remembered, of each worker
ReplyFrame = Accepted | Rejected | Chunk | EndFrame


class Line(Protocol):
    """Where frames are sent: one open connection."""

    def send(self, frame: Frame) -> None: ...


class Recent:
    """The last few ids."""

    def __init__(self, most: int = MOST_ENDED) -> None:
        self._most = most
        self._ids: OrderedDict[str, None] = OrderedDict()

    def add(self, id: str) -> None:
        self._ids[id] = None
        if len(self._ids) > self._most:
            self._ids.popitem(last=False)

    def __contains__(self, id: str) -> bool:
        return id in self._ids


class Desk:
    """What one worker is at.

    grace_s  that it may be away before its requests are lost
    emptied  told when it has been away for so long

    Next: attach a connection; detach it when it is lost.
    """

    def __init__(self, grace_s: float, emptied: Callable[[], None]) -> None:
        self.pending: dict[str, object] = {}
        self.pending_revision = 0
        self._grace_s = grace_s
        self._emptied = emptied
        self._epoch: str | None = None
        self._line: Line | None = None
        self._orders: dict[str, Order] = {}
        self._ended = Recent()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def n_orders(self) -> int:
        return len(self._orders)

    @property
    def is_attached(self) -> bool:
        return self._line is not None

    def open(self, order: Order) -> None:
        """Give it to the worker, which is connected."""
        self._orders[order.id] = order
        assert self._line is not None, "nobody is there"
        self._line.send(order.request)

    def close(self, order: Order) -> None:
        """Nobody waits for it any more: the worker may stop."""
        if self._forget(order.id) and not order.is_over and self._line is not None:
            self._line.send(Cancel(id=order.id))

    # --- connections

    def attach(self, line: Line, hello: Hello) -> tuple[dict[str, int], list[Request]]:
        """Go on with this connection: what welcome says of requests, and which are sent again."""
        self._stop_timer()
        if self._epoch != hello.epoch:
            self._lose("the worker has started anew")
        self._epoch, self._line = hello.epoch, line
        held = {one.id: one.seq for one in hello.resume}
        for id in held.keys() - self._orders.keys():
            self._ended.add(id)  # welcome doesn't name it; what still comes of it is ignored
        self._lose("the worker no longer has the request", held)
        goes_on = {id: order.seq for id, order in self._orders.items() if id in held}
        return goes_on, self._given_again(held)

    def _given_again(self, held: Collection[str]) -> list[Request]:
        """Those that never came; but one that breaks each connection is not sent for ever."""
        again: list[Request] = []
        for id, order in list(self._orders.items()):
            if id in held:
                continue
            order.n_given += 1
            if order.n_given < MOST_GIVEN:
                again.append(order.request)
            else:
                self._forget(id)
                order.fail(WORKER_LOST, "the connection broke each time that it was sent")
        return again

    def detach(self, line: Line) -> None:
        """The connection is lost, unless another has taken its place."""
        if line is not self._line:
            return
        self._line = None
        for order in list(self._orders.values()):
            order.interrupt()
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._give_up)

    def end(self, message: str) -> None:
        """The worker never comes back."""
        self._line = None
        self._stop_timer()
        self._lose(message)

    def _give_up(self) -> None:
        self._timer = None
        self._lose(f"the worker was not back after {self._grace_s:g} s")
        self._emptied()

    def _lose(self, message: str, held: Mapping[str, int] | None = None) -> None:
        """All of them; or, of a worker that lists what it has, those begun that it hasn't."""
        for id, order in list(self._orders.items()):
            if held is None or (id not in held and order.seq >= 0):
                self._forget(id)
                order.fail(WORKER_LOST, message)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- frames

    def take(self, frame: ReplyFrame) -> None:
        """A frame of some request's reply. Raises BrokenLink: it can't be one."""
        if isinstance(frame, Rejected | DoneFrame | ErrorFrame) and self._line is not None:
            self._line.send(Received(id=frame.id))
        order = self._orders.get(frame.id)
        if order is None:
            if frame.id not in self._ended:
                raise BrokenLink("it answers a request that it was not given")
            return
        if isinstance(frame, ErrorFrame) and frame.code == ALREADY_DONE:
            self._forget(order.id)
            order.fail(WORKER_LOST, "the worker no longer has the request")
            return
        try:
            order.take(frame)
        except BrokenLink:
            self._forget(order.id)
            order.fail(WORKER_FAULT, "the worker's reply broke off: what it sent is no reply")
            raise
        if order.is_over:
            self._finish(order, frame)

    def _finish(self, order: Order, frame: ReplyFrame) -> None:
        self._forget(order.id)
        is_at_it = isinstance(frame, Accepted | Chunk)  # its client has not kept up
        if is_at_it and self._line is not None:
            self._line.send(Cancel(id=order.id))

    def _forget(self, id: str) -> bool:
        """Whether it was there."""
        if self._orders.pop(id, None) is None:
            return False
        self._ended.add(id)
        return True
