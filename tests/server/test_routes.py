"""What /health, /v1/models and /status say."""

import math

import pytest

import mlx_worker
from mlx_worker.errors import EngineDied
from mlx_worker.records import Health
from tests.server.local import BEARER, KEYED, MODELS, ScriptedEngine, serving

DEAD = Health(False, "the engine thread ended: out of memory at /Users/somebody")


async def test_health_is_200_while_the_engine_can_serve():
    """And says no more than that."""
    async with serving() as local:
        reply = await local.get("/health")
        assert (reply.status, reply.json()) == (200, {"status": "ok"})


async def test_health_is_503_when_it_can_not():
    """With the reason, where everyone is at home."""
    async with serving(ScriptedEngine(health=DEAD)) as local:
        reply = await local.get("/health")
        assert (reply.status, reply.json()) == (503, {"status": "failing", "why": DEAD.why})


async def test_health_gives_its_reason_only_to_callers_with_the_key():
    """A stranger sees whether, not why; a wrong key makes no difference to that."""
    async with serving(ScriptedEngine(health=DEAD), **KEYED) as local:
        for headers in ([], ["Authorization: Bearer wrong"]):
            reply = await local.get("/health", *headers)
            assert (reply.status, reply.json()) == (503, {"status": "failing"})
        assert (await local.get("/health", BEARER)).json()["why"] == DEAD.why


async def test_health_follows_the_engine():
    """It is asked each time, nothing is kept."""
    async with serving() as local:
        assert (await local.get("/health")).status == 200
        local.engine.state = DEAD
        assert (await local.get("/health")).status == 503


async def test_models_are_listed_as_openai_lists_them():
    """The default first; what OpenAI has no word for stands under a name of its own."""
    async with serving() as local:
        listed = (await local.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == [model.id for model in MODELS]
        assert listed["data"][0] == {
            "id": "gemma-4",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "mlx-worker",
            "pendra": {"context_tokens": 8192, "draft": "gemma-4-assistant", "is_loaded": True},
        }


@pytest.mark.parametrize("path", ["gemma-4", "org/other", "org%2Fother", "org%2fother"])
async def test_one_model_is_found_by_its_id(path: str):
    """Also with a slash in it, escaped or not."""
    async with serving() as local:
        reply = await local.get(f"/v1/models/{path}")
        assert (reply.status, reply.json()["object"]) == (200, "model")
        assert reply.json()["id"] == path.replace("%2F", "/").replace("%2f", "/")


@pytest.mark.parametrize("path", ["gemma", "gemma-4/", "GEMMA-4", "org", "other", "gemma-4%00"])
async def test_an_unknown_model_is_404_and_named(path: str):
    """As a chat that asks for it would be answered."""
    async with serving() as local:
        reply = await local.get(f"/v1/models/{path}")
        assert (reply.status, reply.code) == (404, "model_not_found")
        shown = reply.json()["error"]
        assert shown["param"] == "model"
        assert "served here: gemma-4, org/other" in shown["message"]


async def test_status_is_what_the_engine_says_with_version_age_and_lag():
    """Figures that are none become null, which JSON has a word for."""
    facts = {"memory": {"active_bytes": 5}, "models": [{"id": "a", "speed": math.nan}]}
    async with serving(ScriptedEngine(facts)) as local:
        shown = (await local.get("/status")).json()
        assert shown.pop("version") == mlx_worker.__version__
        assert 0 <= shown.pop("uptime_s") < 60
        assert shown.pop("recent") == []
        assert shown.pop("loop_lag_ms").keys() == {"last_minute", "worst"}
        assert shown.pop("link") is None
        assert shown == {"memory": {"active_bytes": 5}, "models": [{"id": "a", "speed": None}]}


async def test_status_of_a_dead_engine_is_its_error():
    """The server itself goes on."""
    async with serving() as local:
        local.engine.error = EngineDied("the engine thread ended")
        reply = await local.get("/status")
        assert (reply.status, reply.code) == (500, "engine_died")


async def test_head_is_get_without_the_body():
    """For health checks that use it."""
    async with serving() as local:
        for path in ("/health", "/v1/models", "/status", "/metrics"):
            reply = await local.ask("HEAD", path)
            assert (reply.status, reply.body) == (200, b""), path
