"""The worker with a watch on its event loop: what the slowest callbacks took of its own thread.

    python tests/watched_worker.py FILE serve …

Thread time, not the clock's, so that a busy machine doesn't decide. Written to FILE at the end:
{"callbacks": how many, "slowest": [[ms, what], …], "collection_ms": of all garbage, once}.
"""

import asyncio
import gc
import heapq
import json
import sys
import time
from asyncio import events
from pathlib import Path

from mlx_worker import cli

KEPT = 5


class Watch:
    """Runs a loop's callbacks in the loop's place, and times each."""

    def __init__(self) -> None:
        self.n_callbacks = 0
        self.collection_ms = 0.0
        self.slowest: list[tuple[float, str]] = []
        self._run = events.Handle._run

    def time_collection(self) -> None:
        """One of everything, as may happen at any time once there are requests."""
        began = time.thread_time()
        gc.collect()
        self.collection_ms = 1000 * (time.thread_time() - began)

    def run(self, handle: asyncio.Handle) -> None:
        began = time.thread_time()
        self._run(handle)
        took_ms = 1000 * (time.thread_time() - began)
        self.n_callbacks += 1
        if len(self.slowest) < KEPT:
            heapq.heappush(self.slowest, (took_ms, described(handle)))
        elif took_ms > self.slowest[0][0]:
            heapq.heapreplace(self.slowest, (took_ms, described(handle)))


def described(handle: asyncio.Handle) -> str:
    callback = handle._callback  # pyright: ignore[reportAttributeAccessIssue]
    task = getattr(callback, "__self__", None)
    return repr(task.get_coro() if isinstance(task, asyncio.Task) else callback)[:200]


def main() -> None:
    file, watch = Path(sys.argv.pop(1)), Watch()
    events.Handle._run = lambda self: watch.run(self)
    announce = cli.announce

    def announced(address: str) -> None:
        watch.time_collection()
        announce(address)

    cli.announce = announced
    try:
        cli.main()
    finally:
        found = {
            "callbacks": watch.n_callbacks,
            "slowest": sorted(watch.slowest, reverse=True),
            "collection_ms": watch.collection_ms,
        }
        file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
