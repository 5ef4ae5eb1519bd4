"""Checks of a request that every server here makes, whoever it serves.

Owns names and addresses, the request line, kinds and lengths of bodies. Each check returns, or
raises Refusal. Leaves who may come in to each server. Event loop; nothing here waits.
"""

import re
from ipaddress import IPv6Address, ip_address

from aiohttp import web

from mlx_worker.http.replies import MAX_BODY_BYTES, Refusal

READS = frozenset({"GET", "HEAD", "OPTIONS"})  # every other method counts as a change
DEFAULT_PORTS = {"http": ":80", "https": ":443"}

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([1-9][0-9]{0,4}))?")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def parse_authority(text: str) -> tuple[str, int | None] | None:
    """`Name:8321` → ("name", 8321), `[::1]` → ("::1", None); None where it is neither."""
    match = _AUTHORITY.fullmatch(text)
    if not match:
        return None
    return canonical(match[1].strip("[]")), int(match[2]) if match[2] else None


def canonical(name: str) -> str:
    """One spelling of each name and address."""
    try:
        address = ip_address(name.partition("%")[0])
    except ValueError:
        return name.lower()
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def check_target(request: web.Request) -> None:
    """The request line has a path: no whole URL, no authority."""
    is_path = request.raw_path.startswith("/")
    if not is_path and not (request.method == "OPTIONS" and request.raw_path == "*"):
        raise Refusal(400, "bad_target", "the request line must have a path, not a URL")


def local_authority(request: web.Request) -> tuple[str, int] | None:
    """Address and port that the connection came in on; None on a socket without them."""
    name = request.get_extra_info("sockname")
    return (canonical(name[0]), name[1]) if isinstance(name, tuple) else None


def own_origin(request: web.Request) -> str:
    """The origin of our own pages, as a browser that sent this Host writes it."""
    host = request.headers["Host"].lower().removesuffix(DEFAULT_PORTS[request.scheme])
    return f"{request.scheme}://{host}"


def check_content_type(request: web.Request) -> None:
    """A change says that it is JSON: then no form can have sent it, and pages must ask first."""
    if request.method in READS:
        return
    kinds = request.headers.getall("Content-Type", [])
    kind = kinds[0].partition(";")[0].strip().lower() if len(kinds) == 1 else ""
    if kind != "application/json":
        message = f"{request.method} needs Content-Type: application/json"
        raise Refusal(415, "unsupported_media_type", message)


def check_length(request: web.Request) -> None:
    """A body that says it is too long is not read; others are counted while they are read."""
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES)
