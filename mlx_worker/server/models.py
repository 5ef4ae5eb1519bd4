"""/api/models: which models there are, and getting and removing them.

Owns what bodies may say and how a download is streamed. Leaves what happens to pulls.py. Event
loop.
"""

from contextlib import aclosing
from typing import Any

from aiohttp import web

from mlx_worker.config import memory_bytes
from mlx_worker.errors import InvalidParameter, WorkerError
from mlx_worker.http.replies import json_reply
from mlx_worker.http.stream import STREAM_HEADERS, uploaded, write
from mlx_worker.models import listing
from mlx_worker.models.store import Store
from mlx_worker.server.job import Job, Message
from mlx_worker.server.keys import BUDGET_BYTES, ENGINE
from mlx_worker.server.pulls import PULLS
from mlx_worker.wire.failure import error_body
from mlx_worker.wire.fields import record, text
from mlx_worker.wire.openai import read_body
from mlx_worker.wire.sse import DONE, sse_event

MAX_NAME_CHARS = 200
STILL_THERE = b": nothing new yet\n\n"


async def show_models(request: web.Request) -> web.Response:
    """Raises ConfigError where models.json can't be read."""
    budget = request.app[BUDGET_BYTES]

    def read(store: Store) -> dict[str, Any]:
        return {
            "models": listing.pulled_json(store, {}),
            "catalogue": listing.catalogue_json(store, budget or memory_bytes(None)),
            "disk": listing.disk_json(store),
        }

    found = await request.app[PULLS].read(read)
    found["models"] = [{**row, **served(request, row["id"])} for row in found["models"]]
    return json_reply({**found, "pulls": request.app[PULLS].shown()})


def served(request: web.Request, id: str) -> dict[str, Any]:
    """What the engine knows of a model."""
    engine = request.app[ENGINE]
    ids = [model.id for model in engine.models()]
    facts = {model["id"]: model for model in engine.status().get("models", ())}.get(id, {})
    return {
        "is_served": id in ids,
        "is_default": ids[:1] == [id],
        "is_loaded": facts.get("is_loaded", False),
        "speculation": facts.get("speculation"),
    }


async def pull_model(request: web.Request) -> web.StreamResponse:
    """Begin or join a download. What goes wrong before it is planned has a status of its own."""
    asked = read_body(await uploaded(request), read_pull)
    return await streamed(request, await request.app[PULLS].start(**asked))


async def stop_model(request: web.Request) -> web.Response:
    asked = read_body(await uploaded(request), read_stop)
    return json_reply(await request.app[PULLS].stop(**asked))


async def remove_model(request: web.Request) -> web.Response:
    return json_reply(await request.app[PULLS].remove(request.match_info["id"]))


async def streamed(request: web.Request, job: Job) -> web.StreamResponse:
    """The job's messages, from where it is. It goes on when whoever listens has left."""
    async with aclosing(job.told()) as messages:
        first = await anext(messages)
        if isinstance(first, WorkerError):
            raise first
        reply = web.StreamResponse(headers=STREAM_HEADERS)
        await reply.prepare(request)
        await write(reply, line(first))
        async for message in messages:
            await write(reply, line(message))
    await write(reply, DONE)
    await reply.write_eof()
    return reply


def line(message: Message | WorkerError | None) -> bytes:
    if message is None:
        return STILL_THERE
    return sse_event(error_body(message) if isinstance(message, WorkerError) else message)


def name(path: str, value: Any) -> str:
    if not 1 <= len(text(path, value)) <= MAX_NAME_CHARS or not value.isprintable():
        raise InvalidParameter(path, value, f"1 to {MAX_NAME_CHARS} printable characters")
    return value


read_pull = record({"model": name, "draft": name, "revision": name}, required=("model",))
read_stop = record({"model": name}, required=("model",))
ROUTES = (
    web.get("/api/models", show_models),
    web.post("/api/models/pull", pull_model),
    web.post("/api/models/stop", stop_model),
    web.delete("/api/models/{id:.+}", remove_model),
)
