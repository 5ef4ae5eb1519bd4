"""GET and PATCH /api/settings: what the worker's user may switch while it runs.

Owns which keys there are and the values they take. Leaves keeping and obeying them to the engine.
Event loop.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from aiohttp import web

from mlx_worker.http.replies import json_reply
from mlx_worker.server.keys import ENGINE
from mlx_worker.wire.fields import Reader, flag, free_object, unknown_key, word
from mlx_worker.wire.openai import read_body

KEYS: Mapping[str, Reader] = {
    "speculative_decoding": word("auto", "off"),
    "kv_prefix_cache": flag,
    "run_requests_together": flag,
}


async def show_settings(request: web.Request) -> web.Response:
    return json_reply(asdict(request.app[ENGINE].settings()))


async def change_settings(request: web.Request) -> web.Response:
    """Answers with the settings then in force.

    Raises RequestError for a key or value that is none, ConfigError where they can't be kept.
    """
    changes = read_body(await request.read(), read_changes)
    return json_reply(asdict(await request.app[ENGINE].change(changes)))


def read_changes(path: str, value: Any) -> dict[str, Any]:
    """Some of the keys. null is no value of any: a change that changes nothing is a mistake."""
    given = free_object(path, value)
    for key in given:
        if key not in KEYS:
            raise unknown_key(key, key, KEYS)
    return {key: KEYS[key](key, item) for key, item in given.items()}
