"""One worker's open connection: frames in, frames out, liveness.

Owns that nobody waits for a worker which doesn't read, and that whatever is wrong with a frame ends
this connection alone, with its reason in the log. Leaves what frames do to replies to desk.py, and
who is connected to registry.py. Event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import monotonic, time
from typing import Any

from aiohttp import WSMsgType, web

from mlx_worker.errors import LinkLost
from mlx_worker.gateway.desk import Desk
from mlx_worker.gateway.records import Enrolled, Report
from mlx_worker.gateway.times import Times
from mlx_worker.wire.link import (
    FROM_WORKER,
    MAX_FRAME,
    BrokenLink,
    Close,
    Connection,
    Draining,
    Frame,
    Hello,
    Memory,
    Ping,
    PlatformPart,
    Pong,
    Queue,
    SettingsAck,
    StatusReport,
    WorkerFrame,
    crossing_s,
)

MOST_UNSENT_BYTES = 4 * MAX_FRAME
MOST_UNSENT = 10_000  # frames
LONG_CHARS = 1024**2
POWER = {"is_on_battery", "thermal", "is_low_power"}  # of a status
MOST_VALUES = 2_000_000  # of a frame: reading more would keep all others waiting for seconds

log = logging.getLogger(__name__)


class Connected:
    """A worker that is connected, as it last said to be.

    worker        as it is enrolled
    report        what it last said; kept in the store by the registry
    platform      what it was last told of the platform's switch
    has_reported  a status has come on this connection
    changed       told when something of it has changed that is shown, or kept
    acknowledged  told of a revision of settings that it has

    Next: greet with its hello, then run.
    """

    def __init__(
        self,
        worker: Enrolled,
        socket: web.WebSocketResponse,
        desk: Desk,
        times: Times,
        changed: Callable[["Connected"], None],
        acknowledged: Callable[["Connected", int], None],
    ) -> None:
        self.worker = worker
        self.report = worker.report
        self.desk = desk
        self.platform = PlatformPart()
        self.queue = Queue()
        self.memory: Memory | None = None
        self.power: dict[str, Any] | None = None  # POWER
        self.since_s = time()
        self.given_s = 0.0  # perf_counter, of the last request
        self.has_reported = False
        self.is_draining = False
        self._socket = socket
        self._times = times
        self._changed = changed
        self._acknowledged = acknowledged
        self._wire = Connection(
            FROM_WORKER, monotonic(), ping_s=times.ping, silence_s=times.silence
        )
        self._unsent: deque[str] = deque()
        self._n_unsent_bytes = 0
        self._has_unsent = asyncio.Event()
        self._closing: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    @property
    def n_requests(self) -> int:
        """That this gateway has given it."""
        return self.desk.n_orders

    @property
    def load(self) -> int:
        """Requests that it has, of all doors, as far as is known."""
        return max(self.n_requests, self.queue.running + self.queue.waiting)

    @property
    def free_slots(self) -> int:
        return max(0, self.queue.slots - self.load)

    @property
    def models(self) -> list[str]:
        return [model.id for model in self.report.models]

    # --- out

    def send(self, frame: Frame) -> None:
        """In the order in which it was asked for; nothing after its close."""
        if self._closing.done():
            return
        text = self._wire.write(frame)
        self._unsent.append(text)
        self._n_unsent_bytes += len(text)
        self._has_unsent.set()
        if self._n_unsent_bytes > MOST_UNSENT_BYTES or len(self._unsent) > MOST_UNSENT:
            self.close(Close.GOING_AWAY, "it does not read what is sent to it")

    def close(self, code: int, reason: str) -> None:
        """End the connection; the first reason counts."""
        if not self._closing.done():
            self._closing.set_result((code, reason))

    async def _write(self) -> None:
        while True:
            if ping := self._wire.due(monotonic()):
                self.send(ping)
            await self._flush()
            try:
                async with asyncio.timeout(self._wire.wait_s):
                    await self._has_unsent.wait()
            except TimeoutError:
                pass

    async def _flush(self) -> None:
        while self._unsent:
            text = self._unsent.popleft()
            self._n_unsent_bytes -= len(text)
            async with asyncio.timeout(self._times.drain + crossing_s(len(text))):
                await self._socket.send_str(text)
        self._has_unsent.clear()

    # --- in

    async def hear(self) -> WorkerFrame | None:
        """The next frame; None: one that came twice. Raises LinkLost, BrokenLink."""
        message = await self._socket.receive()
        if message.type is WSMsgType.TEXT:
            check_values(message.data)
            return self._wire.read(message.data, monotonic())
        if message.type is WSMsgType.BINARY:
            raise BrokenLink("no frame: it is no text")
        if message.type is WSMsgType.ERROR and self._socket.exception() is not None:
            raise BrokenLink(f"no frame: {self._socket.exception()}"[:200])
        raise LinkLost(f"it closed the connection ({self._socket.close_code})")

    async def _read(self) -> None:
        while True:
            frame = await self.hear()
            if self._closing.done():
                return
            if frame is not None:
                self._take(frame)

    def _take(self, frame: WorkerFrame) -> None:
        match frame:
            case Ping():
                self.send(Pong())
            case Pong():
                pass
            case StatusReport():
                self._take_status(frame)
            case SettingsAck():
                self._take_ack(frame)
            case Draining():
                self.is_draining = True
                self._changed(self)
            case Hello():
                raise BrokenLink("a second hello")
            case _:
                self.desk.take(frame)

    def greet(self, hello: Hello) -> None:
        """Take over what it says of itself when it comes."""
        said = Report(
            hello.version,
            frozenset(hello.capabilities),
            hello.settings and hello.settings.settings,
            hello.settings_revision,
            hello.settings_problem,
            hello.models,
        )
        self._adopt(said)

    def _take_status(self, status: StatusReport) -> None:
        self.has_reported = True
        self.queue, self.memory = status.queue, status.memory
        self.power = status.model_dump(include=POWER)
        said = replace(
            self.report,
            settings=status.settings and status.settings.settings,
            settings_revision=status.settings_revision,
            settings_problem=status.settings_problem,
            models=status.models,
        )
        self._adopt(said)

    def _take_ack(self, ack: SettingsAck) -> None:
        said = replace(
            self.report,
            settings=ack.settings.settings,
            settings_revision=ack.revision,
            settings_problem=ack.problem,
        )
        self._adopt(said)

    def _adopt(self, said: Report) -> None:
        """The worker's own word counts, whatever was asked of it."""
        self.report = said
        self._acknowledged(self, said.settings_revision)
        self._changed(self)

    # --- life

    async def run(self) -> None:
        """Until the connection has ended, for whatever reason."""
        ends = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        try:
            await asyncio.wait([*ends, self._closing], return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                self._judge(end)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    def _judge(self, end: asyncio.Task[None]) -> None:
        """What ended it says how it is closed."""
        if not end.done() or end.cancelled():
            return
        error = end.exception()
        if isinstance(error, BrokenLink):
            self.close(error.close, error.message)
        elif isinstance(error, LinkLost):
            self.close(Close.GOING_AWAY, error.message)
        elif isinstance(error, TimeoutError):
            self.close(Close.GOING_AWAY, "it did not read what was sent to it in time")
        elif isinstance(error, OSError):  # aiohttp's, of a socket that has gone
            self.close(Close.GOING_AWAY, "the connection broke off")
        elif error is not None:
            log.error("worker %s: its connection failed", self.worker.id, exc_info=error)
            self.close(Close.GOING_AWAY, "internal error")

    async def hang_up(self) -> None:
        """Say why, and leave; a peer that doesn't answer is left at once."""
        code, reason = self._closing.result() if self._closing.done() else (1001, "it went away")
        log.info("worker %s (%s): %s [%d]", self.worker.id, self.worker.name, reason, code)
        try:
            async with asyncio.timeout(self._times.close):
                await self._socket.close(code=code, message=reason.encode()[:120])
        except (TimeoutError, OSError, RuntimeError):
            pass


def check_values(text: str) -> None:
    """Raises BrokenLink for a frame that is made of brackets, as no reply is."""
    if len(text) > LONG_CHARS and sum(map(text.count, ",[{")) > MOST_VALUES:
        raise BrokenLink(f"no frame: it has more than {MOST_VALUES:,} values")
