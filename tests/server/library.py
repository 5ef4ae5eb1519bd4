"""A hub with tiny models, a worker that downloads from it, and a client that listens."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import huggingface_hub
import pytest

from mlx_worker.models.cache import Cache
from mlx_worker.models.hub import Hub
from mlx_worker.models.store import Store
from mlx_worker.records import ServedModel
from tests.hub import LocalHub
from tests.hub_faults import Gate
from tests.server.local import JSON, Local, Reply, ScriptedEngine, serving

MODEL, DRAFT = "org/tiny", "org/tiny-assistant"
WEIGHTS = "model.safetensors"
N_WEIGHTS, N_DRAFT = 1_000_000, 100_000  # bytes


def model_files(n_bytes: int = N_WEIGHTS, fill: bytes = b"m") -> dict[str, bytes]:
    config = {"model_type": "gemma4", "text_config": {"vocab_size": 64, "hidden_size": 8}}
    return {"config.json": json.dumps(config).encode(), WEIGHTS: fill * n_bytes}


def draft_files(n_bytes: int = N_DRAFT) -> dict[str, bytes]:
    config = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 8,
        "text_config": {"vocab_size": 64},
    }
    return {"config.json": json.dumps(config).encode(), WEIGHTS: b"d" * n_bytes}


@contextmanager
def tiny_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """One model with its draft, and a library that may reach it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with LocalHub(folder) as hub:
        hub.add(MODEL, model_files())
        hub.add(DRAFT, draft_files())
        yield hub
        hub.faults.clear()
        for thread in threading.enumerate():
            if thread.name.startswith("pull "):
                thread.join(5)  # none is at work when the next test begins
    huggingface_hub.close_session()


def store_in(folder: Path) -> Store:
    return Store(folder / "home", Cache(folder / "cache"))


class Library(ScriptedEngine):
    """Serves what was downloaded once it is told to look, as the real one does."""

    def __init__(self, store: Store, status: dict[str, Any] | None = None) -> None:
        super().__init__(status)
        self.store = store
        self.served: dict[str, ServedModel] = {}
        self.forgotten: list[str] = []
        self.in_use: Exception | None = None

    def models(self) -> list[ServedModel]:
        return [ServedModel("demo", 1), *self.served.values()]

    async def refresh_models(self) -> None:
        whole = await asyncio.to_thread(self._whole)
        self.served = {id: ServedModel(id, 2, is_loaded=False) for id in whole}

    def _whole(self) -> list[str]:
        return [one.id for one in self.store.models() if self.store.presence(one).is_whole]

    async def forget(self, id: str) -> None:
        if self.in_use:
            raise self.in_use
        del self.served[id]
        self.forgotten.append(id)


@asynccontextmanager
async def downloading(hub: LocalHub, store: Store, **settings: Any) -> AsyncIterator[Local]:
    engine = Library(store)
    await engine.refresh_models()
    async with serving(engine, store=store, hub=Hub(hub.endpoint), **settings) as local:
        yield local


class Listener:
    """One client that reads a stream of messages. comments: lines that are none."""

    def __init__(self, reply: aiohttp.ClientResponse) -> None:
        self._reply = reply
        self.status = reply.status
        self.comments: list[str] = []

    async def next(self) -> dict[str, Any] | None:
        """None after [DONE]."""
        async for line in self._reply.content:
            text = line.decode().rstrip("\n")
            if text == "data: [DONE]":
                return None
            if text.startswith("data: "):
                return json.loads(text.removeprefix("data: "))
            if text:
                self.comments.append(text)
        raise AssertionError("the stream broke off")

    async def until(self, kind: str) -> dict[str, Any]:
        while (message := await self.next()) is not None:
            if message.get("type") == kind:
                return message
        raise AssertionError(f"no {kind}")

    async def rest(self) -> list[dict[str, Any]]:
        found = []
        while (message := await self.next()) is not None:
            found.append(message)
        return found


@asynccontextmanager
async def listening(local: Local, model: str = MODEL, **body: str) -> AsyncIterator[Listener]:
    url = f"http://127.0.0.1:{local.port}/api/models/pull"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={"model": model, **body}) as reply,
    ):
        assert reply.status == 200, await reply.text()
        yield Listener(reply)


async def pulled(local: Local, model: str = MODEL, **body: str) -> list[dict[str, Any]]:
    """A whole download."""
    async with listening(local, model, **body) as listener:
        return await listener.rest()


async def post(local: Local, path: str, **body: Any) -> Reply:
    return await local.post(JSON, body=json.dumps(body).encode(), path=f"/api/models/{path}")


async def library(local: Local) -> dict[str, Any]:
    return (await local.get("/api/models")).json()


async def remove(local: Local, model: str = MODEL, *headers: str) -> Reply:
    return await local.ask("DELETE", f"/api/models/{model}", JSON, *headers)


async def state_of(local: Local, model: str = MODEL) -> dict[str, Any]:
    """The download of a model, as it is listed."""
    return next(one for one in (await library(local))["pulls"] if one["model"] == model)


def gone_on_at(hub: LocalHub, file: str = WEIGHTS) -> int | None:
    """The first byte that the last request for a file asked for. What a hub sent is no measure:
    it is on its way when a client leaves."""
    asked = [one for one in hub.requests if (one.repo, one.file) == (MODEL, file)]
    return asked[-1].range_start


async def until_stalled(local: Local, gate: Gate, n_bytes: int) -> None:
    """The hub sends no more, and all that it sent is here."""
    await asyncio.to_thread(gate.reached.wait, 10)

    async def is_so() -> bool:
        return (await state_of(local))["present_bytes"] >= n_bytes

    await until(is_so)


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Ask until it is so; whom we ask has no event to wait for."""
    async with asyncio.timeout(10):
        while not await is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_ended() -> None:
    """No thread downloads any more."""

    async def is_so() -> bool:
        return not any(thread.name.startswith("pull ") for thread in threading.enumerate())

    await until(is_so)
