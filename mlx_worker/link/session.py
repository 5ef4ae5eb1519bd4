"""One connection to the gateway, from hello to its end.

Owns the three tasks of a connection: one reads, one writes, one looks at clocks and at what there
is to report. Leaves dialling to client.py and requests to jobs.py. Event loop.

What is sent is asked for when there is room for it, so nothing piles up: a status is written when
it goes out, so that the latest holds; replies keep their own frames; the rest are answers to the
gateway's own frames, and are few. A gateway that doesn't read for `drain` seconds is dropped.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from aiohttp import ClientWebSocketResponse, WSMessage, WSMsgType

from mlx_worker.errors import ConfigError, LinkLost
from mlx_worker.link.jobs import Jobs
from mlx_worker.link.replies import Reply
from mlx_worker.link.report import is_news, status_report
from mlx_worker.link.retry import Ending, Times, of_close
from mlx_worker.records import Engine, Platform
from mlx_worker.wire.link import (
    FROM_GATEWAY,
    MAX_FRAME,
    BrokenLink,
    Cancel,
    Connection,
    Draining,
    ErrorFrame,
    Frame,
    GatewayFrame,
    Hello,
    Ping,
    PlatformFrame,
    PlatformPart,
    Pong,
    Received,
    Request,
    SettingsAck,
    SettingsFrame,
    StatusReport,
    Welcome,
    crossing_s,
    settings_part,
)

LONG_BYTES = 64 * 1024  # frames beyond are read and written by another thread
MOST_ANSWERS = 10_000  # that wait to be sent; a gateway that asks for more reads nothing
MANY_MODELS = 50  # whose status takes long to write
MAX_REASON_BYTES = 123  # of a close frame
CLOSE_S = 1.0  # that a gateway gets to confirm it

LOST = WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR


class Ended(Exception):
    """The gateway closed the connection."""

    def __init__(self, ending: Ending):
        super().__init__(ending.why)
        self.ending = ending


class Session:
    """A connection that is open.

    Next: `greet`, then `run`, which ends by an exception; `close` in any case.
    """

    def __init__(
        self,
        socket: ClientWebSocketResponse,
        engine: Engine,
        jobs: Jobs,
        times: Times,
        clock: Callable[[], float],
        *,
        budget_bytes: int | None = None,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self._socket = socket
        self._engine = engine
        self._jobs = jobs
        self._times = times
        self._clock = clock
        self._budget_bytes = budget_bytes
        self._hidden = hidden
        self._frames: Connection[GatewayFrame] = Connection(
            FROM_GATEWAY, clock(), ping_s=times.ping, silence_s=times.silence
        )
        self._max_frame = MAX_FRAME
        self._heartbeat_s = times.ping
        self._answers: deque[Frame] = deque()
        self._ready: dict[str, Reply] = {}  # those that have something to send, in turn
        self._is_report_due = False
        self._reported: StatusReport | None = None
        self._reported_s = clock()
        self._wake = asyncio.Event()
        self._is_greeted = False
        self._is_idle = asyncio.Event()
        self._changing: set[asyncio.Task[None]] = set()
        self._change_lock = asyncio.Lock()

    async def greet(self, hello: Hello) -> Welcome:
        """Raises Ended, LinkLost."""
        try:
            async with asyncio.timeout(self._times.hello):
                await self._send(hello, len(hello.models) > MANY_MODELS)
                frame = await self._received(await self._socket.receive())
        except TimeoutError:
            raise LinkLost(f"no welcome came within {self._times.hello:g} s") from None
        if not isinstance(frame, Welcome):
            raise BrokenLink("the first frame was no welcome")
        self._max_frame = min(frame.max_frame, MAX_FRAME)
        self._heartbeat_s = frame.heartbeat_s
        self._is_greeted = True
        self._engine.set_platform(platform_of(frame.platform))
        for gone in self._jobs.resume(frame.resume):
            self.answer(gone)
        return frame

    async def run(self) -> None:
        """Until it is over. Raises Ended, LinkLost."""
        self.report()
        work = self._read(), self._write(), self._look()
        tasks = [asyncio.create_task(one) for one in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:  # the reader first: it knows what the gateway said
                if task.done():
                    task.result()
        finally:
            for task in (*tasks, *self._changing):
                task.cancel()
            await asyncio.gather(*tasks, *self._changing, return_exceptions=True)

    async def close(self, code: int, reason: str = "") -> None:
        """Say why, and don't wait long for an answer."""
        words = reason.encode("utf-8")[:MAX_REASON_BYTES].decode("utf-8", "ignore").encode()
        with suppress(TimeoutError, ConnectionError, LinkLost):
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close(code=code, message=words)

    async def flushed(self) -> None:
        """Once all that was there to send is sent."""
        if self._is_greeted:
            await self._is_idle.wait()

    # --- what others want sent

    def ready(self, reply: Reply) -> None:
        if not self._is_greeted:  # the welcome says from where it goes on, or that it doesn't
            return
        self._ready.setdefault(reply.id, reply)
        self._rouse()

    def report(self) -> None:
        self._is_report_due = True
        self._rouse()

    def answer(self, frame: Frame) -> None:
        self._answers.append(frame)
        self._rouse()

    def _rouse(self) -> None:
        self._is_idle.clear()
        self._wake.set()

    # --- writing

    async def _write(self) -> None:
        while True:
            self._wake.clear()
            while (found := self._next()) is not None:
                if not await self._send(*found):
                    await asyncio.sleep(CLOSE_S)  # the reader hears why, and ends it all
                    raise LinkLost("the connection broke")
            if not self._wake.is_set():
                self._is_idle.set()
            await self._wake.wait()

    def _next(self) -> tuple[Frame, bool] | None:
        """What goes out now, and whether it is long."""
        if self._answers:
            return self._answers.popleft(), False
        if self._is_report_due:
            self._is_report_due = False
            report = self._report_now()
            return report, len(report.models) > MANY_MODELS
        while self._ready:
            id = next(iter(self._ready))
            reply = self._ready.pop(id)
            found = reply.take(self._max_frame)
            if found is not None:
                self._ready[id] = reply  # behind the others
                frame, n_bytes = found
                if isinstance(frame, ErrorFrame) and frame.code == "reply_lost":
                    self._jobs.lost(reply)
                return frame, n_bytes > LONG_BYTES
        return None

    async def _send(self, frame: Frame, is_long: bool) -> bool:
        """False: the connection has ended. Raises LinkLost for a gateway that doesn't read."""
        write = self._frames.write
        text = await asyncio.to_thread(write, frame) if is_long else write(frame)
        within_s = self._times.drain + crossing_s(len(text))
        try:
            async with asyncio.timeout(within_s):
                await self._socket.send_str(text)
        except TimeoutError:
            raise LinkLost(f"the gateway read nothing for {within_s:.0f} s") from None
        except ConnectionError:
            return False
        return True

    def _report_now(self) -> StatusReport:
        self._reported_s = self._clock()
        self._reported = self._status()
        return self._reported

    def _status(self) -> StatusReport:
        return status_report(self._engine.status(), self._budget_bytes, self._hidden)

    # --- looking

    async def _look(self) -> None:
        """Raises LinkLost for a silent gateway."""
        while True:
            await asyncio.sleep(min(self._times.look, self._frames.wait_s))
            if ping := self._frames.due(self._clock()):
                self.answer(ping)
            self._jobs.sweep()
            is_beat = self._clock() - self._reported_s >= self._heartbeat_s
            if is_beat or is_news(self._status(), self._reported):
                self.report()

    # --- reading

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            frame = await self._received(message)
            if frame is not None:
                self._obey(frame, len(message.data) > LONG_BYTES)

    async def _received(self, message: WSMessage) -> GatewayFrame | None:
        """Raises Ended, BrokenLink."""
        if message.type in LOST:
            await self._raise_ended()
        if message.type is not WSMsgType.TEXT:
            raise BrokenLink("a frame was no text")
        text: str = message.data
        read = self._frames.read
        if len(text) > LONG_BYTES:
            return await asyncio.to_thread(read, text, self._clock())
        return read(text, self._clock())

    async def _raise_ended(self) -> None:
        error = self._socket.exception()
        if error is not None:
            raise LinkLost(f"the connection broke: {type(error).__name__}")
        raise Ended(of_close(self._socket.close_code))

    def _obey(self, frame: GatewayFrame, is_long: bool) -> None:
        match frame:
            case Request():
                answer = self._jobs.request(frame, is_long)
                if answer:
                    self.answer(answer)
            case Cancel():
                self._jobs.cancel(frame.id)
            case Received():
                self._jobs.received(frame.id)
            case SettingsFrame():
                self._change(frame)
            case PlatformFrame():
                self._engine.set_platform(platform_of(frame))
                self.report()
            case Ping():
                self.answer(Pong())
            case Pong():
                pass
            case Welcome():
                raise BrokenLink("a second welcome")
        if len(self._answers) > MOST_ANSWERS:
            raise LinkLost("the gateway asks more than it reads")

    # --- settings

    def _change(self, frame: SettingsFrame) -> None:
        task = asyncio.create_task(self._changed(frame))
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)

    async def _changed(self, frame: SettingsFrame) -> None:
        """One change after the other, in the order in which they came."""
        revision, problem = None, None
        async with self._change_lock:
            try:
                await asyncio.shield(self._engine.change(frame.changes, frame.revision))
            except ConfigError as error:
                revision, problem = frame.revision, str(error)[:4000]
            if revision is None:
                revision = self._engine.status().get("settings_revision", frame.revision)
            settings = settings_part(self._engine.settings())
            self.answer(SettingsAck(revision=revision, settings=settings, problem=problem))
            self.report()


def platform_of(part: PlatformPart) -> Platform:
    return Platform(part.speculative_decoding, part.display_name, part.revision)


DRAINING = Draining()
