"""How many requests are being answered, so that a gateway that stops can let them end.

Owns the count. Streams that never end by themselves aren't in it. Event loop.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

ENDLESS = frozenset({"worker", "events"})  # names of routes


class Traffic:
    """is_ending: it takes no more."""

    def __init__(self) -> None:
        self.is_ending = False
        self._n_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def open(self, route: str | None) -> Iterator[None]:
        if route in ENDLESS:
            yield
            return
        self._n_open += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._n_open -= 1
            if not self._n_open:
                self._is_idle.set()

    async def end(self, wait_s: float) -> bool:
        """Take no more; whether those that are open ended in time."""
        self.is_ending = True
        try:
            async with asyncio.timeout(wait_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True
