"""The engine for a door that doesn't count by itself: its calls are in the metrics as well.

Owns that a call is counted once, whatever becomes of it. Leaves what is counted to metrics.py.
Event loop.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from mlx_worker.records import (
    Call,
    Done,
    Engine,
    Health,
    Platform,
    ReplyEvent,
    ServedModel,
    Settings,
    Started,
)
from mlx_worker.server.metrics import Metrics


class Counted:
    """A records.Engine that asks another."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    async def submit(self, call: Call) -> AsyncGenerator[Started | ReplyEvent, None]:
        dones: list[Done] = []
        endpoint = "completion" if call.messages is None else "chat"
        with self._metrics.began(endpoint) as ongoing:
            ongoing.waits()
            async with aclosing(self._engine.submit(call)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        ongoing.took_up(event.queue_wait_ms)
                    elif isinstance(event.event, Done):
                        dones.append(event.event)
                    yield event
            ongoing.ended("ok", dones)

    def models(self) -> Sequence[ServedModel]:
        return self._engine.models()

    def health(self) -> Health:
        return self._engine.health()

    def status(self) -> dict[str, Any]:
        return self._engine.status()

    def settings(self) -> Settings:
        return self._engine.settings()

    async def change(self, changes: Mapping[str, Any], revision: int | None = None) -> Settings:
        return await self._engine.change(changes, revision)

    def set_platform(self, platform: Platform) -> None:
        self._engine.set_platform(platform)

    async def refresh_models(self) -> None:
        await self._engine.refresh_models()

    async def forget(self, id: str) -> None:
        await self._engine.forget(id)
