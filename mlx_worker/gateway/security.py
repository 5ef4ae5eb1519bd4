"""By which names the gateway may be called, from which pages, and who a proxy says is calling.

Owns the checks that every request passes before a key is looked at. Leaves keys and sessions to
auth.py. Each check returns, or raises Refusal. Event loop; nothing here waits.

Danger                                          Answer
  a page whose name was rebound to our address  Host must be a loopback name, the address the
                                                connection came in on, the bound name, or listed
  a page of another origin                      its Origin is refused, and its Sec-Fetch-Site for
                                                changes; no CORS headers
  a change through the console's cookie         it needs Origin or Sec-Fetch-Site of our own, and
                                                a header that no form can send
  a client that plays the proxy                 X-Forwarded-* count only with behind_proxy
"""

from dataclasses import dataclass

from aiohttp import web

from mlx_worker.errors import shown
from mlx_worker.gateway.settings import GatewaySettings
from mlx_worker.http.checks import (
    DEFAULT_PORTS,
    READS,
    canonical,
    is_loopback,
    local_authority,
    parse_authority,
)
from mlx_worker.http.replies import Refusal

CSRF_HEADER = "X-CSRF"
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARDS = ("0.0.0.0", "::")  # no names: browsers take 0.0.0.0 for this machine


@dataclass(frozen=True)
class Rules:
    """The settings, ready to be compared with.

    names   a request may use these with the port it came in on, or without a port
    listed  (name, port) it may use as well; port None: any
    """

    names: frozenset[str]
    listed: frozenset[tuple[str, int | None]]
    is_behind_proxy: bool


def make_rules(settings: GatewaySettings) -> Rules:
    own = canonical(settings.host)
    listed = (parse_authority(host) for host in settings.allowed_hosts)
    return Rules(
        _LOOPBACK_NAMES | (frozenset() if own in _WILDCARDS else {own}),
        frozenset(one for one in listed if one),
        settings.behind_proxy,
    )


def check_host(request: web.Request, rules: Rules) -> None:
    """The name that the client used is there once, and is one of ours."""
    host = host_of(request, rules)
    authority = parse_authority(host) if host else None
    if host is None or authority is None:
        raise Refusal(400, "bad_host", "Host must be there once, as name or name:port")
    if not _is_ours(authority, local_authority(request), rules):
        hint = "open it as localhost or by its address, or list the name in allowed_hosts"
        message = f"this gateway does not go by the name {shown(host)}. hint: {hint}"
        raise Refusal(421, "wrong_host", message)


def _is_ours(
    authority: tuple[str, int | None], local: tuple[str, int] | None, rules: Rules
) -> bool:
    """Equality throughout, so that no prefix or suffix gets by."""
    name, port = authority
    if authority in rules.listed or (name, None) in rules.listed:
        return True
    address, local_port = local or (None, None)
    return (name in rules.names or name == address) and port in (None, local_port)


def check_origin(request: web.Request, rules: Rules) -> None:
    """A browser's script is of our own pages; who sends neither header is no browser's script."""
    origins = request.headers.getall("Origin", [])
    sites = request.headers.getall("Sec-Fetch-Site", [])
    if len(origins) > 1 or len(sites) > 1:
        raise _foreign()
    if origins and origins[0] not in own_origins(request, rules):
        raise _foreign()
    if request.method not in READS and sites and sites[0] not in ("same-origin", "none"):
        raise _foreign()


def check_session_change(request: web.Request) -> None:
    """A change through a cookie comes from a script of our own pages, after check_origin."""
    if request.method in READS:
        return
    is_own = "Origin" in request.headers or request.headers.get("Sec-Fetch-Site") == "same-origin"
    if not is_own:
        raise _foreign()
    if not request.headers.get(CSRF_HEADER):
        message = f"a change through the console's session needs the header {CSRF_HEADER}: 1"
        raise Refusal(403, "csrf", message)


def _foreign() -> Refusal:
    return Refusal(403, "foreign_origin", "pages of another origin may not call this gateway")


# --- who asks, and by which name ---------------------------------------------------------------


def host_of(request: web.Request, rules: Rules) -> str | None:
    """The name and port that the client used; None where it can't be told."""
    if rules.is_behind_proxy and "X-Forwarded-Host" in request.headers:
        return _only(request, "X-Forwarded-Host")
    return _only(request, "Host")


def schemes_of(request: web.Request, rules: Rules) -> tuple[str, ...]:
    """http or https; both where a proxy doesn't say."""
    if not rules.is_behind_proxy:
        return (request.scheme,)
    given = _only(request, "X-Forwarded-Proto")
    return (given,) if given in DEFAULT_PORTS else tuple(DEFAULT_PORTS)


def own_origins(request: web.Request, rules: Rules) -> frozenset[str]:
    """The origin of our own pages, as a browser writes it."""
    host = (host_of(request, rules) or "").lower()
    schemes = schemes_of(request, rules)
    return frozenset(f"{one}://{host.removesuffix(DEFAULT_PORTS[one])}" for one in schemes)


def address_of(request: web.Request, rules: Rules) -> str:
    """Where the request came from. Behind a proxy what that says: the last it added."""
    forwarded = request.headers.getall("X-Forwarded-For", []) if rules.is_behind_proxy else []
    last = forwarded[-1].rpartition(",")[2].strip() if forwarded else ""
    return canonical(last or request.remote or "")


def needs_secure_cookie(request: web.Request, rules: Rules) -> bool:
    """Everywhere but on this machine itself, in plain text."""
    authority = parse_authority(host_of(request, rules) or "")
    is_here = authority is not None and is_loopback(authority[0])
    return not is_here or schemes_of(request, rules) == ("https",)


def _only(request: web.Request, name: str) -> str | None:
    values = request.headers.getall(name, [])
    return values[0] if len(values) == 1 else None
