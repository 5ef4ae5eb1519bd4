"""Whether the gateway can be reached from here, step by step, and whether both clocks agree.

Owns looking (name, connection, TLS, one plain answer; the worker's key is never sent) and judging.
Blocking; any thread.

Sources: Apple's TN3179 (macOS 15 and later ask before a program may reach the local network;
programs run from Terminal are exempt, agents of launchd are not; the list is in System Settings >
Privacy & Security > Local Network), and reports that what is blocked reads EHOSTUNREACH, "No route
to host" (microsoft/vscode#228862, niavasha/plex-mcp-server#121). What a Mac answers was not seen
yet (docs/MAC.md).
"""

import errno
import http.client
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Any, Literal
from urllib.parse import urlsplit

from mlx_worker.config import bracketed
from mlx_worker.doctor.check import Check, fault, ok, warning

Step = Literal["name", "connection", "tls", "answer"]

STEP_S = 5.0  # that each may take
MOST_SKEW_S = 30.0
DATE_S = 0.5  # a Date header leaves out fractions: it is this much too early, give or take as much
LOCAL_NETWORK = (
    "allow Python under System Settings > Privacy & Security > Local Network, then "
    "mlx-worker service restart"
)
NO_ROUTE = ("no route to host", "host is unreachable")


@dataclass(frozen=True)
class Reach:
    """How far one attempt came. failed: the step it ended at; None: an answer came.

    status         of the answer at the link's own address, to one who shows no key

    error, number  what the system said, and its errno
    answered_ms    from the request to the answer's head
    skew_s         the gateway's clock minus ours; None: it names no time
    """

    host: str
    port: int
    addresses: tuple[str, ...] = ()
    failed: Step | None = None
    error: str = ""
    number: int | None = None
    status: int | None = None
    answered_ms: float = 0.0
    skew_s: float | None = None

    @property
    def place(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether it is on the network that this machine is in."""
        name = self.host.rstrip(".")
        return name.endswith(".local") or any(map(_is_lan, self.addresses or (name,)))


def _is_lan(address: str) -> bool:
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return (found.is_private or found.is_link_local) and not found.is_loopback


# --- looking ----------------------------------------------------------------------------------


def look(url: str) -> Reach:
    """url: wss://HOST[:PORT]/…"""
    parts = urlsplit(url)
    is_secure = parts.scheme == "wss"
    reach = Reach(parts.hostname or "", parts.port or (443 if is_secure else 80))
    step: Step = "name"
    try:
        found = socket.getaddrinfo(reach.host, reach.port, type=socket.SOCK_STREAM)
        reach = replace(reach, addresses=tuple(dict.fromkeys(str(one[4][0]) for one in found)))
        step = "connection"
        with socket.create_connection((reach.host, reach.port), STEP_S) as plain:
            step = "tls" if is_secure else "answer"
            with _secured(plain, reach.host) if is_secure else plain as one:
                step = "answer"
                return _asked(reach, one, parts.path or "/")
    except (OSError, http.client.HTTPException) as error:
        number = error.errno if isinstance(error, OSError) else None
        return replace(reach, failed=step, error=_words(error), number=number)


def _secured(plain: socket.socket, host: str) -> ssl.SSLSocket:
    return ssl.create_default_context().wrap_socket(plain, server_hostname=host)


def _words(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, TimeoutError):
        return f"no answer within {STEP_S:g} s"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _asked(reach: Reach, one: socket.socket, path: str) -> Reach:
    """GET without a key, where the link dials: whatever the status, it is an answer."""
    connection = http.client.HTTPConnection(reach.host, reach.port, timeout=STEP_S)
    connection.sock = one
    before_s, before = time.time(), time.perf_counter()
    connection.request("GET", path, headers={"Connection": "close"})
    reply = connection.getresponse()
    took_s = time.perf_counter() - before
    skew_s = skew(reply.getheader("Date"), before_s + took_s / 2)
    reply.close()
    return replace(reach, status=reply.status, answered_ms=took_s * 1000, skew_s=skew_s)


def skew(date: str | None, ours_s: float) -> float | None:
    """Seconds that a Date header is ahead of our clock at that time; None: it names none."""
    try:
        return parsedate_to_datetime(date or "").timestamp() + DATE_S - ours_s
    except (TypeError, ValueError):
        return None


# --- judging ----------------------------------------------------------------------------------


def checks(reach: Reach | None, link: Mapping[str, Any] | None, *, is_mac: bool) -> list[Check]:
    """reach None: no gateway is configured. link: of a running worker's /status."""
    if reach is None:
        return [ok("gateway", "none is configured")]
    return [_reached(reach, link, is_mac=is_mac), *_clock(reach)]


def _reached(reach: Reach, link: Mapping[str, Any] | None, *, is_mac: bool) -> Check:
    if reach.failed:
        return _failed(reach, is_mac=is_mac)
    value = f"{reach.place} answers in {reach.answered_ms:.0f} ms"
    why = str((link or {}).get("why") or "")
    if link and link.get("state") == "connected":
        return ok("gateway", value)
    if not link or link.get("state") is None or not why:
        return _answered(value, reach.status)
    if is_mac and reach.is_local and any(text in why.lower() for text in NO_ROUTE):
        what = f"{value} to this terminal, but not to the worker: {why}"
        return fault("gateway", what, LOCAL_NETWORK)
    what = f"{value}; the worker's link: {link['state']}: {why}"
    if link["state"] == "connecting":  # again; why the last one ended
        return warning("gateway", what, "run this again in a minute")
    return fault("gateway", what, _step_for(str(link["state"])))


def _answered(value: str, status: int | None) -> Check:
    """What a status means where no link says more."""
    what = f"{value} with status {status}"
    if status is not None and 300 <= status < 400:
        step = "set gateway.url to the address that it points to; the link doesn't follow"
        return warning("gateway", f"{what}: it points to another address", step)
    if status == 404:
        step = "see that gateway.url names a gateway"
        return warning("gateway", f"{what}: there seems to be no gateway at this address", step)
    if status is not None and status >= 500:
        return warning("gateway", f"{what}: it is in trouble itself", "see the gateway's own log")
    return ok("gateway", value)


def _step_for(state: str) -> str:
    if state == "key rejected":
        return "set gateway.key to a key that `mlx-worker gateway worker add` shows"
    return "mlx-worker update" if state == "update needed" else "see the gateway's own log"


def _failed(reach: Reach, *, is_mac: bool) -> Check:
    name = "gateway"
    if reach.failed == "name":
        step = "see that gateway.url is spelt right, and that this machine is online"
        return fault(name, f"{reach.host}: no address is known for it: {reach.error}", step)
    if reach.failed == "connection":
        if is_mac and reach.number == errno.EHOSTUNREACH and reach.is_local:
            what = f"{reach.place}: no route to host, as macOS answers where Local Network is off"
            return fault(name, what, LOCAL_NETWORK)
        step = "see that the gateway runs, and that no firewall is between"
        return fault(name, f"{reach.place} can't be connected to: {reach.error}", step)
    if reach.failed == "tls":
        step = "see its certificate, this machine's clock, and SSL_CERT_FILE for an authority"
        return fault(name, f"{reach.place}: no secure connection: {reach.error}", step)
    step = "see that gateway.url names a gateway, with wss:// where it has TLS"
    return fault(name, f"{reach.place} doesn't answer as a web server: {reach.error}", step)


def _clock(reach: Reach) -> list[Check]:
    if reach.failed:
        return []
    if reach.skew_s is None:
        return [ok("clock", "the gateway names no time")]
    way = "ahead of" if reach.skew_s > 0 else "behind"
    value = f"the gateway's is {abs(reach.skew_s):.0f} s {way} ours"
    if abs(reach.skew_s) > MOST_SKEW_S:
        step = "let both machines set their clocks from the network"
        return [warning("clock", value, step)]
    return [ok("clock", f"within {max(1.0, abs(reach.skew_s)):.0f} s of the gateway's")]
