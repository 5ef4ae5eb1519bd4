"""One download as a job: it runs in a thread, and whoever wants to may listen.

Owns how far it is, how it ended, and that no listener holds it up: of progress each hears the
latest, at most every EVERY_S; the plan and the end are heard by all. Event loop, but for `_run`.

The thread is the job's own and a daemon. The hub may keep it waiting for 20 s; neither those who
use the loop's executor nor the end of the process should wait for that. Whatever it leaves, at any
moment, the next download goes on from.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import closing, suppress
from typing import Any, Literal

from mlx_worker.errors import ModelError, WorkerError
from mlx_worker.wire.failure import error_body

EVERY_S = 0.2  # between two messages of progress
SILENCE_S = 15.0  # after which a listener is told that there is nothing to tell

Message = dict[str, Any]
State = Literal["running", "stopped", "failed", "done"]
Messages = Callable[[], Generator[Message | None, None, None]]

log = logging.getLogger(__name__)


class Job:
    """The download of one model.

    draft, revision  as they were asked for; None: not at all
    state        running until its end is told; a thread that was told to stop may still be at it
    plan         None until it is known what is to come
    is_over      its thread has ended, or never began
    n_listeners  who would miss its end
    """

    def __init__(self, model: str, draft: str | None = None, revision: str | None = None) -> None:
        self.model, self.draft, self.revision = model, draft, revision
        self.state: State = "running"
        self.plan: Message | None = None
        self.is_over = asyncio.Event()
        self.n_listeners = 0
        self._progress: Message | None = None
        self._end: Message | WorkerError | None = None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._latest: Message | None = None  # written by the thread
        self._is_woken = False

    def shown(self) -> Message:
        """As GET /api/models lists it."""
        now = self._latest or self.plan or {}
        error = error_body(self._end)["error"] if isinstance(self._end, WorkerError) else None
        return {
            "model": self.model,
            "draft": self.draft,
            "revision": self.revision,
            "state": self.state,
            "present_bytes": now.get("present_bytes", 0),
            "bytes": now.get("bytes", 0),
            "file": now.get("file"),
            "error": error,
        }

    async def told(self) -> AsyncGenerator[Message | WorkerError | None, None]:
        """The plan, progress, and the end last, from wherever it is now. None: silence so far."""
        is_planned, progress = False, None
        self.n_listeners += 1
        try:
            while True:
                changed = self._changed
                if self.plan and not is_planned:
                    is_planned = True
                    yield self.plan
                if self._progress is not progress:
                    progress = self._progress
                    yield progress
                if self._end is not None:
                    yield self._end
                    return
                if not await _is_set(changed, SILENCE_S):
                    yield None
        finally:
            self.n_listeners -= 1

    def stop(self, why: WorkerError | None = None) -> None:
        """Its listeners are told at once; its thread ends as soon as the hub lets it."""
        self._stop.set()
        if self.state == "running":
            shown = self.shown()
            sizes = {key: shown[key] for key in ("present_bytes", "bytes")}
            self._finish("stopped", why or {"type": "stopped", "id": self.model, **sizes})

    def fail(self, error: WorkerError) -> None:
        if self.state == "running":
            self._finish("failed", error)

    def succeed(self, done: Message) -> None:
        if self.state == "running":
            self._finish("done", done)

    async def download(self, messages: Messages) -> Message | None:
        """Run it; returns its last message, None where it was stopped.

        Raises WorkerError. Next: succeed, or fail.
        """
        if self._stop.is_set():
            return None
        ended: asyncio.Future[Message | None] = self._loop.create_future()
        name = f"pull {self.model}"
        threading.Thread(target=self._run, args=(messages, ended), name=name, daemon=True).start()
        return await ended

    # --- the thread

    def _run(self, messages: Messages, ended: asyncio.Future[Message | None]) -> None:
        try:
            self._post(_settle, ended, self._followed(messages), None)
        except Exception as error:
            self._post(_settle, ended, None, _explained(error, self.model))

    def _followed(self, messages: Messages) -> Message | None:
        with closing(messages()) as coming:
            for message in coming:
                if message is None:
                    pass
                elif message["type"] == "done":
                    return message
                elif message["type"] == "planned":
                    self._post(self._planned, message)
                else:
                    self._progressed(message)
                if self._stop.is_set():
                    break
        return None

    def _progressed(self, message: Message) -> None:
        self._latest = message
        if not self._is_woken:
            self._is_woken = True
            self._post(self._wake)

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is gone, and with it whoever would listen
            self._loop.call_soon_threadsafe(call, *arguments)

    # --- the loop

    def _planned(self, plan: Message) -> None:
        self.plan = plan
        self._tell()

    def _wake(self) -> None:
        self._loop.call_later(EVERY_S, self._publish)

    def _publish(self) -> None:
        self._is_woken = False  # before the latest is read: what comes now wakes us again
        if self.state == "running":
            self._progress = self._latest
            self._tell()

    def _finish(self, state: State, end: Message | WorkerError) -> None:
        self.state, self._end, self._progress = state, end, self._latest
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _is_set(event: asyncio.Event, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            return await event.wait()
    except TimeoutError:
        return False


def _settle(
    ended: asyncio.Future[Message | None], message: Message | None, error: WorkerError | None
) -> None:
    if ended.done():  # cancelled: the worker stops
        return
    if error is None:
        ended.set_result(message)
    else:
        ended.set_exception(error)


def _explained(error: Exception, model: str) -> WorkerError:
    if isinstance(error, WorkerError):
        return error
    if isinstance(error, OSError):
        what = error.strerror or type(error).__name__
        return ModelError(f"{model}: {error.filename or 'its files'}: {what}")
    log.error("the download of %s failed", model, exc_info=error)
    return WorkerError(f"{model}: internal error; the log has it")
