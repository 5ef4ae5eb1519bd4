"""An address to listen on, and how a browser on this machine reaches it. Event loop."""

import errno
import ssl

from aiohttp import web

from mlx_worker.errors import ConfigError

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # nobody can be called so; this reaches it here


async def bind(
    runner: web.AppRunner,
    host: str,
    port: int,
    *,
    section: str,
    who: str,
    context: ssl.SSLContext | None = None,
) -> tuple[web.TCPSite, str]:
    """Listen there; port 0 takes a free one. Returns the site and its address.

    section  of the settings, for messages; who: what may listen there already

    Raises ConfigError: the address can't be used.
    """
    site = web.TCPSite(runner, host, port, ssl_context=context)
    hints = {
        errno.EADDRINUSE: f"stop what listens there, perhaps another {who}, "
        "or choose another --port",
        errno.EACCES: "choose a --port of 1024 or more",
    }
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(
            f"{section}: {host}:{port} can't be used: {error.strerror}",
            hint=hints.get(error.errno or 0, "give an address of this machine as --host"),
        ) from None
    address: str = runner.addresses[0][0]
    name, bound = EVERYWHERE.get(address, address), runner.addresses[0][1]
    name = f"[{name}]" if ":" in name else name
    return site, f"{'https' if context else 'http'}://{name}:{bound}/"
