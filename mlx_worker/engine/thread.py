"""The one thread that owns MLX: arrays are made, used and freed on it.

Owns the thread and the crossing: callables go in, plain values and streams of events come out.
MLX streams belong to the thread that made them, so loading, generating and unloading all go
through here. Jobs run one at a time, in the order they were given.
"""

import traceback
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Event as Flag, Lock, Thread, current_thread
from typing import Any, TypeVar
from weakref import finalize

import mlx.core as mx

from mlx_worker.errors import EngineDied

T = TypeVar("T")
Job = Callable[[], None]

_END = object()


class EngineThread:
    """Runs jobs on its own thread. Next: `close` it, or use it as a context manager.

    A thread that is still open when the interpreter exits is ended then, in order.
    """

    def __init__(self, name: str = "mlx-engine") -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closing = Flag()
        self._lock = Lock()  # between the check that the engine is open and the job given to it
        self._thread = Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
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
        cancelled, closing = Flag(), self._closing
        self._submit(lambda: _pump(make, items, cancelled, closing))
        try:
            while (item := items.get()) is not _END:
                if isinstance(item, _Raised):
                    raise item.error
                yield item
        finally:
            cancelled.set()

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


def _run(jobs: "SimpleQueue[Job | None]") -> None:
    """Do jobs until told to end. MLX aborts the process at exit unless its streams are cleared."""
    while (job := jobs.get()) is not None:
        job()
        del job  # what a job holds on to must be freed on this thread, before the next one
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
    make: Callable[[], Iterator[T]], items: "SimpleQueue[Any]", cancelled: Flag, closing: Flag
) -> None:
    """Run the generator, handing over each item, until it ends or nobody wants more."""
    try:
        if closing.is_set():
            raise closed()
        _hand_over(make(), items, cancelled, closing)
    except BaseException as error:
        items.put(_Raised(_without_locals(error)))
    finally:
        items.put(_END)


def _hand_over(
    source: Iterator[T], items: "SimpleQueue[Any]", cancelled: Flag, closing: Flag
) -> None:
    try:
        for item in source:
            items.put(item)
            if closing.is_set():
                raise closed()
            if cancelled.is_set():
                return
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
