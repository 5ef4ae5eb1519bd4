"""Who wants to know that something a console shows has changed, and has not looked yet.

Owns that listeners are told what kind of thing, and not too often. Event loop.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field


@dataclass(eq=False)
class Listener:
    workers: bool = False
    usage: bool = False
    has_news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> dict[str, bool]:
        found = {"workers": self.workers, "usage": self.usage}
        self.workers = self.usage = False
        self.has_news.clear()
        return found


class Changes:
    """every_s: between two messages to one listener."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._listeners: defaultdict[str, set[Listener]] = defaultdict(set)

    def tell(self, organisation_id: str, *, workers: bool = False, usage: bool = False) -> None:
        for listener in self._listeners.get(organisation_id, ()):
            listener.workers |= workers
            listener.usage |= usage
            listener.has_news.set()

    async def of(self, organisation_id: str) -> AsyncGenerator[dict[str, bool], None]:
        """What has changed since the last time, as often as something has."""
        listener = Listener()
        self._listeners[organisation_id].add(listener)
        try:
            while True:
                await listener.has_news.wait()
                yield listener.take()
                await asyncio.sleep(self._every_s)
        finally:
            left = self._listeners[organisation_id]
            left.discard(listener)
            if not left:
                del self._listeners[organisation_id]
