"""The workers that are connected now, and what they are told.

Owns who that is, that each has one connection, settings that wait for a worker, and that what
workers report is kept. Leaves frames to connected.py, requests to desk.py. Event loop.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mlx_worker.errors import NeedsUpdate, NotConnected
from mlx_worker.gateway.changes import Changes
from mlx_worker.gateway.connected import Connected
from mlx_worker.gateway.desk import Desk
from mlx_worker.gateway.order import Order
from mlx_worker.gateway.records import Enrolled, Organisation, PlatformState
from mlx_worker.gateway.store import Store
from mlx_worker.gateway.times import TIMES, Times
from mlx_worker.records import MAX_REVISION
from mlx_worker.wire.link import (
    KV_PREFIX_CACHE,
    RUN_TOGETHER,
    SETTING,
    Close,
    Hello,
    PlatformFrame,
    PlatformPart,
    SettingsFrame,
    Welcome,
)

CAPABILITIES: Mapping[str, str] = {  # that a worker needs, to take a setting
    "speculative_decoding": SETTING,
    "kv_prefix_cache": KV_PREFIX_CACHE,
    "run_requests_together": RUN_TOGETHER,
}

log = logging.getLogger(__name__)


class Registry:
    """is_draining: no request is given to a worker any more.

    Next: drain, shut and settle it, in this order, before the store is closed.
    """

    def __init__(self, store: Store, times: Times = TIMES) -> None:
        self.times = times
        self._store = store
        self._connected: dict[str, Connected] = {}
        self._desks: dict[str, Desk] = {}
        self._changes = Changes(times.changes)
        self._unkept: dict[str, Connected] = {}
        self._keeping = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._has_ended = asyncio.Event()
        self.is_draining = False

    # --- who is there

    def get(self, worker_id: str) -> Connected | None:
        return self._connected.get(worker_id)

    def all(self, organisation_id: str) -> list[Connected]:
        found = self._connected.values()
        return [one for one in found if one.worker.organisation_id == organisation_id]

    def changes(self, organisation_id: str) -> AsyncGenerator[dict[str, bool], None]:
        """{"workers": …, "usage": …}, whenever something that is shown has changed."""
        return self._changes.of(organisation_id)

    def tell(self, organisation_id: str, *, workers: bool = False, usage: bool = False) -> None:
        self._changes.tell(organisation_id, workers=workers, usage=usage)

    # --- connections

    def desk_of(self, worker: Enrolled) -> Desk:
        desk = self._desks.get(worker.id)
        if desk is None:
            desk = Desk(self.times.grace, partial(self._forget, worker.id))
            desk.pending, desk.pending_revision = dict(worker.pending), worker.pending_revision
            self._desks[worker.id] = desk
        return desk

    def _forget(self, worker_id: str) -> None:
        desk = self._desks.get(worker_id)
        if desk is not None and not desk.is_attached:
            del self._desks[worker_id]

    def attach(
        self, one: Connected, hello: Hello, organisation: Organisation, platform: PlatformState
    ) -> None:
        """This is the worker's connection from now on; an older one is closed."""
        worker = one.worker
        if older := self._connected.get(worker.id):
            older.close(Close.REPLACED, "another connection of this worker took its place")
        self._connected[worker.id] = one
        one.desk = self.desk_of(worker)  # the one it came with may have been given up meanwhile
        one.platform = platform_part(organisation, platform, worker)
        goes_on, again = one.desk.attach(one, hello)
        one.send(
            Welcome(
                heartbeat_s=self.times.ping,
                name=worker.name,
                organisation=organisation.name,
                platform=one.platform,
                resume=goes_on,
            )
        )
        for request in again:
            one.send(request)
        one.greet(hello)
        self._send_pending(one)
        self.begin(self._store.seen(worker.id))

    def detach(self, one: Connected) -> None:
        one.desk.detach(one)
        if self._connected.get(one.worker.id) is one:
            del self._connected[one.worker.id]
            self.changed(one)
            self.begin(self._store.seen(one.worker.id))

    async def close(self, worker_id: str, code: int, reason: str) -> None:
        """End a worker's connection, and with it what it was at: it is not to come back."""
        if one := self._connected.pop(worker_id, None):
            one.close(code, reason)
            self.changed(one)
            self.begin(self._store.seen(worker_id))
        if desk := self._desks.pop(worker_id, None):
            desk.end(reason)

    @property
    def n_requests(self) -> int:
        return sum(desk.n_orders for desk in self._desks.values())

    async def drain(self, within_s: float) -> None:
        """Give no more to workers; returns once nothing is left of what they have, or in time."""
        self.is_draining = True
        self._has_ended.set()
        try:
            async with asyncio.timeout(within_s):
                while self.n_requests:
                    self._has_ended.clear()
                    await self._has_ended.wait()
        except TimeoutError:
            log.warning("%d requests did not end within %g s", self.n_requests, within_s)

    def release(self, desk: Desk, order: Order) -> None:
        """Nobody waits for this request any more."""
        desk.close(order)
        self._has_ended.set()

    async def shut(self) -> None:
        """The gateway goes: every worker is told, and what they were at is lost."""
        self.is_draining = True
        for one in list(self._connected.values()):
            one.close(Close.GOING_AWAY, "the gateway is going away")
        for desk in list(self._desks.values()):
            desk.end("the gateway is going away")

    async def settle(self) -> None:
        """After the last handler: what is still to be kept is kept."""
        await self.keep()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- what workers report

    def changed(self, one: Connected) -> None:
        """Show it, and keep it soon: reports come with every request."""
        self.tell(one.worker.organisation_id, workers=True)
        if one.report != one.worker.report:
            one.worker = replace(one.worker, report=one.report)
            if not self._unkept and not self.is_draining:
                self.begin(self._keep_soon())
            self._unkept[one.worker.id] = one

    async def _keep_soon(self) -> None:
        await asyncio.sleep(self.times.keep)
        await self.keep()

    async def keep(self) -> None:
        """Write down what workers have reported; all of it is there afterwards."""
        async with self._keeping:
            unkept, self._unkept = self._unkept, {}
            for id, one in unkept.items():
                await self._store.keep_report(id, one.report)

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Something that nobody waits for; what goes wrong is in the log."""
        task = asyncio.create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- what they are told

    async def change(self, worker: Enrolled, changes: Mapping[str, Any]) -> int:
        """Send settings; returns their revision. They wait until the worker has them.

        Raises NeedsUpdate, NotConnected.
        """
        one = self._connected.get(worker.id)
        check_takes(worker if one is None else one.worker, changes)
        if one is None:
            raise NotConnected(worker.name)
        desk = one.desk
        desk.pending = {**desk.pending, **changes}
        last = max(desk.pending_revision, one.report.settings_revision)
        desk.pending_revision = revision = min(last + 1, MAX_REVISION)
        self._send_pending(one)
        self.tell(worker.organisation_id, workers=True)
        await self._store.keep_pending(worker.id, dict(desk.pending), revision)
        return revision

    def _send_pending(self, one: Connected) -> None:
        desk = one.desk
        if desk.pending and desk.pending_revision > one.report.settings_revision:
            values: dict[str, Any] = dict(desk.pending)
            one.send(SettingsFrame(revision=desk.pending_revision, **values))

    def acknowledged(self, one: Connected, revision: int) -> None:
        """The worker has this revision, so nothing older waits for it any more."""
        desk = one.desk
        if desk.pending and revision >= desk.pending_revision:
            desk.pending = {}
            self.begin(self._store.clear_pending(one.worker.id, revision))

    def pending(self, worker: Enrolled) -> Mapping[str, object]:
        """Changes that the worker has yet to acknowledge."""
        desk = self._desks.get(worker.id)
        return worker.pending if desk is None else desk.pending

    async def platform_changed(self) -> None:
        """Tell every worker whom the platform's switch concerns."""
        platform = await self._store.platform()
        organisations = {one.id: one for one in await self._store.organisations()}
        enrolled = {one.id: one for one in await self._store.workers(None)}
        for one in list(self._connected.values()):
            known = enrolled.get(one.worker.id)
            organisation = organisations.get(one.worker.organisation_id)
            if known is not None and organisation is not None:
                known = replace(known, report=one.worker.report)
                self._tell_platform(one, organisation, platform, known)
        for id in organisations:
            self.tell(id, workers=True)

    def _tell_platform(
        self, one: Connected, organisation: Organisation, platform: PlatformState, known: Enrolled
    ) -> None:
        one.worker = known
        part = platform_part(organisation, platform, known)
        if part.model_copy(update={"revision": one.platform.revision}) == one.platform:
            return
        revision = max(part.revision, one.platform.revision + 1)
        one.platform = part.model_copy(update={"revision": revision})
        one.send(PlatformFrame(**one.platform.model_dump()))


def platform_part(
    organisation: Organisation, platform: PlatformState, worker: Enrolled
) -> PlatformPart:
    """What one worker is told of the platform's switch."""
    is_off = platform.speculative_decoding == "off" or worker.is_off_by_platform
    offered = "off" if is_off else "auto"
    return PlatformPart(
        revision=platform.revision,
        speculative_decoding=offered if organisation.is_speculation_available else "unavailable",
        display_name=platform.display_name,
    )


def check_takes(worker: Enrolled, changes: Mapping[str, Any]) -> None:
    """Raises NeedsUpdate. Of a worker that was never here nothing is known."""
    report = worker.report
    for setting in changes:
        if report.version and CAPABILITIES[setting] not in report.capabilities:
            raise NeedsUpdate(worker.name, report.version, setting)


async def _logged(work: Coroutine[Any, Any, Any]) -> None:
    try:
        await work
    except Exception:
        log.exception("could not be kept")
