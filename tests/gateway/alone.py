"""A gateway in a process of its own: python -m tests.gateway.alone FOLDER PORT. A test may kill it.

Prints its address, then how much memory it holds whenever it is asked by a line.
"""

import asyncio
import resource
import sys
from pathlib import Path

from aiohttp import web

from mlx_worker.gateway.app import Runner, make_gateway
from mlx_worker.gateway.hub import join
from mlx_worker.gateway.registry import Registry
from mlx_worker.gateway.settings import GatewaySettings
from mlx_worker.gateway.store import Store
from mlx_worker.http.connection import allow_open_files


async def run(folder: Path, port: int) -> None:
    allow_open_files()
    store = await Store.open(folder / "gateway.db")
    await store.end_abandoned()
    registry = Registry(store)
    app = make_gateway(store, registry, GatewaySettings(port=port))
    join(app, store, registry)
    runner = Runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(tell_memory)
    await runner.cleanup()
    await store.close()


def tell_memory() -> None:
    """Until nobody asks any more."""
    for _ in sys.stdin:
        print(held_bytes(), flush=True)


def held_bytes() -> int:
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
