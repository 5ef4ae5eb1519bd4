"""What the management API asks of the connected workers: the form of registry.py. Any thread."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from mlx_worker.gateway.records import Enrolled


class Fleet(Protocol):
    """The workers that are connected now; each is a registry.Connected."""

    def get(self, worker_id: str) -> Any | None: ...

    def all(self, organisation_id: str) -> Sequence[Any]: ...

    async def change(self, worker: Enrolled, changes: Mapping[str, Any]) -> int:
        """Send settings; their revision. Raises NotConnected, NeedsUpdate."""
        ...

    async def platform_changed(self) -> None:
        """Tell those whom the platform's switch, its name or availability concern."""
        ...

    async def close(self, worker_id: str, code: int, reason: str) -> None:
        """End its connection; none if it has no connection."""
        ...

    def changes(self, organisation_id: str) -> AsyncIterator[Any]:
        """Yields whenever something that the console shows has changed."""
        ...
