"""An address to listen on, and how a browser on this machine reaches it. Event loop."""

import asyncio
import errno
import ssl

from aiohttp import web

from mlx_worker.config import reachable
from mlx_worker.errors import ConfigError
from mlx_worker.ports import listener

OTHER_HOST = "give an address of this machine as --host"


async def bind(
    runner: web.AppRunner,
    host: str,
    port: int,
    *,
    section: str,
    context: ssl.SSLContext | None = None,
) -> tuple[web.TCPSite, str]:
    """Listen there; port 0 takes a free one. Returns the site and its address.

    section  of the settings, for messages

    Raises ConfigError: the address can't be used.
    """
    site = web.TCPSite(runner, host, port, ssl_context=context)
    try:
        await site.start()
    except OSError as error:
        what = f"{section}: {host}:{port}"
        if error.errno == errno.EADDRINUSE:
            owner = await asyncio.to_thread(listener, host, port)
            raise ConfigError(
                f"{what} is taken by {owner}",
                hint=f"end that, or choose another --port{_lasting(section)}",
            ) from None
        is_low = error.errno == errno.EACCES
        low = f"choose a --port of 1024 or more{_lasting(section)}"
        hint = low if is_low else OTHER_HOST
        raise ConfigError(f"{what} can't be used: {error.strerror}", hint=hint) from None
    address: str = runner.addresses[0][0]
    bound = runner.addresses[0][1]
    return site, f"{'https' if context else 'http'}://{reachable(address)}:{bound}/"


def _lasting(section: str) -> str:
    """Where a service, which has no flags, is told its port."""
    return ", or `mlx-worker config set server.port N`" if section == "server" else ""
