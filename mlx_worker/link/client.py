"""The worker's link to its gateway: dialled, kept up, dialled again; the local API never notices.

Owns the loop over connections, and what is shown of it. Leaves one connection to session.py, its
requests to jobs.py, and how long to wait to retry.py. Event loop.

    link = Link(engine, config.gateway)
    link.start() … link.drain() … await link.close()

Requests outlive a connection: they go on for `grace` seconds, and are resumed by the next one.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection
from typing import Any
from uuid import uuid4

import aiohttp

from mlx_worker import __version__
from mlx_worker.config import GatewaySection
from mlx_worker.errors import LinkLost, LinkRefused
from mlx_worker.link.jobs import Jobs
from mlx_worker.link.replies import Reply
from mlx_worker.link.report import model_reports, settings_fields
from mlx_worker.link.retry import (
    KEY_REJECTED,
    WAITING,
    Delays,
    Ending,
    Times,
    of_redirect,
    of_status,
)
from mlx_worker.link.session import DRAINING, Ended, Session
from mlx_worker.power import Sleep
from mlx_worker.records import Engine
from mlx_worker.wire.account import WorkerIdentity
from mlx_worker.wire.link import (
    DECIDES,
    KV_PREFIX_CACHE,
    MAX_FRAME,
    RUN_TOGETHER,
    SETTING,
    BrokenLink,
    Close,
    Hello,
    Welcome,
)

CAPABILITIES = (DECIDES, SETTING, KV_PREFIX_CACHE, RUN_TOGETHER)
SOON = 1 / 6  # of the grace: that a dial waits at most while there are requests to resume
SLEPT = Ending(WAITING, "the machine slept", "now")
TOLD = {  # states that whoever started the worker hears of: another dial won't mend them
    KEY_REJECTED: "gateway: key rejected by {host}: {why}; the local API goes on",
    "replaced": "gateway: {why}; trying again in {minutes} minutes",
    "update needed": "gateway: {host}: {why}: mlx-worker update",
    "redirected": "gateway: {host}: {why}",
}
FIRST = "gateway: {host}: {why}; it is tried again and again, and the local API goes on"

log = logging.getLogger(__name__)
TIMES = Times()


class Link:
    """Serves one gateway's requests with an engine.

    gateway       its url and this worker's key
    hidden        models that it isn't offered
    budget_bytes  memory that models may take
    say           hears in one line what whoever started the worker should know
    clock         seconds that only ever grow; wall: those of the day
    """

    def __init__(
        self,
        engine: Engine,
        gateway: GatewaySection,
        *,
        hidden: Collection[str] = (),
        budget_bytes: int | None = None,
        say: Callable[[str], None] = lambda _: None,
        times: Times = TIMES,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        uniform: random.Random | None = None,
    ) -> None:
        assert gateway.url is not None, "no gateway is set"
        self._engine = engine
        self._gateway = gateway
        self._url = gateway.url
        self._hidden = frozenset(hidden)
        self._budget_bytes = budget_bytes
        self._say = say
        self._times = times
        self._clock = clock
        self._wall = wall
        self._epoch = uuid4().hex
        self._delays = Delays(times, uniform or random.Random())
        self._jobs = Jobs(
            engine, self._identity, times, clock, self._on_frame, self._on_change, self._hidden
        )
        self._session: Session | None = None
        self._welcome: Welcome | None = None
        self._state, self._why, self._entered_s = "connecting", "", clock()
        self._told: str | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False

    # --- what its owner does

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def drain(self) -> None:
        """Take no more requests; those that are here go on."""
        self._jobs.is_draining = True
        if self._session:
            self._session.answer(DRAINING)

    async def close(self) -> None:
        """Let what has ended be sent, then say goodbye. Not before the engine has drained."""
        session, self._is_closing = self._session, True
        if session:
            try:
                async with asyncio.timeout(self._times.flush):
                    await self._jobs.finished()
                    await session.flushed()
            except TimeoutError:
                log.warning("the gateway didn't take the last frames in time")
            await session.close(Close.GOING_AWAY, "the worker stops")
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._giving_up:
            self._giving_up.cancel()
        await self._jobs.close()
        self._enter("closed", "the worker stops")

    def shown(self) -> dict[str, Any]:
        """As /status has it. since_s: for so long it has been so."""
        welcome = self._welcome
        return {
            "url": self._gateway.host,
            "state": self._state,
            "since_s": round(self._clock() - self._entered_s, 1),
            "why": self._why,
            "name": welcome and welcome.name,
            "organisation": welcome and welcome.organisation,
        }

    # --- connections

    async def _run(self) -> None:
        while not self._is_closing:
            self._enter("connecting", self._why)
            ending = await self._attempt()
            self._enter(ending.state, ending.why)
            log.info("gateway %s: %s: %s", self._gateway.host, ending.state, ending.why)
            self._tell(ending)
            await self._rest(self._wait_s(ending))

    def _wait_s(self, ending: Ending) -> float:
        times = self._times
        if ending.wait == "now":
            return 0.0
        if ending.wait == "refused":
            return times.refused
        delay_s = self._delays.next_s()
        if ending.wait == "slow":
            return max(times.slow_down, delay_s)
        # Whatever came before, there must be time to resume what clients wait for.
        return min(delay_s, times.grace * SOON) if self._jobs.held else delay_s

    async def _rest(self, wait_s: float) -> None:
        """Until then; or until the machine has slept, when everything may be different."""
        slept, until_s = Sleep(self._clock, self._wall, self._times.slept), self._clock() + wait_s
        while (left_s := until_s - self._clock()) > 0 and not slept.happened():  # noqa: ASYNC110
            await asyncio.sleep(min(left_s, self._times.look))

    async def _attempt(self) -> Ending:
        """One dial, and the connection that comes of it; how that ended."""
        work = asyncio.create_task(self._connect())
        slept = Sleep(self._clock, self._wall, self._times.slept)
        try:
            while not (await asyncio.wait([work], timeout=self._times.look))[0]:
                if slept.happened():
                    return SLEPT
            return work.result()
        except Exception:
            log.exception("the link failed")
            return Ending(WAITING, "an error of this worker's own; its log has it")
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _connect(self) -> Ending:
        try:
            async with aiohttp.ClientSession(trace_configs=[not_redirected()]) as client:
                socket = await self._dial(client)
                return await self._talk(socket)
        except LinkRefused:
            return of_redirect()
        except aiohttp.WSServerHandshakeError as refused:
            return of_status(refused.status)
        except aiohttp.ClientConnectorCertificateError:
            return Ending(WAITING, "the gateway's certificate isn't trusted here")
        except (aiohttp.ClientError, OSError, TimeoutError) as failed:
            return Ending(WAITING, f"the gateway can't be reached: {reason(failed)}")

    async def _dial(self, client: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        key = self._gateway.key
        assert key
        async with asyncio.timeout(self._times.dial):
            return await client.ws_connect(
                self._url,
                headers={"Authorization": f"Bearer {key.get_secret_value()}"},
                heartbeat=self._times.heartbeat,
                max_msg_size=MAX_FRAME,
                compress=0,
            )

    async def _talk(self, socket: aiohttp.ClientWebSocketResponse) -> Ending:
        session = Session(
            socket, self._engine, self._jobs, self._times, self._clock,
            budget_bytes=self._budget_bytes, hidden=self._hidden,
        )  # fmt: skip
        close, why = int(Close.GOING_AWAY), ""
        connected_s: float | None = None
        try:
            self._session = session  # so that replies which are resumed find it
            self._connected(await session.greet(self._hello()))
            connected_s = self._clock()
            await session.run()
            raise AssertionError("a session ends by an exception")
        except Ended as ended:
            return ended.ending
        except BrokenLink as broken:
            close, why = int(broken.close), broken.message
            return Ending(WAITING, broken.message)
        except LinkLost as lost:
            why = lost.message
            return Ending(WAITING, lost.message)
        finally:
            self._lost(connected_s)
            await session.close(close, why)

    def _hello(self) -> Hello:
        status = self._engine.status()
        return Hello(
            worker_id=self._gateway.worker_id,
            epoch=self._epoch,
            version=__version__,
            capabilities=CAPABILITIES,
            models=model_reports(status, self._hidden),
            **settings_fields(status),
            resume=self._jobs.held,
        )

    def _connected(self, welcome: Welcome) -> None:
        self._welcome = welcome
        if self._giving_up:
            self._giving_up.cancel()
        self._enter("connected", "")
        if self._told != "connected":
            whose = f"{welcome.name} of {welcome.organisation}"
            self._say(f"gateway: connected to {self._gateway.host} as {whose}")
        self._told = "connected"
        log.info("gateway %s: connected as %s", self._gateway.host, welcome.name)
        if self._jobs.is_draining:
            self.drain()

    def _lost(self, connected_s: float | None) -> None:
        self._session = None
        if connected_s is None:
            return
        self._delays.lasted(self._clock() - connected_s)
        loop = asyncio.get_running_loop()
        self._giving_up = loop.call_later(self._times.grace, self._jobs.give_up)

    # --- what is shown and told

    def _enter(self, state: str, why: str) -> None:
        if state != self._state:
            self._entered_s = self._clock()
        self._state, self._why = state, why

    def _tell(self, ending: Ending) -> None:
        """Once, however often it is tried; of what passes, only before anything else was told."""
        text = TOLD.get(ending.state) or (FIRST if self._told is None else None)
        if text and self._told != ending.state:
            self._told = ending.state
            minutes = f"{self._times.refused / 60:g}"
            self._say(text.format(host=self._gateway.host, why=ending.why, minutes=minutes))

    def _identity(self) -> WorkerIdentity:
        id = self._gateway.worker_id
        return WorkerIdentity(id, self._welcome.name if self._welcome else id, __version__)

    def _on_frame(self, reply: Reply) -> None:
        if self._session:
            self._session.ready(reply)

    def _on_change(self) -> None:
        if self._session:
            self._session.report()


def not_redirected() -> aiohttp.TraceConfig:
    """Hears of a redirect before it is followed, and ends the dial."""

    async def refuse(*_: object) -> None:
        raise LinkRefused("redirected")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return trace


def reason(failed: BaseException) -> str:
    """In a few words; nothing of the request, which has the key in it."""
    if isinstance(failed, TimeoutError):
        return "no answer in time"
    if isinstance(failed, aiohttp.ClientConnectorError):
        failed = failed.os_error
    if isinstance(failed, OSError) and failed.strerror:
        return failed.strerror
    return type(failed).__name__
