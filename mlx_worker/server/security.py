"""Who may call the local API: names, keys, pages, kinds of body.

Owns the checks that every request passes before a handler sees it. Leaves their order of layers
to app.py and what all replies carry to front.py. Event loop; nothing here waits.

Danger                                          Answer
  a page whose name was rebound to 127.0.0.1    Host must be a loopback name, the address the
                                                connection came in on, the bound name, or listed
  a page that posts a form, which is sent       a change needs Content-Type: application/json, and
  without asking us first                       an own or listed Origin where there is one
  a page that reads what we answer              an unlisted Origin is refused; no CORS headers
  a stranger on the network                     a key, compared by digest in constant time

A proxy's request line ("GET http://…") is refused: it would name another host than Host does.
"""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from aiohttp import web

from mlx_worker.config import ServerSection
from mlx_worker.errors import ConfigError
from mlx_worker.http.checks import (
    Names,
    check_name,
    is_foreign,
    is_loopback,
    listed_names,
    only_header,
    own_names,
    own_origin,
)
from mlx_worker.http.replies import Refusal
from mlx_worker.records import LOCAL

PREFLIGHT_MAX_AGE_S = 600
ALLOWED_METHODS = "GET, HEAD, POST, PATCH, DELETE"
ALLOWED_HEADERS = ("Authorization", "Content-Type", "User-Agent", "X-Request-Id")
EXPOSED_HEADERS = "X-Request-Id, Retry-After, Server-Timing"

_CLIENT_HEADER = re.compile(r"x-stainless-[a-z-]+")


@dataclass(frozen=True)
class Rules(Names):
    """The settings, ready to be compared with.

    key_digest  SHA-256 of the key; None: no key is needed
    scope      Call.scope of everyone who is let in
    """

    origins: frozenset[str]
    key_digest: bytes | None
    scope: str


def make_rules(settings: ServerSection) -> Rules:
    """Raises ConfigError: the host can be reached from outside, and there is no key."""
    key = settings.api_key.get_secret_value().encode() if settings.api_key else None
    if key is None and not is_loopback(settings.host):
        raise ConfigError(
            f"server.host: {settings.host} can be reached by others, so server.api_key is needed",
            hint="set MLX_WORKER_SERVER__API_KEY, or listen on 127.0.0.1",
        )
    return Rules(
        names=own_names(settings.host),
        listed=listed_names(settings.allowed_hosts),
        origins=frozenset(settings.allowed_origins),
        key_digest=sha256(key).digest() if key else None,
        scope=sha256(b"scope of " + key).hexdigest()[:32] if key else LOCAL,
    )


# --- the checks: each returns, or raises Refusal ----------------------------------------------


def check_host(request: web.Request, rules: Rules) -> None:
    """Host is there once, and names us."""
    host = only_header(request, "Host")
    check_name(request, host, rules, who="worker", setting="server.allowed_hosts")


def check_origin(request: web.Request, rules: Rules) -> None:
    """A script's page is our own or listed; who sends neither header is no browser's script."""
    is_one_site = len(request.headers.getall("Sec-Fetch-Site", [])) <= 1
    if is_listed(request, rules) and is_one_site:
        return
    if is_foreign(request, lambda: {own_origin(request)}):
        raise _foreign()


def is_listed(request: web.Request, rules: Rules) -> bool:
    """Whether the request comes from exactly one origin, one of server.allowed_origins."""
    origins = request.headers.getall("Origin", [])
    return len(origins) == 1 and origins[0] in rules.origins


def _foreign() -> Refusal:
    hint = "list it in server.allowed_origins"
    return Refusal(403, "foreign_origin", f"pages of that origin may not call. hint: {hint}")


def check_key(request: web.Request, rules: Rules) -> None:
    if not has_key(request, rules):
        raise Refusal(
            401,
            "invalid_api_key",
            "the key is missing or wrong. hint: send Authorization: Bearer KEY",
            {"WWW-Authenticate": "Bearer"},
        )


def has_key(request: web.Request, rules: Rules) -> bool:
    """Whether the request carries the key, once, as a bearer; true where no key is needed."""
    if rules.key_digest is None:
        return True
    values = request.headers.getall("Authorization", [])
    scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    given = sha256(token.encode("utf-8", "surrogateescape")).digest()
    return hmac.compare_digest(given, rules.key_digest) and scheme.lower() == "bearer"


# --- CORS, for listed origins alone ------------------------------------------------------------


def is_preflight(request: web.Request) -> bool:
    asks = "Origin" in request.headers and "Access-Control-Request-Method" in request.headers
    return request.method == "OPTIONS" and asks


def preflight_reply(request: web.Request, rules: Rules) -> web.Response:
    """What a listed page's script may send; a browser asks this before it sends. No key in it."""
    if not is_listed(request, rules):
        raise _foreign()
    headers = {
        "Access-Control-Allow-Methods": ALLOWED_METHODS,
        "Access-Control-Allow-Headers": ", ".join((*ALLOWED_HEADERS, *_client_headers(request))),
        "Access-Control-Max-Age": str(PREFLIGHT_MAX_AGE_S),
    }
    if request.headers.get("Access-Control-Request-Private-Network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return web.Response(status=204, headers=headers)


def _client_headers(request: web.Request) -> list[str]:
    """Those that OpenAI's own client for JavaScript adds, of the ones asked for."""
    asked = request.headers.get("Access-Control-Request-Headers", "").lower().split(",")
    return [name.strip() for name in asked if _CLIENT_HEADER.fullmatch(name.strip())]


def cors_headers(request: web.Request, rules: Rules) -> Mapping[str, str]:
    """What lets a listed page read the reply, errors included."""
    if not rules.origins:
        return {}
    if not is_listed(request, rules):
        return {"Vary": "Origin"}
    return {
        "Vary": "Origin",
        "Access-Control-Allow-Origin": request.headers["Origin"],
        "Access-Control-Expose-Headers": EXPOSED_HEADERS,
    }
