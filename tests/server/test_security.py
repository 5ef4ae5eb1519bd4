"""Who the local API lets in: every rule refuses what it is for, and lets the honest case pass."""

import socket
from typing import Any

import pytest
from multidict import CIMultiDict

from mlx_worker.config import ServerSection
from mlx_worker.errors import ConfigError
from mlx_worker.http.checks import check_content_type, is_ours, parse_authority
from mlx_worker.http.replies import Refusal
from mlx_worker.server.security import (
    Rules,
    check_host,
    check_key,
    check_origin,
    make_rules,
)
from tests.server.local import BEARER, JSON, KEY, KEYED, PAGE, lines, serving

LISTED: dict[str, Any] = {"allowed_origins": [PAGE]}
CHANGES = ["POST", "PATCH", "PUT", "DELETE"]


# --- Host -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "localhost", "127.0.0.1", "[::1]",
     "[::1]:{port}", "[0:0:0:0:0:0:0:1]:{port}"],
)  # fmt: skip
async def test_loopback_names_are_ours(host: str):
    """With our port or without one, in any case and spelling of the address."""
    async with serving() as local:
        assert (await local.get(host=host.format(port=local.port))).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1.evil.com", "127.0.0.1.evil.com:{port}",
     "localhost.evil", "localhost.evil:{port}", "evil.localhost", "evil-localhost", "xlocalhost",
     "localhost1", "local", "127.0.0.10", "127.0.0.1.", "localhost.", "localhost.:{port}",
     "1127.0.0.1", "127.1", "0", "0.0.0.0", "0.0.0.0:{port}", "2130706433", "0x7f.0.0.1",
     "127.0.0.2", "192.168.1.5:{port}", "[::]", "[::2]", "[::1:1]", "[fe80::1]:{port}",
     "localhost:1", "127.0.0.1:80", "[::1]:65535", "xn--lcalhost-65a"],
)  # fmt: skip
async def test_a_host_that_is_not_ours_is_refused(host: str):
    """A page whose name was pointed at 127.0.0.1 still sends its own name; equality decides."""
    async with serving() as local:
        reply = await local.get(host=host.format(port=local.port))
        assert (reply.status, reply.code) == (421, "wrong_host")


@pytest.mark.parametrize(
    "host",
    ["localhost:{port}@evil", "user@localhost:{port}", "user:pw@localhost", "localhost:", ":{port}",
     "localhost:x", "localhost:+{port}", "localhost:0{port}", "localhost:-1", "localhost:{port}:1",
     "localhost:999999", "localhost/", "localhost/@evil", "localhost\\evil", "http://localhost",
     "localhost, evil", "localhost evil", "evil#localhost", "evil?localhost", "[::1", "::1", "[]",
     "[localhost]", "[::1]evil", "[::1%25lo]", "[::1%lo]", "%6cocalhost", "localhost%00", "*",
     "loc\u00e4lhost", "localhost\t.evil"],
)  # fmt: skip
async def test_a_garbled_host_is_refused(host: str):
    """What is no plain authority is not repaired."""
    async with serving() as local:
        reply = await local.get(host=host.format(port=local.port))
        assert (reply.status, reply.code in ("bad_host", "bad_request")) == (400, True)


@pytest.mark.parametrize(
    "hosts",
    [[], [""], ["localhost", "evil"], ["evil", "localhost"], ["localhost", "localhost"]],
    ids=["none", "empty", "ours first", "ours last", "twice"],
)
async def test_host_must_be_there_exactly_once(hosts: list[str]):
    """Two parties that read two Hosts differently are how rules are slipped."""
    async with serving() as local:
        named = [f"Host: {host}" for host in hosts]
        reply = await local.send(lines("GET /v1/models HTTP/1.1", *named))
        assert (reply.status, reply.code in ("bad_host", "bad_request")) == (400, True)


async def test_an_old_client_must_send_host_too():
    """HTTP/1.0 knows requests without Host; here they are refused."""
    async with serving() as local:
        assert (await local.send(lines("GET /health HTTP/1.0"))).code == "bad_host"
        named = lines("GET /health HTTP/1.0", "Host: localhost")
        assert (await local.send(named)).status == 200


@pytest.mark.parametrize("header", ["X-Forwarded-Host", "X-Host", "Forwarded", "X-Original-Host"])
async def test_no_other_header_stands_in_for_host(header: str):
    """A page can set any of these; they change nothing."""
    async with serving() as local:
        assert (await local.get("/health", f"{header}: localhost", host="evil")).status == 421
        assert (await local.get("/health", f"{header}: evil")).status == 200


@pytest.mark.parametrize(
    "target",
    ["http://evil.example/v1/models", "http://localhost/v1/models", "https://127.0.0.1/",
     "evil.example:443"],
)  # fmt: skip
async def test_a_whole_url_in_the_request_line_is_refused(target: str):
    """It would name another host than Host does, and it would be the one that counts."""
    async with serving() as local:
        method = "CONNECT" if target.endswith(":443") else "GET"
        reply = await local.ask(method, target)
        assert (reply.status, reply.code in ("bad_target", "bad_request")) == (400, True)


async def test_a_listed_host_is_ours():
    """Without a port it stands for any, with one for that one; nothing near it passes."""
    async with serving(allowed_hosts=["Mac.local", "ai.example.com:443"]) as local:
        for host, status in {
            "mac.local": 200, "MAC.LOCAL:9000": 200, "ai.example.com:443": 200,
            "ai.example.com": 421, "ai.example.com:444": 421, "mac.local.evil": 421,
            "xmac.local": 421, "a.mac.local": 421,
        }.items():  # fmt: skip
            assert (await local.get(host=host)).status == status, host


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
async def test_an_address_of_version_6_is_served_by_its_names():
    """[::1] is a loopback host like the other."""
    async with serving(host="::1") as local:
        assert (await local.get(host=f"[::1]:{local.port}")).status == 200
        assert (await local.get(host="[::2]")).status == 421


def rules(host: str, **settings: Any) -> Rules:
    return make_rules(ServerSection(host=host, **settings))


@pytest.mark.parametrize(
    ("bound", "local", "host", "is_own"),
    [
        ("0.0.0.0", ("192.168.1.5", 8321), "192.168.1.5:8321", True),
        ("0.0.0.0", ("192.168.1.5", 8321), "192.168.1.5", True),
        ("0.0.0.0", ("192.168.1.5", 8321), "192.168.1.5:80", False),
        ("0.0.0.0", ("192.168.1.5", 8321), "192.168.1.6:8321", False),
        ("0.0.0.0", ("192.168.1.5", 8321), "0.0.0.0:8321", False),
        ("::", ("::1", 8321), "[::]:8321", False),
        ("::", ("10.0.0.1", 8321), "[::ffff:10.0.0.1]:8321", True),
        ("mac.local", ("192.168.1.5", 8321), "mac.local:8321", True),
        ("mac.local", ("192.168.1.5", 8321), "mac.local.evil:8321", False),
        ("mac.local", ("192.168.1.5", 8321), "amac.local:8321", False),
        ("mac.local", None, "192.168.1.5", False),
        ("mac.local", None, "mac.local:8321", False),
    ],
)
def test_a_server_on_the_network_goes_by_its_name_and_address(
    bound: str, local: tuple[str, int] | None, host: str, is_own: bool
):
    """An address can't be rebound; a wildcard is no name, as browsers take it for this machine."""
    authority = parse_authority(host)
    assert authority is not None
    assert is_ours(authority, local, rules(bound, api_key=KEY)) is is_own


# --- the key ----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "mac.local", "localhost.evil"])
def test_a_host_that_others_reach_needs_a_key(host: str):
    """It does not start without one."""
    with pytest.raises(ConfigError, match=r"server\.api_key is needed"):
        rules(host)
    assert rules(host, api_key=KEY).key_digest


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost", "LOCALHOST"])
def test_a_loopback_host_needs_none(host: str):
    """Only this machine reaches it."""
    assert rules(host).key_digest is None


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/gemma-4", "/status", "/metrics", "/x"])
async def test_with_a_key_every_route_but_health_needs_it(path: str):
    """Paths that don't exist included, so that a stranger can't map them."""
    async with serving(**KEYED) as local:
        reply = await local.get(path)
        assert (reply.status, reply.code) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
        assert (await local.get(path, BEARER)).status == (404 if path == "/x" else 200)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_scheme_may_be_written_in_any_case(scheme: str):
    """RFC 9110 says so; the key itself counts letter by letter."""
    async with serving(**KEYED) as local:
        assert (await local.get("/status", f"Authorization: {scheme} {KEY}")).status == 200
        upper = f"Authorization: {scheme} {KEY.upper()}"
        assert (await local.get("/status", upper)).status == 401


@pytest.mark.parametrize(
    "header",
    ["Authorization:", "Authorization: ", "Authorization: Bearer", "Authorization: Bearer ",
     f"Authorization: {KEY}", f"Authorization: Basic {KEY}", f"Authorization: Bearer{KEY}",
     f"Authorization: Bearer {KEY[:-1]}", f"Authorization: Bearer {KEY[:1]}",
     f"Authorization: Bearer {KEY}x", f"Authorization: Bearer  {KEY}",
     f"Authorization: Bearer {KEY} {KEY}", f"Authorization: Bearer {KEY},",
     f'Authorization: Bearer "{KEY}"', f"Authorization: Bearer {KEY}\u00e9",
     "Authorization: Bearer \u00ff\u00fe", f"Authorization: Bearer\u00a0{KEY}",
     f"X-Api-Key: {KEY}", f"Cookie: api_key={KEY}", f"Proxy-Authorization: Bearer {KEY}"],
)  # fmt: skip
async def test_anything_but_the_key_is_refused(header: str):
    """Part of it, more than it, another scheme, bytes that are no text, another header."""
    async with serving(**KEYED) as local:
        reply = await local.get("/status", header)
        assert (reply.status, reply.code) == (401, "invalid_api_key")


async def test_the_key_may_come_only_once():
    """Beside a wrong one the right one counts for nothing."""
    async with serving(**KEYED) as local:
        for pair in [(BEARER, "Authorization: Bearer x"), ("Authorization: Bearer x", BEARER)]:
            assert (await local.get("/status", *pair)).status in (400, 401)


async def test_the_key_in_the_url_counts_for_nothing():
    """URLs end up in logs and histories."""
    async with serving(**KEYED) as local:
        assert (
            await local.get(f"/status?api_key={KEY}&Authorization=Bearer%20{KEY}")
        ).status == 401


async def test_reading_health_needs_no_key():
    """The same path by another method, or one that merely looks like it, does."""
    async with serving(**KEYED) as local:
        assert (await local.get("/health")).status == 200
        assert (await local.ask("HEAD", "/health")).status == 200
        assert (await local.post(JSON, path="/health")).status == 401
        for path in ("/health/", "/health/../status", "//health", "/health%2f..%2fstatus"):
            assert (await local.get(path)).status == 401, path


async def test_callers_with_the_key_share_a_scope_that_does_not_tell_it():
    """The prefix cache is kept apart by scope; without a key everyone is local."""
    async with serving() as local:
        assert (await local.post(JSON)).json()["scope"] == "local"
    async with serving(**KEYED) as local:
        scope = (await local.post(JSON, BEARER)).json()["scope"]
        assert len(scope) == 32
        assert KEY not in scope


# --- pages: Origin and Sec-Fetch-Site ---------------------------------------------------------

FOREIGN = [
    "https://evil.example", "null", "http://localhost", "http://127.0.0.1", "http://localhost:1",
    "http://127.0.0.1:{port}.evil", "http://127.0.0.1:{port}@evil", "https://127.0.0.1:{port}",
    "http://localhost:{port}", "http://127.0.0.1:{port}/", "HTTP://127.0.0.1:{port}", "*", "",
    "file://", "http://127.0.0.1:{port} https://evil.example", "http://127.0.0.1:{port},null",
    PAGE, f"{PAGE}.evil", f"{PAGE}:443", "chrome-extension://abc",
]  # fmt: skip


@pytest.mark.parametrize("method", CHANGES)
@pytest.mark.parametrize("origin", FOREIGN)
async def test_a_page_of_another_origin_changes_nothing(method: str, origin: str):
    """Whatever the method; another port, scheme or spelling is another origin."""
    async with serving() as local:
        header = f"Origin: {origin.format(port=local.port)}"
        reply = await local.ask(method, "/echo", JSON, header, body=b"{}")
        assert (reply.status, reply.code) == (403, "foreign_origin")


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("path", ["/v1/models", "/status", "/metrics", "/health"])
async def test_a_page_of_another_origin_reads_nothing(path: str, origin: str):
    """It could not see the reply anyway; now there is none."""
    async with serving() as local:
        reply = await local.get(path, f"Origin: {origin.format(port=local.port)}")
        assert (reply.status, reply.code) == (403, "foreign_origin")
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("method", CHANGES)
@pytest.mark.parametrize("site", ["cross-site", "same-site", "", "Same-Origin", "none, cross-site"])
async def test_a_change_from_another_site_is_refused_without_origin_too(method: str, site: str):
    """Some browsers leave Origin out where they still say the site."""
    async with serving() as local:
        reply = await local.ask(method, "/echo", JSON, f"Sec-Fetch-Site: {site}", body=b"{}")
        assert (reply.status, reply.code) == (403, "foreign_origin")


@pytest.mark.parametrize("method", CHANGES)
@pytest.mark.parametrize(
    "headers",
    [[], ["Sec-Fetch-Site: none"], ["Sec-Fetch-Site: same-origin"],
     ["Origin: http://127.0.0.1:{port}"],
     ["Origin: http://127.0.0.1:{port}", "Sec-Fetch-Site: same-origin"],
     ["oRiGiN: http://127.0.0.1:{port}", "SEC-FETCH-SITE: same-origin"]],
)  # fmt: skip
async def test_our_own_page_and_programs_may_change(method: str, headers: list[str]):
    """A program sends neither header; our console sends our origin."""
    async with serving() as local:
        filled = [header.format(port=local.port) for header in headers]
        assert (await local.ask(method, "/echo", JSON, *filled, body=b"{}")).status == 200


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Origin: http://127.0.0.1:{port}", "Origin: https://evil.example"),
        ("Origin: https://evil.example", "Origin: http://127.0.0.1:{port}"),
        (f"Origin: {PAGE}", "Origin: https://evil.example"),
        ("Sec-Fetch-Site: same-origin", "Sec-Fetch-Site: cross-site"),
        ("Origin: http://127.0.0.1:{port}", "Sec-Fetch-Site: cross-site"),
        ("oRIGIN: https://evil.example", "Sec-Fetch-Site: same-origin"),
    ],
)
async def test_headers_that_contradict_each_other_are_refused(first: str, second: str):
    """One that would pass alone does not carry the other."""
    async with serving(**LISTED) as local:
        pair = [header.format(port=local.port) for header in (first, second)]
        assert (await local.post(JSON, *pair)).status in (400, 403)


@pytest.mark.parametrize("method", CHANGES)
async def test_a_listed_page_may_change_and_read(method: str):
    """Also from another site, which a listed page is."""
    async with serving(**LISTED) as local:
        headers = [f"Origin: {PAGE}", "Sec-Fetch-Site: cross-site"]
        reply = await local.ask(method, "/echo", JSON, *headers, body=b"{}")
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert (await local.get("/status", *headers)).status == 200


@pytest.mark.parametrize("origin", [one for one in FOREIGN if one != PAGE])
async def test_listing_one_page_lets_in_no_other(origin: str):
    """By equality; `null` can't be listed."""
    async with serving(**LISTED) as local:
        header = f"Origin: {origin.format(port=local.port)}"
        reply = await local.post(JSON, header)
        assert (reply.status, reply.code) == (403, "foreign_origin")
        assert reply.headers["vary"] == "Origin"
        assert "access-control-allow-origin" not in reply.headers


async def test_a_link_from_another_site_may_open_a_page():
    """A navigation reads nothing for the site that it came from."""
    async with serving() as local:
        assert (await local.get("/status", "Sec-Fetch-Site: cross-site")).status == 200


# --- kinds of body ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", CHANGES)
@pytest.mark.parametrize(
    "kind",
    [None, "", "text/plain", "text/plain; application/json", "text/plain;charset=application/json",
     "application/x-www-form-urlencoded", "multipart/form-data; boundary=application/json",
     "application/jsonx", "application/json-seq", "application/jso", "xapplication/json",
     "text/json", "application/json, text/plain", "text/plain, application/json", "json", "*/*",
     "application/ json", "application/octet-stream", "; application/json"],
)  # fmt: skip
async def test_a_change_that_is_not_json_is_refused(method: str, kind: str | None):
    """A form needs no permission to be sent, but it can't say that it is JSON."""
    async with serving() as local:
        headers = [] if kind is None else [f"Content-Type: {kind}"]
        reply = await local.ask(method, "/echo", *headers, body=b'{"a":1}')
        assert (reply.status, reply.code) == (415, "unsupported_media_type")


@pytest.mark.parametrize("method", CHANGES)
@pytest.mark.parametrize(
    "header",
    ["Content-Type: application/json", "Content-Type: application/json; charset=utf-8",
     "CONTENT-TYPE: Application/JSON ;charset=UTF-8", "content-type:application/json"],
)  # fmt: skip
async def test_a_change_that_is_json_passes(method: str, header: str):
    """With parameters, in any case."""
    async with serving() as local:
        assert (await local.ask(method, "/echo", header, body=b"{}")).status == 200


async def test_two_content_types_are_refused():
    """The right one does not cover for the other."""
    async with serving() as local:
        for pair in [(JSON, "Content-Type: text/plain"), ("Content-Type: text/plain", JSON)]:
            assert (await local.post(*pair)).status in (400, 415)


@pytest.mark.parametrize("header", ["X-HTTP-Method-Override", "X-Method-Override", "X-HTTP-Method"])
async def test_a_header_does_not_change_the_method(header: str):
    """A read that claims to be a change stays a read, and a form stays a form."""
    async with serving() as local:
        assert (await local.get("/echo", f"{header}: DELETE")).status == 405
        assert (await local.post(f"{header}: GET", path="/v1/models")).status == 415


@pytest.mark.parametrize("method", ["post", "Patch", "FOO", "TRACE", "PROPFIND"])
async def test_an_unknown_method_counts_as_a_change(method: str):
    """Methods are words in capitals; others get no further than one would without JSON."""
    async with serving() as local:
        reply = await local.ask(method, "/echo", "Origin: https://evil.example")
        assert reply.status in (400, 403)


# --- CORS -------------------------------------------------------------------------------------

ASKS = "Access-Control-Request-Method: POST"


async def test_a_listed_page_is_told_what_it_may_send():
    """Without the key, which a browser never sends along here."""
    async with serving(**LISTED, **KEYED) as local:
        reply = await local.ask("OPTIONS", "/echo", f"Origin: {PAGE}", ASKS)
        assert reply.status == 204
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert reply.headers["access-control-allow-methods"] == "GET, HEAD, POST, PATCH, DELETE"
        allowed = reply.headers["access-control-allow-headers"].split(", ")
        assert allowed == ["Authorization", "Content-Type", "User-Agent", "X-Request-Id"]
        assert reply.headers["access-control-max-age"] == "600"
        assert reply.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in reply.headers


async def test_a_listed_page_may_use_openais_client():
    """It adds headers of its own; no others that a page asks for are allowed."""
    async with serving(**LISTED) as local:
        asked = "Access-Control-Request-Headers: authorization, x-stainless-os, x-evil, cookie"
        reply = await local.ask("OPTIONS", "/echo", f"Origin: {PAGE}", ASKS, asked)
        names = reply.headers["access-control-allow-headers"].split(", ")
        assert names[4:] == ["x-stainless-os"]


async def test_a_listed_public_page_may_reach_this_machine():
    """A browser asks for that apart, where it guards private addresses."""
    async with serving(**LISTED) as local:
        asked = "Access-Control-Request-Private-Network: true"
        reply = await local.ask("OPTIONS", "/echo", f"Origin: {PAGE}", ASKS, asked)
        assert reply.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("settings", [{}, LISTED])
@pytest.mark.parametrize("origin", ["https://evil.example", "null", f"{PAGE}.evil"])
async def test_an_unlisted_page_is_told_nothing(settings: dict[str, Any], origin: str):
    """Neither with CORS off nor with other pages listed."""
    async with serving(**settings) as local:
        reply = await local.ask("OPTIONS", "/echo", f"Origin: {origin}", ASKS)
        assert (reply.status, reply.code) == (403, "foreign_origin")
        assert not [name for name in reply.headers if name.startswith("access-control-")]


async def test_a_preflight_to_a_wrong_host_is_refused():
    """The Host rule comes first."""
    async with serving(**LISTED) as local:
        reply = await local.ask("OPTIONS", "/echo", f"Origin: {PAGE}", ASKS, host="evil")
        assert reply.status == 421


async def test_options_that_ask_nothing_are_an_ordinary_request():
    """They need the key, and no path takes them."""
    async with serving(**LISTED, **KEYED) as local:
        assert (await local.ask("OPTIONS", "/echo")).status == 401
        assert (await local.ask("OPTIONS", "/echo", BEARER)).status == 405
        assert (await local.ask("OPTIONS", "/echo", f"Origin: {PAGE}")).status == 401


async def test_a_listed_page_can_read_why_it_was_refused():
    """Errors carry the same headers, so that its author sees more than "failed to fetch"."""
    async with serving(**LISTED, **KEYED) as local:
        reply = await local.get("/status", f"Origin: {PAGE}")
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (401, PAGE)
        assert "X-Request-Id" in reply.headers["access-control-expose-headers"]


async def test_without_listed_pages_no_reply_speaks_of_origins():
    """CORS is off, and nothing varies by it."""
    async with serving() as local:
        reply = await local.get("/status", f"Origin: http://127.0.0.1:{local.port}")
        assert reply.status == 200
        assert not {"vary", "access-control-allow-origin"} & reply.headers.keys()


# --- paths ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/v1/models/../../etc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd",
     "/%2e%2e/etc/passwd", "//etc/passwd", "/v1/models/%00", "/v1//models", "/..;/status",
     "/static/../status/x", "/v1/models/\\..\\x"],
)  # fmt: skip
async def test_a_path_leads_nowhere_but_to_a_route(path: str):
    """No file is served, and dots mean nothing."""
    async with serving() as local:
        reply = await local.get(path)
        assert (reply.status, reply.code in ("not_found", "model_not_found")) == (404, True)


class Twice:
    """A request with every header twice, as another parser might pass it on."""

    method = "POST"
    names = ("Host", "Authorization", "Content-Type", "Origin")
    headers = CIMultiDict([(name, "localhost") for name in names * 2])


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (lambda request, keyed: check_host(request, keyed), 400),
        (lambda request, keyed: check_key(request, keyed), 401),
        (lambda request, keyed: check_content_type(request), 415),
        (lambda request, keyed: check_origin(request, keyed), 403),
    ],
)
def test_a_repeated_header_is_refused_by_our_own_rule_too(check: Any, status: int):
    """aiohttp's parser refuses some of them first; ours does not rely on it."""
    with pytest.raises(Refusal) as caught:
        check(Twice(), rules("127.0.0.1", api_key=KEY))
    assert caught.value.status == status
