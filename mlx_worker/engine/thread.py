"""The one thread that owns MLX: arrays are made, used and freed on it.

Owns the thread and the crossing: callables go in, plain values and streams of events come out.
MLX streams belong to the thread that made them, so loading, generating and unloading all go
through here. Jobs run one at a time, in the order they were given.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Event as Flag, Thread, current_thread
from typing import Any, TypeVar
from weakref import finalize

import mlx.core as mx

from mlx_worker.errors import EngineDied

T = TypeVar("T")

_END = object()


Job = Callable[[], None]


class EngineThread:
    """Runs jobs on its own thread. Next: `close` it, or use it as a context manager.

    A thread that is still open when the interpreter exits is ended then, in order.
    """

    def __init__(self, name: str = "mlx-engine") -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        self._end = finalize(self, _end, self._jobs, self._thread)

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
                future.set_exception(error)

        self._submit(run)
        return future.result()

    def stream(self, make: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Run a generator on the engine thread and yield what it yields.

        Closing this iterator, or dropping it, closes the generator at its next yield.
        """
        items: SimpleQueue[Any] = SimpleQueue()
        cancelled = Flag()
        self._submit(lambda: _pump(make, items, cancelled))
        try:
            while (item := items.get()) is not _END:
                if isinstance(item, _Raised):
                    raise item.error
                yield item
        finally:
            cancelled.set()

    def close(self) -> None:
        """Finish the jobs already given, then end the thread. Safe to call twice."""
        self._end()

    def _submit(self, job: Job) -> None:
        if not self._end.alive:
            raise EngineDied("this engine is closed", hint="load the pair again")
        self._jobs.put(job)


def _run(jobs: "SimpleQueue[Job | None]") -> None:
    """Do jobs until told to end. MLX aborts the process at exit unless its streams are cleared."""
    while (job := jobs.get()) is not None:
        job()
        del job  # what a job holds on to must be freed on this thread, before the next one
    mx.synchronize()
    mx.clear_streams()


def _end(jobs: "SimpleQueue[Job | None]", thread: Thread) -> None:
    jobs.put(None)
    if thread is not current_thread():
        thread.join()


class _Raised:
    """An exception on its way to the thread that asked."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _pump(make: Callable[[], Iterator[T]], items: "SimpleQueue[Any]", cancelled: Flag) -> None:
    """Run the generator, handing over each item, until it ends or nobody wants more."""
    try:
        source = make()
        for item in source:
            items.put(item)
            if cancelled.is_set():
                break
        close = getattr(source, "close", None)
        if close is not None:
            close()
    except BaseException as error:
        items.put(_Raised(error))
    finally:
        items.put(_END)
