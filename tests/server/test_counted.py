"""Calls of the link are in the metrics and among the recent replies, as those of the API are."""

from contextlib import aclosing

import pytest

from mlx_worker.errors import Overloaded
from mlx_worker.records import Call, ReplyEvent
from mlx_worker.server.counted import Counted
from mlx_worker.server.lag import LoopLag
from mlx_worker.server.metrics import Metrics
from tests.link.switchboard import Script

CALL = Call("a" * 32, messages=({"role": "user", "content": "count 3"},))


@pytest.fixture
def engine() -> Script:
    return Script()


@pytest.fixture
def metrics(engine: Script) -> Metrics:
    return Metrics(engine, LoopLag())


def outcome(metrics: Metrics, name: str) -> bool:
    """Whether one chat came out so."""
    text = metrics.text().decode()
    return f'mlx_worker_requests_total{{endpoint="chat",outcome="{name}"}} 1.0' in text


async def test_a_reply_is_counted_and_recent(engine: Script, metrics: Metrics):
    """With its figures."""
    async with aclosing(Counted(engine, metrics).submit(CALL)) as events:
        assert len([event async for event in events]) == 5
    assert outcome(metrics, "ok")
    [recent] = metrics.recent.shown()
    assert (recent["is_drafted"], recent["acceptance"]) == (True, 0.75)


async def test_a_call_that_is_left_is_cancelled(engine: Script, metrics: Metrics):
    """At the engine too."""
    async with aclosing(Counted(engine, metrics).submit(CALL)) as events:
        async for event in events:
            if isinstance(event, ReplyEvent):
                break
    assert outcome(metrics, "cancelled")
    assert engine.n_running == 0


async def test_a_call_that_finds_no_room_is_counted_as_busy(engine: Script, metrics: Metrics):
    """Whoever asked hears the error itself."""
    engine.error = Overloaded("full", retry_after_s=1.0)
    with pytest.raises(Overloaded):
        await anext(Counted(engine, metrics).submit(CALL))
    assert outcome(metrics, "busy")
