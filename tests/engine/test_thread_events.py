"""The engine thread as an event loop uses it: streams that are awaited, left, and given up."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio

from mlx_worker.engine.thread import EngineThread, _Inbox
from mlx_worker.errors import EngineDied

ENDLESS = 1 << 62  # items: only leaving ends such a stream


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[EngineThread]:
    engine = EngineThread()
    yield engine
    await asyncio.to_thread(engine.close)


class Counter:
    """A stream of numbers that waits at one of them, and notes how it ended."""

    def __init__(self, n: int, pause_at: int | None = None) -> None:
        self._n = n
        self._pause_at = pause_at
        self.go_on = threading.Event()
        self.is_made = False
        self.is_closed = threading.Event()

    def make(self) -> Iterator[int]:
        self.is_made = True
        try:
            for i in range(self._n):
                if i == self._pause_at:
                    assert self.go_on.wait(30)
                yield i
        finally:
            self.is_closed.set()


async def test_items_cross_in_order(engine: EngineThread):
    """To the loop that awaits them."""
    assert [item async for item in engine.events(lambda: iter(range(50)))] == list(range(50))


async def test_an_error_crosses(engine: EngineThread):
    """After the items before it."""

    def fail() -> Iterator[int]:
        yield 1
        raise KeyError("lost")

    events = engine.events(fail)
    assert await anext(events) == 1
    with pytest.raises(KeyError, match="lost"):
        await anext(events)


async def test_leaving_ends_the_work(engine: EngineThread):
    """At its next item, and the engine is free for the next."""
    counter = Counter(ENDLESS)
    async with aclosing(engine.events(counter.make)) as events:
        await anext(events)
    assert await asyncio.to_thread(counter.is_closed.wait, 30)
    assert [item async for item in engine.events(lambda: iter("ab"))] == ["a", "b"]


async def test_what_left_before_its_turn_is_never_made(engine: EngineThread):
    """It waited behind another, whose turn lasted longer than its patience."""
    first, second = Counter(2, pause_at=1), Counter(1)
    async with aclosing(engine.events(first.make)) as events:
        await anext(events)
        waiting = asyncio.ensure_future(anext(engine.events(second.make)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        first.go_on.set()
        assert [item async for item in events] == [1]
    assert [item async for item in engine.events(lambda: iter("a"))] == ["a"]
    assert not second.is_made


async def test_silence_is_what_a_busy_engine_gives_no_sign_for(engine: EngineThread):
    """And none while it has nothing to do."""
    counter = Counter(3, pause_at=1)
    assert engine.silent_s == 0
    async with aclosing(engine.events(counter.make)) as events:
        await anext(events)
        before = engine.silent_s
        await asyncio.to_thread(threading.Event().wait, 0.05)
        assert engine.silent_s >= before + 0.04
        counter.go_on.set()
        assert [item async for item in events] == [1, 2]
    assert [item async for item in engine.events(lambda: iter("a"))] == ["a"]
    await asyncio.to_thread(engine.call, lambda: None)


async def test_whoever_waits_for_a_stuck_engine_can_be_told(engine: EngineThread):
    """The one being served and the one in line, each with the reason."""
    stuck = Counter(2, pause_at=1)
    served, in_line = engine.events(stuck.make), engine.events(lambda: iter("a"))
    assert await anext(served) == 0
    waits = [asyncio.ensure_future(anext(events)) for events in (served, in_line)]
    await asyncio.sleep(0)
    engine.abandon(EngineDied("stuck"))
    for wait in waits:
        with pytest.raises(EngineDied, match="stuck"):
            await wait
    stuck.go_on.set()


async def test_a_deadline_ends_the_wait_with_its_error(engine: EngineThread):
    """After the items that are there; the work ends at its next one."""
    counter = Counter(ENDLESS, pause_at=3)
    events = engine.events(counter.make, (0.05, TimeoutError("late")))
    assert [await anext(events) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TimeoutError, match="late"):
        await anext(events)
    counter.go_on.set()
    assert await asyncio.to_thread(counter.is_closed.wait, 30)


async def test_a_busy_loop_is_woken_once_for_many_items(engine: EngineThread):
    """It used to be woken for each, which made every reply slower than the engine."""
    loop, wakes = asyncio.get_running_loop(), 0
    call_soon_threadsafe = loop.call_soon_threadsafe

    def counted(*arguments: Any, **options: Any) -> asyncio.Handle:
        nonlocal wakes
        wakes += 1
        return call_soon_threadsafe(*arguments, **options)

    counter = Counter(500)
    with patch.object(loop, "call_soon_threadsafe", counted):
        events = engine.events(counter.make)
        assert await anext(events) == 0
        counter.is_closed.wait(30)  # the loop is held up meanwhile
        assert [item async for item in events] == list(range(1, 500))
    assert wakes < 100


def test_a_loop_that_ended_before_it_woke_takes_no_more():
    """It used to count as woken for ever, so that a stream nobody read went on and on."""
    loop = asyncio.new_event_loop()
    inbox = _Inbox(loop)
    inbox.put("it is woken for this, and never gets to it")
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        inbox.put("next")


async def test_a_loop_that_ended_stops_the_work(engine: EngineThread):
    """Nobody is left to read, and the engine goes on with the next job."""
    counter = Counter(ENDLESS)

    def in_another_loop() -> None:
        async def leave_without_closing() -> None:
            await anext(engine.events(counter.make))

        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave_without_closing())
        loop.close()

    await asyncio.to_thread(in_another_loop)
    assert await asyncio.to_thread(counter.is_closed.wait, 30)
    assert engine.is_alive


async def test_a_closed_engine_takes_nothing():
    """It says so at once."""
    engine = EngineThread()
    await asyncio.to_thread(engine.close)
    with pytest.raises(EngineDied, match="closed"):
        await anext(engine.events(lambda: iter("a")))
    assert not engine.is_alive


async def test_what_is_not_urgent_comes_with_the_next_that_is(engine: EngineThread):
    """In its order, and the loop isn't woken for it."""
    begin, made, go_on = threading.Event(), threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 0
        assert begin.wait(30)
        yield 1
        yield 2
        made.set()
        assert go_on.wait(30)
        yield 3

    events = engine.events(items, is_urgent=lambda item: item in (0, 3))
    assert await anext(events) == 0
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    begin.set()
    assert await asyncio.to_thread(made.wait, 30)
    assert not waiting.done()
    go_on.set()
    assert [await waiting, *[item async for item in events]] == [1, 2, 3]


async def test_an_error_is_urgent(engine: EngineThread):
    """Whatever came before it."""

    def fail() -> Iterator[int]:
        yield 1
        raise KeyError("lost")

    events = engine.events(fail, is_urgent=lambda _: False)
    assert await anext(events) == 1
    with pytest.raises(KeyError, match="lost"):
        await anext(events)
