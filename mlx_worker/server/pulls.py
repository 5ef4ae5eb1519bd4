"""Which models are being downloaded or removed.

Owns that there is one download of a model at a time, which goes on when nobody listens, and none
while it is removed; and that the engine hears of what came. Leaves each download to job.py, files
to models/. Event loop; whatever blocks runs in the executor.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from mlx_worker.errors import (
    ModelBusy,
    Overloaded,
    RequestError,
    ShuttingDown,
    UnknownModel,
    WorkerError,
)
from mlx_worker.http.replies import Refusal
from mlx_worker.models import catalogue
from mlx_worker.models.store import Pulled, Store
from mlx_worker.records import Engine
from mlx_worker.server.job import Job, Message

if TYPE_CHECKING:  # it takes long to import, so only a download does
    from mlx_worker.models.hub import Hub

MOST_AT_ONCE = 4
MOST_ENDED = 16  # that are remembered
STOPS_S = 30.0  # that a stopped download may need: the hub gets 20 s for an answer

NO_DRAFTS: Mapping[str, str] = {}

T = TypeVar("T")

log = logging.getLogger(__name__)


class Pulls:
    """The downloads of one worker.

    store and hub None: the usual ones, looked up when needed
    drafts  of models for which the configuration names one
    """

    def __init__(
        self,
        engine: Engine,
        store: Store | None = None,
        hub: "Hub | None" = None,
        drafts: Mapping[str, str] = NO_DRAFTS,
    ):
        self._engine = engine
        self._drafts = drafts
        self._store = store
        self._hub = hub
        self._jobs: dict[str, Job] = {}  # the newest of each model, the oldest first
        self._tasks: set[asyncio.Task[Any]] = set()
        self._removing: set[str] = set()
        self._reading = asyncio.Lock()
        self._is_closed = False

    def shown(self) -> list[Message]:
        return [job.shown() for job in self._jobs.values()]

    async def read(self, reader: Callable[[Store], T]) -> T:
        """What a function finds in the store, off the loop.

        One at a time: to see whether a model is locked means to lock it for a moment.
        """
        async with self._reading:
            return await asyncio.to_thread(lambda: reader(self._opened()))

    async def start(self, model: str, draft: str | None = None, revision: str | None = None) -> Job:
        """The download of a model: the one that runs, or a new one.

        draft, revision  None: as it runs; of a new one as configured, as the last time, or usual

        Raises Refusal where it runs with others, or is being removed; Overloaded, ShuttingDown.
        """
        id = await asyncio.to_thread(catalogue.canonical, model)
        job = self._jobs.get(id)
        if job and job.state == "running":
            return _joined(job, draft, revision)
        self._check(id)
        wanted = self._drafts.get(id, draft) if draft in (None, "auto") else draft
        before, job = self._jobs.pop(id, None), Job(id, wanted, revision)
        self._jobs[id] = job
        self._forget_oldest()
        self._keep(asyncio.create_task(self._run(job, before)))
        return job

    async def stop(self, model: str) -> Message:
        """End a download; what came is kept. Returns it as it is shown. Raises Refusal."""
        id = await asyncio.to_thread(catalogue.canonical, model)
        job = self._jobs.get(id)
        if job is None or job.state != "running":
            raise Refusal(404, "no_download", f"{id} is not being downloaded by this worker")
        job.stop()
        return job.shown()

    async def remove(self, model: str) -> Message:
        """Stop serving a model and delete its files; returns how many bytes that freed.

        Once begun it is brought to its end, whoever waits for it. A download that failed before
        there were any is forgotten. Raises RequestError and UnknownModel for what is no download,
        ModelInUse, Overloaded where its download does not end, Refusal.
        """
        id = await asyncio.to_thread(catalogue.canonical, model)
        pulled = await self.read(lambda store: [one.id for one in store.models()])
        self._check_known(id, pulled)
        if id in self._removing:
            raise _busy(id, "it is being removed already")
        self._removing.add(id)
        task = self._keep(asyncio.create_task(self._remove(id)))
        return {"id": id, "freed_bytes": await asyncio.shield(task)}

    async def close(self) -> None:
        """The worker stops: so does every download, which may be in the middle of anything."""
        self._is_closed = True
        for job in self._jobs.values():
            job.stop(ShuttingDown())
        for task in self._tasks:
            task.cancel()

    # --- downloads

    def _check(self, id: str) -> None:
        if self._is_closed:
            raise ShuttingDown
        if id in self._removing:
            raise _busy(id, "it is being removed")
        n_running = sum(not job.is_over.is_set() for job in self._jobs.values())
        if n_running >= MOST_AT_ONCE:
            what = f"downloads running: {n_running}, limit {MOST_AT_ONCE}"
            raise Overloaded(what, retry_after_s=60, hint="stop one, or wait until one has ended")

    async def _run(self, job: Job, before: Job | None) -> None:
        try:
            if before:
                await before.is_over.wait()
            done = await self._download(job)
            if done:
                await self._engine.refresh_models()
                job.succeed(done)
        except WorkerError as error:
            if not job.plan and job.n_listeners and self._jobs.get(job.model) is job:
                del self._jobs[job.model]  # nothing was begun, and whoever asked is told
            job.fail(error)
        except Exception:
            log.exception("the download of %s failed", job.model)
            job.fail(WorkerError(f"{job.model}: internal error; the log has it"))
        finally:
            job.is_over.set()

    async def _download(self, job: Job) -> Message | None:
        store = await asyncio.to_thread(self._opened)

        def messages() -> Any:
            from mlx_worker.server.download import messages

            asked = {"draft": job.draft, "revision": job.revision}
            return messages(job.model, store, self._hub, **asked)

        return await job.download(messages)

    def _forget_oldest(self) -> None:
        ended = [id for id, job in self._jobs.items() if job.is_over.is_set()]
        for id in ended[: max(0, len(ended) - MOST_ENDED)]:
            del self._jobs[id]

    # --- removal

    def _check_known(self, id: str, pulled: list[str]) -> None:
        if id in pulled or id in self._jobs:
            return
        if any(model.id == id for model in self._engine.models()):
            what = f"{id} was not downloaded: it is a folder of yours, or part of the worker"
            hint = "take it out of config.yaml to serve it no more"
            raise RequestError(what, param="model", hint=hint)
        raise UnknownModel(id, pulled)

    async def _remove(self, id: str) -> int:
        try:
            job = self._jobs.get(id)
            if job is None or job.is_over.is_set():
                await self.read(partial(_check_idle, id=id))
            if any(model.id == id for model in self._engine.models()):
                await self._engine.forget(id)
            try:
                await self._end_download(id)
                return await self.read(partial(_delete, id=id))
            except WorkerError:
                with suppress(WorkerError):  # it is here still, so it is served again
                    await self.read(Store.renew)
                raise
            finally:
                await self._engine.refresh_models()
        finally:
            self._removing.discard(id)

    async def _end_download(self, id: str) -> None:
        """Wait until its thread has left the files alone. Raises Overloaded."""
        job = self._jobs.get(id)
        if job is None:
            return
        job.stop()
        try:
            async with asyncio.timeout(STOPS_S):
                await job.is_over.wait()
        except TimeoutError:
            what = f"{id}: its download has not ended within {STOPS_S:g} s"
            raise Overloaded(what, retry_after_s=STOPS_S) from None
        self._jobs.pop(id, None)

    # --- both

    def _opened(self) -> Store:
        """Blocking."""
        self._store = self._store or Store.default()
        return self._store

    def _keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _joined(job: Job, draft: str | None, revision: str | None) -> Job:
    for name, asked, has in (("draft", draft, job.draft), ("revision", revision, job.revision)):
        if asked not in (None, has):
            raise _busy(job.model, f"it is being downloaded with another {name}", "stop that first")
    return job


def _busy(id: str, what: str, hint: str = "try again in a while") -> Refusal:
    return Refusal(409, "model_busy", f"{id}: {what}. hint: {hint}")


def _check_idle(store: Store, id: str) -> None:
    """Blocking. Raises ModelBusy where another process downloads it."""
    pulled = store.find(id)
    if pulled and store.presence(pulled).is_downloading:
        raise ModelBusy(id)


def _delete(store: Store, id: str) -> int:
    """Blocking. Raises ModelBusy where another process downloads it."""
    pulled: Pulled | None = store.find(id)
    if pulled is None:  # its download ended before there was anything to keep
        return 0
    return store.remove(pulled)


PULLS = web.AppKey("pulls", Pulls)


async def closed(app: web.Application) -> None:
    """On shutdown, before connections are waited for: those who listen are told."""
    await app[PULLS].close()
