"""The usage row of each request, beside its reply.

Owns that a row is begun once and ended once, in this order, and that a database which fails or is
slow holds up no reply. Leaves SQL to store.py. Event loop.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from mlx_worker.gateway.store import Store

Begin = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
CLIENT_GONE = "client_gone"
SLOW_S = 1.0  # after which a reply waits no longer for its row


class Row:
    """Of one request. Next: end it.

    begin  starts work that nobody waits for, and logs what goes wrong with it
    ended  told once the row is whole
    """

    def __init__(
        self, store: Store, begin: Begin, ended: Callable[[], None], **fields: Any
    ) -> None:
        self._store = store
        self._ended = ended
        self._start = begin
        self._id: int | None = None
        self._is_ended = False
        self._begun = begin(self._begin(fields))

    async def begun(self) -> None:
        """The row is there, so that no reply is without one; or the database is too slow."""
        if not self._begun.done():
            await asyncio.wait([self._begun], timeout=SLOW_S)

    def end(self, **fields: Any) -> None:
        """The first end counts."""
        if not self._is_ended:
            self._is_ended = True
            self._start(self._end(fields))

    async def _begin(self, fields: dict[str, Any]) -> None:
        self._id = await self._store.begin_usage(**fields)

    async def _end(self, fields: dict[str, Any]) -> None:
        await self._begun
        if self._id is not None:
            await self._store.end_usage(self._id, **fields)
            self._ended()
