"""The last replies, as /status lists them."""

from typing import Any

from mlx_worker.records import Done, Timing, Usage
from mlx_worker.server.keys import METRICS
from mlx_worker.server.lag import LoopLag
from mlx_worker.server.metrics import Metrics
from mlx_worker.server.recent import KEPT, Recent
from tests.server.local import ScriptedEngine, serving


def reply(n: int = 11, drafted: int = 0, accepted: int = 0, ttft_ms: float = 200.0) -> Done:
    return Done("stop", Usage(30, n), Timing(1000.0, ttft_ms, 500.0, n, 4, 8, 9, drafted, accepted))


def test_drafted_and_plain_replies_are_told_apart():
    """With what was measured of each; the wait for the engine is part of the first token's."""
    recent = Recent(clock=lambda: 7.0)
    recent.add([reply(drafted=8, accepted=6)], 50.0)
    recent.add([reply(n=1)], 0.0)
    ago: dict[str, Any] = {"ago_s": 0.0}
    assert recent.shown() == [
        {"is_drafted": True, "acceptance": 0.75, "ttft_ms": 250.0, "tokens_per_s": 20.0, **ago},
        {"is_drafted": False, "acceptance": None, "ttft_ms": 200.0, "tokens_per_s": None, **ago},
    ]


def test_it_is_told_how_long_ago_each_ended():
    """So that an hour's old speed isn't shown as that of now."""
    times = iter((10.0, 25.0, 100.04))
    recent = Recent(clock=lambda: next(times))
    recent.add([reply()], 0.0)
    recent.add([reply()], 0.0)
    assert [one["ago_s"] for one in recent.shown()] == [90.0, 75.0]


def test_later_choices_have_no_time_to_the_first_token():
    """They read no prompt, so theirs would be of another kind."""
    recent = Recent()
    recent.add([reply(), reply()], 0.0)
    assert [one["ttft_ms"] for one in recent.shown()] == [200.0, None]


def test_only_the_last_ones_are_kept():
    """The oldest goes first."""
    recent = Recent()
    for n in range(KEPT + 5):
        recent.add([reply(ttft_ms=n)], 0.0)
    assert [one["ttft_ms"] for one in recent.shown()] == [*range(5, KEPT + 5)]


async def test_a_reply_is_listed_once_its_request_ended():
    """One that was refused, or left by its client, is none."""
    metrics = Metrics(ScriptedEngine(), LoopLag())
    with metrics.began("chat") as ongoing:
        ongoing.waits()
        ongoing.took_up(100.0)
        ongoing.ended("ok", [reply()])
        assert metrics.recent.shown() == []
    with metrics.began("chat") as ongoing:
        ongoing.cancelled()
    assert [one["ttft_ms"] for one in metrics.recent.shown()] == [300.0]


async def test_status_lists_them():
    """Under a name of its own, beside what the engine says."""
    async with serving(ScriptedEngine({"state": "ready"})) as local:
        local.app[METRICS].recent.add([reply()], 0.0)
        shown = (await local.get("/status")).json()
        assert (shown["state"], len(shown["recent"])) == ("ready", 1)
