"""The gateway as a process: builds its parts, starts them, waits, and stops them in order.

Owns the order of things. Leaves each part to its own file. Main thread, whose event loop it runs.

    start   bind the address, take the database for this process, end what a killed one left
    wait    for a signal; look every few seconds which workers were disabled meanwhile
    stop    take no more requests, let those that are here finish, close the workers' connections
            with 1001, then the database
"""

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from mlx_worker.errors import ConfigError, WorkerError
from mlx_worker.files import try_lock
from mlx_worker.gateway.app import Runner, make_gateway
from mlx_worker.gateway.fleet import Fleet
from mlx_worker.gateway.hub import join
from mlx_worker.gateway.keys import TRAFFIC
from mlx_worker.gateway.registry import Registry
from mlx_worker.gateway.settings import GatewaySettings, link_url
from mlx_worker.gateway.store import Store
from mlx_worker.http.bind import bind
from mlx_worker.http.connection import allow_open_files
from mlx_worker.wire.link import Close

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeTimes:
    """drain_s: that requests get to finish once it is told to stop. leave_s: that a connection
    gets after that. look_s: between two looks for workers that were disabled.
    """

    drain_s: float = 10.0
    leave_s: float = 1.0
    look_s: float = 2.0


USUAL_TIMES = ServeTimes()


def run(
    settings: GatewaySettings,
    on_ready: Callable[[str], None],
    say: Callable[[str], None],
    times: ServeTimes = USUAL_TIMES,
) -> int:
    """Serve until told to stop; returns the exit code.

    on_ready  hears the console's address once requests can be served
    say       hears what else whoever started it should know

    Raises ConfigError for an address, a certificate or a database that can't be used.
    """
    allow_open_files()
    context = tls_context(settings)
    try:
        return asyncio.run(_serve(settings, context, on_ready, say, times))
    except asyncio.CancelledError:  # told to stop twice: nothing is waited for
        return 0


def tls_context(settings: GatewaySettings) -> ssl.SSLContext | None:
    """Raises ConfigError."""
    if settings.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    except OSError as error:
        files = f"{settings.tls_certificate}, {settings.tls_key}"
        what = error.strerror or str(error)
        hint = "give a certificate and its key, both in PEM, without a passphrase"
        raise ConfigError(f"tls: {files}: can't be used: {what}", hint=hint) from None
    return context


async def _serve(
    settings: GatewaySettings,
    context: ssl.SSLContext | None,
    on_ready: Callable[[str], None],
    say: Callable[[str], None],
    times: ServeTimes,
) -> int:
    async with AsyncExitStack() as stack:
        store = await Store.open(settings.database)
        stack.push_async_callback(store.close)
        registry = Registry(store)
        app = make_gateway(store, registry, settings)
        join(app, store, registry)
        runner = Runner(app, shutdown_timeout=times.leave_s)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        await _take(settings.database, stack)
        await store.set_display_name(settings.display_name)
        if n_left := await store.end_abandoned():
            log.warning("%d requests that a gateway left when it was killed are ended", n_left)
        site, address = await bind(
            runner, settings.host, settings.port, section="gateway", context=context
        )
        bound = settings.model_copy(update={"port": runner.addresses[0][1]})
        await store.set_link_url(link_url(bound))
        is_told = _listen_to_signals(say, times)
        looking = asyncio.create_task(close_disabled(store, registry, times.look_s))
        log.info("serving on %s", address)
        on_ready(address)
        await is_told.wait()
        log.info("stopping")
        looking.cancel()
        await site.stop()
        app[TRAFFIC].is_ending = True
        await registry.drain(times.drain_s)
        await app[TRAFFIC].end(times.leave_s)
    return 0


async def _take(database: Path, stack: AsyncExitStack) -> None:
    """A second gateway would end the requests of the first. Raises ConfigError."""
    held = await asyncio.to_thread(try_lock, database.with_name(f"{database.name}.lock"))
    if held is None:
        raise ConfigError(
            f"{database}: another gateway uses it",
            hint="stop that, or name another file with --database",
        )
    stack.callback(held.close)


def _listen_to_signals(say: Callable[[str], None], times: ServeTimes) -> asyncio.Event:
    """Set once the process is told to stop; told again, it stops at once."""
    is_told, loop = asyncio.Event(), asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main

    def hear() -> None:
        if is_told.is_set():
            main.cancel()
            return
        say(f"stopping: what was begun has {times.drain_s:g} s to finish; again stops at once")
        is_told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, hear)
    return is_told


async def close_disabled(store: Store, registry: Fleet, look_s: float) -> None:
    """Workers that the command line disabled lose their connection too."""
    while True:
        await asyncio.sleep(look_s)
        try:
            for id in await store.disabled():
                if registry.get(id) is not None:
                    await registry.close(id, Close.DISABLED, "this worker was disabled")
        except WorkerError as error:
            log.error("can't see which workers were disabled: %s", error)
