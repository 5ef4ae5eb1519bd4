"""Checks of a request that every server here makes, whoever it serves.

Owns names and addresses, the request line, kinds and lengths of bodies. Each check returns, or
raises Refusal. Leaves who may come in to each server. Event loop; nothing here waits.
"""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from aiohttp import web

from mlx_worker.errors import shown
from mlx_worker.http.replies import MAX_BODY_BYTES, Refusal

READS = frozenset({"GET", "HEAD", "OPTIONS"})  # every other method counts as a change
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS = frozenset({"0.0.0.0", "::"})  # addresses by which nobody can be called
OWN_SITES = ("same-origin", "none")  # Sec-Fetch-Site of what our own pages and people send
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


# --- by which names a server goes --------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """By which names a server may be called.

    names   a request may use these with the port it came in on, or without a port
    listed  (name, port) it may use as well; port None: any
    """

    names: frozenset[str]
    listed: frozenset[tuple[str, int | None]]


def own_names(host: str) -> frozenset[str]:
    """Loopback's, and the bound one; a wildcard address is none, for browsers take 0.0.0.0 for
    this machine.
    """
    return LOOPBACK_NAMES | ({canonical(host)} - WILDCARDS)


def listed_names(hosts: Iterable[str]) -> frozenset[tuple[str, int | None]]:
    """Of a list whose form the configuration has checked."""
    found = [parse_authority(host) for host in hosts]
    assert all(found), "the configuration let it through"
    return frozenset(one for one in found if one)


def is_ours(authority: tuple[str, int | None], local: tuple[str, int] | None, ours: Names) -> bool:
    """Whether a Host names us; equality throughout, so that no prefix or suffix gets by."""
    name, port = authority
    if authority in ours.listed or (name, None) in ours.listed:
        return True
    address, local_port = local or (None, None)
    return (name in ours.names or name == address) and port in (None, local_port)


def check_name(
    request: web.Request, host: str | None, ours: Names, *, who: str, setting: str
) -> None:
    """host: what the client called us; None: it isn't there once. setting: where we list names."""
    authority = parse_authority(host) if host else None
    if host is None or authority is None:
        raise Refusal(400, "bad_host", "Host must be there once, as name or name:port")
    if not is_ours(authority, local_authority(request), ours):
        hint = f"open it as localhost or by its address, or list the name in {setting}"
        message = f"this {who} does not go by the name {shown(host)}. hint: {hint}"
        raise Refusal(421, "wrong_host", message)


def is_foreign(request: web.Request, own: Callable[[], Collection[str]]) -> bool:
    """Whether a browser's script of another origin sent it; without either header none did."""
    origins = request.headers.getall("Origin", [])
    sites = request.headers.getall("Sec-Fetch-Site", [])
    if len(origins) > 1 or len(sites) > 1:
        return True
    if origins and origins[0] not in own():
        return True
    return request.method not in READS and bool(sites) and sites[0] not in OWN_SITES


def only_header(request: web.Request, name: str) -> str | None:
    """None: it isn't there, or more than once."""
    values = request.headers.getall(name, [])
    return values[0] if len(values) == 1 else None
