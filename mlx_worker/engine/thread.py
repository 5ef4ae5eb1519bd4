"""The one thread that owns MLX: arrays are made, used and freed on it.

Owns the thread and the crossing: callables go in, plain values and streams of events come out.
MLX streams belong to the thread that made them, so loading, generating and unloading all go
through here. Jobs run one at a time, in the order they were given. `call` and `stream` wait in the
thread that asks, `events` in its event loop.
"""

import asyncio
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Event as Flag, Lock, Thread, current_thread
from time import monotonic
from typing import Any, TypeVar, cast
from weakref import finalize

import mlx.core as mx

from mlx_worker.errors import EngineDied

T = TypeVar("T")
Job = Callable[[], None]
Put = Callable[[Any], None]

_END = object()


class Pulse:
    """When the thread last got anywhere: it began a job, or a stream gave an item.

    beat_s  of the monotonic clock; None while it has nothing to do
    """

    def __init__(self) -> None:
        self.beat_s: float | None = None

    def beat(self) -> None:
        self.beat_s = monotonic()

    def rest(self) -> None:
        self.beat_s = None

    @property
    def silent_s(self) -> float:
        """How long it has been busy without getting anywhere. Any thread."""
        beat_s = self.beat_s
        return 0.0 if beat_s is None else monotonic() - beat_s


class _Inbox:
    """Items on their way to an event loop, which is woken once for all that came meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[Any] = deque()
        self._came = asyncio.Event()
        self._is_woken = False

    def put(self, item: Any, *, is_urgent: bool = True) -> None:
        """Any thread. What isn't urgent waits for what is. Raises RuntimeError once the loop is
        closed."""
        if self._loop.is_closed():  # it may have been woken before, and never have got to it
            raise RuntimeError("nobody reads any more: the event loop is closed")
        self._items.append(item)  # before the look at the flag, so that no item is overlooked
        if is_urgent and not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._wake)

    async def get(self) -> Any:
        while not self._items:
            self._came.clear()
            await self._came.wait()
        return self._items.popleft()

    def _wake(self) -> None:
        self._is_woken = False
        self._came.set()


class EngineThread:
    """Runs jobs on its own thread. Next: `close` it, or use it as a context manager.

    A thread that is still open when the interpreter exits is ended then, in order.
    """

    def __init__(self, name: str = "mlx-engine") -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closing = Flag()
        self._pulse = Pulse()
        self._waiting: set[_Inbox] = set()  # where `events` wait for their next item
        self._lock = Lock()  # between the check that the engine is open and the job given to it
        self._thread = Thread(target=_run, args=(self._jobs, self._pulse), name=name, daemon=True)
        self._thread.start()
        self._end = finalize(self, _end, self._jobs, self._closing, self._thread)

    def __enter__(self) -> "EngineThread":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, job: Callable[[], T]) -> T:
        """Run one job and wait for its result, which must hold no arrays. Raises what it raises."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(_without_locals(error))

        self._submit(run)
        return future.result()

    def stream(self, make: Callable[[], Iterator[T]]) -> Generator[T, None, None]:
        """Run a generator on the engine thread and yield what it yields.

        Closing this iterator, or dropping it, closes the generator at its next yield. One that is
        neither read nor closed runs to its end; it keeps no later job waiting longer than that.
        """
        items: SimpleQueue[Any] = SimpleQueue()
        cancelled = Flag()
        self._submit(self._pumping(make, items.put, cancelled))
        try:
            while (item := items.get()) is not _END:
                if isinstance(item, _Raised):
                    raise item.error
                yield item
        finally:
            cancelled.set()

    async def events(
        self,
        make: Callable[[], Iterator[T]],
        deadline: tuple[float, Exception] | None = None,
        is_urgent: Callable[[T], bool] = lambda _: True,
    ) -> AsyncGenerator[T, None]:
        """The same for an event loop. One that was closed before its turn is never made.

        deadline   seconds from now, and the error that ends it then, after what is there by then
        is_urgent  whether an item is worth waking the loop for; others come with the next that is
        """
        loop = asyncio.get_running_loop()
        items, cancelled = _Inbox(loop), Flag()
        self._waiting.add(items)
        timer = loop.call_later(deadline[0], items.put, _Raised(deadline[1])) if deadline else None

        def put(item: Any) -> None:
            is_last = item is _END or isinstance(item, _Raised)
            try:
                items.put(item, is_urgent=is_last or is_urgent(cast(T, item)))
            except RuntimeError:  # the loop is closed: nobody is left to read
                cancelled.set()

        try:
            self._submit(self._pumping(make, put, cancelled))
            while (item := await items.get()) is not _END:
                if isinstance(item, _Raised):
                    raise item.error
                yield item
        finally:
            cancelled.set()
            self._waiting.discard(items)
            if timer:
                timer.cancel()

    def abandon(self, error: Exception) -> None:
        """End every `events` that waits, with this error, whatever its job still does.

        On the event loop that reads them.
        """
        for items in self._waiting:
            items.put(_Raised(error))

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def silent_s(self) -> float:
        """How long it has been busy without getting anywhere; 0 with nothing to do. Any thread."""
        return self._pulse.silent_s

    def _pumping(self, make: Callable[[], Iterator[T]], put: Put, cancelled: Flag) -> Job:
        closing, pulse = self._closing, self._pulse
        return lambda: _pump(make, put, cancelled, closing, pulse)

    def close(self, last: Job | None = None) -> None:
        """Finish the calls already given, cut streams short, end the thread. Safe to call twice.

        last  one more job, so that what it frees is freed on this thread
        """
        if current_thread() is self._thread:
            self._end()
            return
        with self._lock:
            if last is not None and self._end.alive:
                self._closing.set()
                self._jobs.put(last)
            self._end()

    def _submit(self, job: Job) -> None:
        assert current_thread() is not self._thread, "a job that waits for another waits for ever"
        with self._lock:
            if not self._end.alive:
                raise closed()
            self._jobs.put(job)


def closed() -> EngineDied:
    return EngineDied("this engine is closed", hint="load the pair again")


def _run(jobs: "SimpleQueue[Job | None]", pulse: Pulse) -> None:
    """Do jobs until told to end. MLX aborts the process at exit unless its streams are cleared."""
    while (job := jobs.get()) is not None:
        pulse.beat()
        job()
        del job  # what a job holds on to must be freed on this thread, before the next one
        pulse.rest()
    mx.synchronize()
    mx.clear_cache()
    mx.clear_streams()


def _end(jobs: "SimpleQueue[Job | None]", closing: Flag, thread: Thread) -> None:
    closing.set()
    jobs.put(None)
    if thread is not current_thread():
        thread.join()


class _Raised:
    """An exception on its way to the thread that asked."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _without_locals(error: BaseException) -> BaseException:
    """The error without its frames' variables, which hold arrays, perhaps a model's worth.

    The frame that calls this is still running, so it is left out of the traceback instead.
    """
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def _pump(
    make: Callable[[], Iterator[T]], put: Put, cancelled: Flag, closing: Flag, pulse: Pulse
) -> None:
    """Run the generator, handing over each item, until it ends or nobody wants more."""
    try:
        if closing.is_set():
            raise closed()
        if not cancelled.is_set():
            _hand_over(make(), put, cancelled, closing, pulse)
    except BaseException as error:
        put(_Raised(_without_locals(error)))
    finally:
        put(_END)


def _hand_over(source: Iterator[T], put: Put, cancelled: Flag, closing: Flag, pulse: Pulse) -> None:
    try:
        for item in source:
            pulse.beat()
            put(item)
            if closing.is_set():
                raise closed()
            if cancelled.is_set():
                return
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
