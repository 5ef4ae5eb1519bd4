"""/api/settings: what it shows, what it changes, what it refuses."""

from dataclasses import fields
from typing import Any

import pytest

from mlx_worker.errors import ConfigError
from mlx_worker.records import Settings
from mlx_worker.server.settings import KEYS
from tests.server.local import BEARER, JSON, KEYED, Local, Reply, ScriptedEngine, serving

PATH = "/api/settings"


async def patch(local: Local, body: bytes, *headers: str) -> Reply:
    return await local.ask("PATCH", PATH, JSON, *headers, body=body)


async def test_the_settings_in_force_are_shown():
    """Asked of the engine each time."""
    async with serving() as local:
        first = {
            "speculative_decoding": "auto",
            "kv_prefix_cache": True,
            "run_requests_together": False,
        }
        assert (await local.get(PATH)).json() == first
        local.engine.in_force = Settings("off", False, True)
        then = {
            "speculative_decoding": "off",
            "kv_prefix_cache": False,
            "run_requests_together": True,
        }
        assert (await local.get(PATH)).json() == then


async def test_a_change_reaches_the_engine_and_leaves_the_rest():
    """The answer is what is in force then."""
    async with serving() as local:
        reply = await patch(local, b'{"speculative_decoding": "off"}')
        shown = {"speculative_decoding": "off", "kv_prefix_cache": True}
        assert (reply.status, reply.json()) == (200, {**shown, "run_requests_together": False})
        assert local.engine.in_force == Settings("off", True)
        reply = await patch(local, b'{"kv_prefix_cache": false, "speculative_decoding": "auto"}')
        assert (reply.status, local.engine.in_force) == (200, Settings("auto", False))
        reply = await patch(local, b'{"run_requests_together": true}')
        assert (reply.status, local.engine.in_force) == (200, Settings("auto", False, True))


async def test_a_change_of_nothing_is_fine():
    """It shows the settings."""
    async with serving() as local:
        reply = await patch(local, b"{}")
        assert (reply.status, reply.json()["kv_prefix_cache"]) == (200, True)


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        (b'{"speculative_decoding": "on"}', "speculative_decoding", "one of auto, off"),
        (b'{"speculative_decoding": null}', "speculative_decoding", "one of auto, off"),
        (b'{"speculative_decoding": ["off"]}', "speculative_decoding", "one of auto, off"),
        (b'{"kv_prefix_cache": 1}', "kv_prefix_cache", "true or false"),
        (b'{"kv_prefix_cache": "off"}', "kv_prefix_cache", "true or false"),
        (b'{"run_requests_together": "on"}', "run_requests_together", "true or false"),
        (b'{"kv_cache": true}', "kv_cache", "did you mean kv_prefix_cache?"),
        (b'{"zzz": null}', "zzz", "leave it out"),
        (b'{"kv_prefix_cache": false, "speculative": "off"}', "speculative", "did you mean"),
        (b"[]", None, "must be a JSON object"),
        (b"null", None, "must be a JSON object"),
        (b"", None, "not JSON"),
        (b"[" * 100_000, None, "nested too deeply"),
    ],
)
async def test_what_is_no_setting_is_refused(body: bytes, param: str | None, told: str):
    """By its key, with what would do; nothing else in the body is changed either."""
    async with serving() as local:
        reply = await patch(local, body)
        error: dict[str, Any] = reply.json()["error"]
        assert (reply.status, error["param"]) == (400, param)
        assert told in error["message"]
        assert local.engine.in_force == Settings()


async def test_a_change_that_can_not_be_kept_is_an_error():
    """The client sees why."""
    engine = ScriptedEngine()
    engine.refusal = ConfigError("policies.json: can't be written: No space left on device")
    async with serving(engine) as local:
        reply = await patch(local, b'{"kv_prefix_cache": false}')
        assert (reply.status, reply.code) == (500, "config_error")
        assert "No space left" in reply.json()["error"]["message"]


async def test_settings_are_as_guarded_as_everything_else():
    """The key, and JSON so that no form can send it."""
    async with serving(**KEYED) as local:
        assert (await local.get(PATH)).status == 401
        assert (await patch(local, b"{}")).status == 401
        assert (await patch(local, b"{}", BEARER)).status == 200
        assert (await local.ask("PATCH", PATH, BEARER, body=b"{}")).status == 415
        foreign = await patch(local, b"{}", BEARER, "Origin: https://evil.example")
        assert (foreign.status, foreign.code) == (403, "foreign_origin")


def test_every_setting_has_a_key():
    """The record and the route name the same ones."""
    assert list(KEYS) == [field.name for field in fields(Settings)]
