"""What /metrics counts, and that no gauge stays raised."""

import asyncio
import contextlib
import re
from dataclasses import asdict
from typing import Any, get_args

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from mlx_worker.errors import EngineDied, GenerationFailed, Overloaded, UnknownModel
from mlx_worker.records import Done, State, Status, Timing, Usage
from mlx_worker.server import metrics as module
from mlx_worker.server.lag import LoopLag
from mlx_worker.server.metrics import Metrics, Ongoing
from tests.server.local import ScriptedEngine, serving


def reply(n: int = 11, drafted: int = 0, accepted: int = 0, ttft_ms: float = 200.0) -> Done:
    timing = Timing(1000.0, ttft_ms, 500.0, n, 4, 8, 9, drafted, accepted)
    return Done("stop", Usage(30, n, cached_tokens=20), timing)


class Counted:
    """The samples of a registry, by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = {
            (
                sample.name.removeprefix("mlx_worker_"),
                *(label for _, label in sorted(sample.labels.items())),
            ): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, *labels: str) -> float | None:
        return self.samples.get((name, *labels))


async def counted(metrics: Metrics) -> Counted:
    return Counted(metrics.text().decode())


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(ScriptedEngine(), LoopLag())


def gauges(counts: Counted) -> tuple[float | None, float | None]:
    return counts("queued"), counts("running")


async def test_a_request_is_queued_then_running_then_gone(metrics: Metrics):
    """Each gauge is up for just as long as it says; neither while the body is read."""
    with metrics.began("chat") as ongoing:
        assert gauges(await counted(metrics)) == (0, 0)
        ongoing.waits()
        assert gauges(await counted(metrics)) == (1, 0)
        ongoing.took_up(100.0)
        assert gauges(await counted(metrics)) == (0, 1)
        ongoing.took_up(900.0)  # the second choice of the same request
        assert gauges(await counted(metrics)) == (0, 1)
        ongoing.ended("ok", [reply()])
        assert gauges(await counted(metrics)) == (0, 1)
    after = await counted(metrics)
    assert gauges(after) == (0, 0)
    assert after("requests_total", "chat", "ok") == 1
    assert (after("queue_wait_seconds_count"), after("queue_wait_seconds_sum")) == (1, 0.1)


@pytest.mark.parametrize("is_taken_up", [False, True])
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (ConnectionResetError(), "cancelled"),
        (UnknownModel("x"), "refused"),
        (web.HTTPRequestEntityTooLarge(1), "refused"),
        (web.RequestPayloadError(), "refused"),
        (Overloaded("full", retry_after_s=1), "busy"),
        (GenerationFailed("NaN"), "failed"),
        (EngineDied("gone"), "failed"),
        (RuntimeError(), "failed"),
        (KeyboardInterrupt(), "failed"),
        (None, "failed"),
    ],
)
async def test_no_gauge_stays_raised_however_a_request_ends(
    metrics: Metrics, is_taken_up: bool, error: BaseException | None, outcome: str
):
    """Its outcome follows from the exception; leaving without a word is a failure of ours."""

    def serve(ongoing: Ongoing) -> None:
        with ongoing:
            if is_taken_up:
                ongoing.waits()
                ongoing.took_up(1.0)
            if error:
                raise error

    if error:
        with pytest.raises(type(error)):
            serve(metrics.began("chat"))
    else:
        serve(metrics.began("chat"))
    after = await counted(metrics)
    assert gauges(after) == (0, 0)
    assert after("requests_total", "chat", outcome) == 1


async def test_what_was_said_counts_more_than_the_exception(metrics: Metrics):
    """A stream reports its error in band and then ends normally."""
    with metrics.began("chat") as ongoing:
        ongoing.ended("failed")
    with contextlib.suppress(ConnectionResetError), metrics.began("chat") as ongoing:
        ongoing.ended("ok", [reply()])
        raise ConnectionResetError
    with metrics.began("chat") as ongoing:
        ongoing.cancelled()
    after = await counted(metrics)
    outcomes = [after("requests_total", "chat", one) for one in ("failed", "ok", "cancelled")]
    assert outcomes == [1, 1, 1]


def test_a_request_must_be_entered_and_only_once(metrics: Metrics):
    """Else a gauge could be raised and never lowered."""
    ongoing = metrics.began("chat")
    with pytest.raises(AssertionError):
        ongoing.waits()
    with ongoing, pytest.raises(AssertionError):
        ongoing.__enter__()


async def test_tokens_are_counted_per_reply_and_prompts_once(metrics: Metrics):
    """Two choices of one call share a prompt."""
    with metrics.began("chat") as ongoing:
        ongoing.waits()
        ongoing.took_up(300.0)
        ongoing.ended("ok", [reply(11, drafted=9, accepted=6), reply(21)])
    after = await counted(metrics)
    names = ("prompt", "cached", "completion", "drafted", "accepted")
    assert [after(f"{name}_tokens_total") for name in names] == [30, 20, 32, 9, 6]
    assert (after("ttft_seconds_count"), after("ttft_seconds_sum")) == (1, 0.5)
    speeds = {
        kind: (after("tokens_per_second_count", kind), after("tokens_per_second_sum", kind))
        for kind in ("drafted", "plain")
    }
    assert speeds == {"drafted": (1, 20), "plain": (1, 40)}


async def test_a_reply_of_one_token_has_no_speed(metrics: Metrics):
    """There is no time between the first token and itself."""
    with metrics.began("chat") as ongoing:
        ongoing.ended("ok", [reply(1)])
    assert (await counted(metrics))("tokens_per_second_count", "plain") is None


async def test_two_servers_count_apart():
    """Each has a registry of its own, not the process's."""
    first, second = Metrics(ScriptedEngine(), LoopLag()), Metrics(ScriptedEngine(), LoopLag())
    with first.began("chat") as ongoing:
        ongoing.ended()
    assert (await counted(second))("requests_total", "chat", "ok") is None


# --- what the engine says ---------------------------------------------------------------------


def facts(state: State, speedup: float | None) -> dict[str, Any]:
    measured = asdict(Status(state, speedup=speedup))
    cache = {"requests": 9, "hits": 4, "saved_tokens": 300, "bytes": 2**20}
    return {
        "memory": {"active_bytes": 5, "peak_bytes": 7, "limit": 9, "cache_bytes": None},
        "models": [
            {"id": 'a"\n', "measured": measured, "kv_prefix_cache": cache},
            {"id": "bare"},
        ],
    }


@pytest.mark.parametrize("state", get_args(State))
async def test_the_verdict_is_one_of_its_states(state: State):
    """One 1 among zeros, so that a query needs no text."""
    after = await counted(Metrics(ScriptedEngine(facts(state, 0.24)), LoopLag()))
    shown = {one: after("speculation_state", 'a"\n', one) for one in get_args(State)}
    assert shown == {one: float(one == state) for one in get_args(State)}
    assert after("speculation_speedup", 'a"\n') == 0.24
    assert after("speculation_state", "bare", state) is None


async def test_the_engines_figures_are_read_at_each_scrape():
    """Memory by kind, the prefix cache by model; what it doesn't say is left out."""
    engine = ScriptedEngine(facts("measuring", None))
    metrics = Metrics(engine, LoopLag())
    after = await counted(metrics)
    kinds = [after("memory_bytes", kind) for kind in ("active", "peak", "cache")]
    assert kinds == [5, 7, None]
    assert after("prefix_cache_hits_total", 'a"\n') == 4
    assert after("prefix_cache_saved_tokens_total", 'a"\n') == 300
    assert after("prefix_cache_bytes", 'a"\n') == 2**20
    assert after("speculation_speedup", 'a"\n') is None
    engine.facts = {"memory": {"active_bytes": 6}}
    assert (await counted(metrics))("memory_bytes", "active") == 6


async def test_a_dead_engine_leaves_what_was_counted():
    """Health turns to 0; a scrape must not fail just then."""
    engine = ScriptedEngine(facts("on", 0.2))
    async with serving(engine) as local:
        assert b"mlx_worker_healthy 1.0" in (await local.get("/metrics")).body
        engine.error = EngineDied("gone")
        engine.state = type(engine.state)(False, "gone")
        after = await local.get("/metrics")
        assert after.status == 200
        assert b"mlx_worker_healthy 0.0" in after.body
        assert b"http_replies_total" in after.body
        assert b"speculation_state{" not in after.body


async def test_http_replies_are_counted_by_route_never_by_path():
    """A stranger's paths must not make new series."""
    async with serving() as local:
        for path in ("/v1/models/gemma-4", "/v1/models/org/other", "/x", "/y", "/v1/models/none"):
            await local.get(path)
        reply = await local.get("/metrics")
        assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        after = Counted(reply.body.decode())
    assert after("http_replies_total", "/v1/models/{id}", "200") == 2
    assert after("http_replies_total", "/v1/models/{id}", "404") == 1
    assert after("http_replies_total", "none", "404") == 2


async def test_the_table_of_names_is_what_a_scrape_shows(metrics: Metrics):
    """The module's docstring has each family with its kind, and no other."""
    engine = ScriptedEngine(facts("on", 0.2))
    metrics = Metrics(engine, LoopLag())
    with metrics.began("chat") as ongoing:
        ongoing.waits()
        ongoing.took_up(1.0)
        ongoing.ended("ok", [reply()])
    metrics.replied("/x", 200)
    text = metrics.text().decode()
    shown = set(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    shown = {pair for pair in shown if not pair[0].endswith("_created")}
    table = re.findall(
        r"^ +(mlx_worker_\w+)\s+(counter|gauge|histogram)\b", module.__doc__ or "", re.MULTILINE
    )
    assert sorted(table) == sorted(shown)
