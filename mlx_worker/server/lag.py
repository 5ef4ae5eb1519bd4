"""How late the event loop is: for so long every client waits, whatever it asked for.

Owns the watch and its figures. While there is a request, a task sleeps a moment and notes how much
later than that it woke; without one it sleeps on, as a laptop should. Late it is where a callback
takes long, but also where the engine thread keeps the interpreter or the machine is busy: the
figure says what clients felt, not whose doing it was. Event loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from aiohttp import web

EVERY_S = 0.01
RECENT_S = 60.0


class LoopLag:
    """The worst of the last minute, and of all. clock: seconds that only ever grow."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.worst_ms = 0.0
        self._clock = clock
        self._n_open = 0
        self._opened_s = 0.0
        self._is_open = asyncio.Event()
        self._recent: deque[tuple[float, float]] = deque()  # when, ms; each above those after it

    @contextmanager
    def open(self) -> Iterator[None]:
        """While it lasts there is a request, so there is a watch."""
        if not self._n_open:
            self._opened_s = self._clock()
            self._is_open.set()
        self._n_open += 1
        try:
            yield
        finally:
            self._n_open -= 1
            if not self._n_open:
                self._is_open.clear()

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            if not self._n_open:
                await self._is_open.wait()
                self.note(1000 * (self._clock() - self._opened_s))
            began = self._clock()
            await asyncio.sleep(EVERY_S)
            self.note(1000 * (self._clock() - began - EVERY_S))

    def note(self, late_ms: float) -> None:
        self.worst_ms = max(self.worst_ms, late_ms)
        while self._recent and self._recent[-1][1] <= late_ms:
            self._recent.pop()
        self._recent.append((self._clock(), late_ms))

    @property
    def recent_ms(self) -> float:
        """The worst of the last minute."""
        since = self._clock() - RECENT_S
        while self._recent and self._recent[0][0] < since:
            self._recent.popleft()
        return self._recent[0][1] if self._recent else 0.0

    def shown(self) -> dict[str, float]:
        """As /status shows it."""
        return {"last_minute": round(self.recent_ms, 1), "worst": round(self.worst_ms, 1)}


LAG = web.AppKey("lag", LoopLag)


async def watched(app: web.Application) -> AsyncIterator[None]:
    """Keeps the watch for as long as the application runs."""
    task = asyncio.create_task(app[LAG].watch())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
