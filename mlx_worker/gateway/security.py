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

from mlx_worker.gateway.settings import GatewaySettings
from mlx_worker.http.checks import (
    DEFAULT_PORTS,
    READS,
    Names,
    canonical,
    check_name,
    is_foreign,
    is_loopback,
    listed_names,
    only_header,
    own_names,
    parse_authority,
)
from mlx_worker.http.replies import Refusal

CSRF_HEADER = "X-CSRF"


@dataclass(frozen=True)
class Rules(Names):
    """The settings, ready to be compared with."""

    is_behind_proxy: bool


def make_rules(settings: GatewaySettings) -> Rules:
    listed = listed_names(settings.allowed_hosts)
    return Rules(own_names(settings.host), listed, settings.behind_proxy)


def check_host(request: web.Request, rules: Rules) -> None:
    """The name that the client used is there once, and is one of ours."""
    host = host_of(request, rules)
    check_name(request, host, rules, who="gateway", setting="allowed_hosts")


def check_origin(request: web.Request, rules: Rules) -> None:
    """A browser's script is of our own pages; who sends neither header is no browser's script."""
    if is_foreign(request, lambda: own_origins(request, rules)):
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
        return only_header(request, "X-Forwarded-Host")
    return only_header(request, "Host")


def schemes_of(request: web.Request, rules: Rules) -> tuple[str, ...]:
    """http or https; both where a proxy doesn't say."""
    if not rules.is_behind_proxy:
        return (request.scheme,)
    given = only_header(request, "X-Forwarded-Proto")
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
