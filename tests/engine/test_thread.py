"""Jobs cross to the one thread that owns MLX, and so do their results, streams and errors."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlx_worker.engine.thread import EngineThread
from mlx_worker.errors import EngineDied


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    with EngineThread() as engine:
        yield engine


class Counter:
    """A stream of numbers that notes how far it got and whether it was closed."""

    def __init__(self, n: int, pause_at: int | None = None) -> None:
        self._n = n
        self._pause_at = pause_at
        self.go_on = threading.Event()
        self.n_made = 0
        self.is_closed = False

    def make(self) -> Iterator[int]:
        try:
            for i in range(self._n):
                if i == self._pause_at:
                    assert self.go_on.wait(30)
                self.n_made += 1
                yield i
        finally:
            self.is_closed = True


# --- calls ------------------------------------------------------------------------------------


def test_a_result_crosses(engine: EngineThread):
    """And the job ran elsewhere."""
    assert engine.call(threading.current_thread) is not threading.current_thread()


def test_an_error_crosses(engine: EngineThread):
    """The same object, with the lines it was raised on."""

    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost") as raised:
        engine.call(fail)
    assert raised.traceback[-1].name == "fail"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_no_error_ends_the_thread(engine: EngineThread, error: type[BaseException]):
    """Not even those that end a program."""

    def fail() -> None:
        raise error

    with pytest.raises(error):
        engine.call(fail)
    assert engine.call(lambda: 7) == 7


def test_jobs_run_one_at_a_time_in_the_order_given(engine: EngineThread):
    """A call waits for the stream before it, from whatever thread it comes."""
    counter = Counter(3, pause_at=1)
    stream = engine.stream(counter.make)
    assert next(stream) == 0
    seen: list[int] = []
    caller = threading.Thread(target=lambda: engine.call(lambda: seen.append(counter.n_made)))
    caller.start()
    counter.go_on.set()
    caller.join(30)
    assert seen == [3]
    assert list(stream) == [1, 2]


def test_a_job_that_would_wait_for_another_is_refused(engine: EngineThread):
    """It used to wait for itself, for ever."""
    with pytest.raises(AssertionError, match="waits for ever"):
        engine.call(lambda: engine.call(lambda: 7))
    with pytest.raises(AssertionError, match="waits for ever"):
        engine.call(lambda: list(engine.stream(lambda: iter([7]))))


class Weights:
    """Stands for a model's arrays."""


@pytest.mark.parametrize("how", ["call", "stream"])
def test_an_error_does_not_keep_alive_what_its_job_held(engine: EngineThread, how: str):
    """A load that failed used to keep its weights for as long as its error was kept."""
    alive: list[weakref.ref[Weights]] = []

    def inner(weights: Weights) -> None:
        raise KeyError("lost")

    def fail() -> Iterator[int]:
        weights = Weights()
        alive.append(weakref.ref(weights))
        try:
            inner(weights)
        except KeyError as error:
            raise ValueError("broken") from error
        yield 1

    with pytest.raises(ValueError, match="broken") as raised:
        engine.call(lambda: next(fail())) if how == "call" else list(engine.stream(fail))
    assert isinstance(raised.value.__cause__, KeyError)
    gc.collect()
    assert alive[0]() is None


# --- streams ----------------------------------------------------------------------------------


def test_items_cross_in_order(engine: EngineThread):
    """All of them, and then the end."""
    assert list(engine.stream(Counter(100).make)) == list(range(100))


def test_items_cross_while_the_stream_goes_on(engine: EngineThread):
    """The consumer does not wait for the end."""
    counter = Counter(3, pause_at=1)
    stream = engine.stream(counter.make)
    assert next(stream) == 0
    assert not counter.is_closed
    counter.go_on.set()
    assert list(stream) == [1, 2]


def test_anything_that_iterates_can_be_streamed(engine: EngineThread):
    """A generator is not required."""
    assert list(engine.stream(lambda: iter([1, 2]))) == [1, 2]


def test_an_error_inside_a_stream_reaches_the_consumer(engine: EngineThread):
    """After the items before it; the thread goes on."""

    def fail() -> Iterator[int]:
        yield 1
        raise KeyError("lost")

    stream = engine.stream(fail)
    assert next(stream) == 1
    with pytest.raises(KeyError, match="lost"):
        next(stream)
    assert engine.call(lambda: 7) == 7


def test_an_error_before_the_first_item_reaches_the_consumer(engine: EngineThread):
    """From the function that makes the stream."""

    def fail() -> Iterator[int]:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        list(engine.stream(fail))


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_stream_left_early_stops_its_work(engine: EngineThread, how: str):
    """At the next item: the million that were left are never made."""
    counter = Counter(1_000_000, pause_at=1)
    stream = engine.stream(counter.make)
    assert next(stream) == 0
    if how == "close":
        stream.close()
    del stream
    counter.go_on.set()
    assert engine.call(lambda: counter.is_closed)
    assert counter.n_made == 2


def test_a_stream_nobody_reads_lets_the_next_job_run(engine: EngineThread):
    """Abandoned without being closed, it runs to its end and no longer."""
    counter = Counter(1000)
    stream = engine.stream(counter.make)
    assert next(stream) == 0
    assert engine.call(lambda: counter.is_closed)
    assert list(stream) == list(range(1, 1000))


def test_a_stream_nobody_began_does_nothing(engine: EngineThread):
    """Work starts with the first item asked for."""
    counter = Counter(10)
    stream = engine.stream(counter.make)
    assert engine.call(lambda: counter.n_made) == 0
    del stream


# --- the end ----------------------------------------------------------------------------------


def test_after_close_every_use_is_refused_with_a_hint():
    """Instead of waiting for a thread that is gone."""
    engine = EngineThread()
    engine.close()
    for use in (lambda: engine.call(lambda: 7), lambda: list(engine.stream(lambda: iter([7])))):
        with pytest.raises(EngineDied, match=r"this engine is closed\. hint: load the pair again"):
            use()


def test_close_may_be_repeated():
    """By any caller that wants to be sure."""
    engine = EngineThread()
    for _ in range(3):
        engine.close()


def test_close_finishes_the_calls_already_given():
    """Nobody who got in is left waiting."""
    engine = EngineThread()
    counter, seen = Counter(2, pause_at=1), []
    stream = engine.stream(counter.make)
    next(stream)
    engine._submit(lambda: seen.append(7))  # what `call` does before it waits
    counter.go_on.set()
    engine.close()
    assert seen == [7]


def test_close_cuts_a_stream_short():
    """It used to wait for the end of whatever was being written, read or not."""
    engine = EngineThread()
    counter = Counter(1_000_000, pause_at=1)
    stream = engine.stream(counter.make)
    assert next(stream) == 0
    closer = threading.Thread(target=engine.close)
    closer.start()
    assert engine._closing.wait(30)
    counter.go_on.set()
    closer.join(30)
    assert counter.n_made == 2
    assert next(stream) == 1
    with pytest.raises(EngineDied, match="this engine is closed"):
        next(stream)


def test_the_last_job_runs_on_the_thread_before_its_end():
    """What must be freed there is."""
    engine, seen = EngineThread(), []
    owner = engine.call(threading.current_thread)
    for _ in range(2):
        engine.close(lambda: seen.append(threading.current_thread()))
    assert seen == [owner]


class Gate:
    """A queue into which every job steps only after something else was tried."""

    def __init__(self, jobs: Any, meanwhile: Callable[[], None]) -> None:
        self._jobs = jobs
        self._meanwhile = meanwhile

    def put(self, job: Any) -> None:
        self._meanwhile()
        self._jobs.put(job)


def test_a_call_that_meets_a_close_gets_its_result():
    """It used to wait for ever if the end slipped in between its check and its job."""
    engine, results = EngineThread(), []
    closer = threading.Thread(target=engine.close, daemon=True)

    def close_meanwhile() -> None:
        closer.start()
        closer.join(0.2)  # it must wait for the call, so this is how long it is given

    engine._jobs = Gate(engine._jobs, close_meanwhile)  # type: ignore[assignment]
    caller = threading.Thread(target=lambda: results.append(engine.call(lambda: 7)), daemon=True)
    caller.start()
    caller.join(10)
    closer.join(10)
    assert results == [7]


def test_an_engine_nobody_holds_ends_its_thread():
    """As if it had been closed."""
    engine = EngineThread()
    thread = engine.call(threading.current_thread)
    del engine
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


EXITS = {
    "open": "engine.call(lambda: mx.eval(mx.ones(3) + 1))",
    "in a stream": "stream = engine.stream(numbers); next(stream)",
    "closed": "engine.call(lambda: mx.eval(mx.ones(3) + 1)); engine.close()",
}


@pytest.mark.parametrize("state", EXITS)
def test_the_interpreter_exits_cleanly(state: str):
    """Without a close too, and in the middle of a stream that would never end."""
    script = (
        "import itertools\n"
        "import mlx.core as mx\n"
        "from mlx_worker.engine.thread import EngineThread\n"
        "def numbers():\n"
        "    for i in itertools.count():\n"
        "        mx.eval(mx.ones(3) + i)\n"
        "        yield i\n"
        "engine = EngineThread()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script + EXITS[state]], capture_output=True, text=True, timeout=50
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
