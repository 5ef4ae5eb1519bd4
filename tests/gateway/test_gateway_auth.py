"""Who may do what at the gateway, cell by cell; and every other way in, closed."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mlx_worker.errors import TooManyTries
from mlx_worker.gateway.auth import LoginLimits, Logins, network_of
from mlx_worker.gateway.records import ALLOWED, PERMISSIONS
from mlx_worker.gateway.store import SESSION_S
from tests.gateway.office import COOKIE, NEW, Clock, Office, enrol, opened


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def office(tmp_path: Path, clock: Clock) -> AsyncIterator[Office]:
    async with opened(tmp_path, now_s=clock) as office:
        yield office


# --- the table --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """permission None: any key of an organisation. target: what its path names."""

    method: str
    path: str
    permission: str | None
    ok: int
    body: Any = None
    target: str | None = None


ORGANISATIONS = (
    Endpoint("GET", "/api/v1/me", None, 200),
    Endpoint("GET", "/api/v1/workers", "view_workers", 200),
    Endpoint("POST", "/api/v1/workers", "manage_workers", 201, {"name": "new"}),
    Endpoint("GET", "/api/v1/workers/{id}", "view_workers", 200, target="worker"),
    Endpoint("DELETE", "/api/v1/workers/{id}", "manage_workers", 204, target="worker"),
    Endpoint(
        "PATCH", "/api/v1/workers/{id}/speculative-decoding", "manage_workers", 202,
        {"mode": "off"}, "worker",
    ),
    Endpoint(
        "PATCH", "/api/v1/workers/{id}/settings", "manage_workers", 202,
        {"kv_prefix_cache": False}, "worker",
    ),
    Endpoint("GET", "/api/v1/usage", "view_usage", 200),
    Endpoint("GET", "/api/v1/usage?format=csv", "view_usage", 200),
    Endpoint("GET", "/api/v1/keys", "manage_keys", 200),
    Endpoint("POST", "/api/v1/keys", "manage_keys", 201, {"name": "k", "role": "member"}),
    Endpoint("DELETE", "/api/v1/keys/{id}", "manage_keys", 204, target="key"),
    Endpoint("GET", "/api/v1/audit", "manage_keys", 200),
)  # fmt: skip
PLATFORM = (
    Endpoint("PATCH", "/api/v1/platform/speculative-decoding", "platform", 200, {"mode": "off"}),
    Endpoint("GET", "/api/v1/platform/organisations", "platform", 200),
    Endpoint(
        "PATCH", "/api/v1/platform/organisations/{id}", "platform", 200,
        {"is_speculation_available": True}, "organisation",
    ),
)  # fmt: skip
ANYONE = (Endpoint("GET", "/health", None, 200), Endpoint("GET", "/openapi.json", None, 200))
EVERY = ORGANISATIONS + PLATFORM
Cells = dict[tuple[str, str, bool], int]


async def target_of(office: Office, endpoint: Endpoint, is_own: bool) -> str:
    """A new one each time, as some cells delete it."""
    store = office.store
    id = office.organisation.id
    if not is_own:
        id = office.others.setdefault("id", None) or (await store.add_organisation("other")).id
        office.others["id"] = id
    match endpoint.target:
        case "worker":
            return (await enrol(store, office.fleet, id, "one", NEW))[0].id
        case "key":
            return (await store.add_key(id, "one"))[0].id
        case _:
            return id


async def cells(office: Office, **options: Any) -> Cells:
    """The status of every endpoint, for own and another organisation's targets."""
    found: Cells = {}
    for endpoint in EVERY:
        for is_own in (True, False) if endpoint.target else (True,):
            id = await target_of(office, endpoint, is_own)
            path = endpoint.path.replace("{id}", id)
            reply = await office.ask(endpoint.method, path, endpoint.body, **options)
            found[endpoint.method, endpoint.path, is_own] = reply.status
    return found


def expected(permissions: frozenset[str]) -> Cells:
    """What a key with these permissions is answered."""
    found: Cells = {}
    for endpoint in EVERY:
        for is_own in (True, False) if endpoint.target else (True,):
            may = endpoint.permission is None or endpoint.permission in permissions
            status = endpoint.ok if is_own else 404
            if endpoint.permission == "platform":
                status = endpoint.ok
            found[endpoint.method, endpoint.path, is_own] = status if may else 403
    return found


@pytest.mark.parametrize("way", ["bearer", "session"])
@pytest.mark.parametrize("extra", [None, *PERMISSIONS])
@pytest.mark.parametrize("role", ALLOWED)
async def test_a_key_does_what_its_role_and_permissions_say(
    office: Office, role: Any, extra: Any, way: str
):
    """Each endpoint, own and another's, as a bearer and through the console's session."""
    more = () if extra is None else (extra,)
    secret = await office.key(role, *more)
    options: dict[str, Any] = {"key": secret}
    if way == "session":
        signed_in = await office.sign_in(secret)
        options = {"key": None, "headers": office.session(signed_in.cookie)}
    assert await cells(office, **options) == expected(ALLOWED[role] | set(more))


async def test_a_platform_key_does_what_the_platform_does(office: Office):
    """Nothing of any organisation's; of the audit it sees its own."""
    secret = await office.key("owner", of=None)
    wanted = {cell: 403 for cell in expected(frozenset())} | {
        cell: status
        for cell, status in expected(frozenset({"platform"})).items()
        if "/platform/" in cell[1]
    }
    assert await cells(office, key=secret) == wanted | {("GET", "/api/v1/audit", True): 200}


@pytest.mark.parametrize("kind", ["none", "worker", "wrong", "revoked", "basic", "twice"])
async def test_who_has_no_key_gets_nothing(office: Office, kind: str):
    """401 wherever a key is needed, before anything is looked up."""
    key, headers = None, {}
    if kind == "worker":
        key = office.worker_key
    elif kind == "wrong":
        key = "mwk_" + "A" * 43
    elif kind == "revoked":
        made, key = await office.store.add_key(office.organisation.id, "gone", "owner")
        await office.store.revoke_key(office.organisation.id, made.id)
    elif kind == "basic":
        headers = {"Authorization": f"Basic {office.secret}"}
    elif kind == "twice":
        key = f"{office.secret} {office.secret}"
    found = await cells(office, key=key, headers=headers)
    assert set(found.values()) == {401}
    for endpoint in ANYONE:
        assert (await office.get(endpoint.path, key=key, headers=headers)).status == 200


async def test_a_401_says_how_to_sign_in(office: Office):
    """In the common shape, with the header that clients look for."""
    reply = await office.get("/api/v1/me", key=None)
    assert (reply.status, reply.code) == (401, "not_signed_in")
    assert reply.headers["WWW-Authenticate"] == "Bearer"


async def test_another_organisations_worker_reads_like_none(office: Office):
    """Word for word, but for the id."""
    two = await office.store.add_organisation("other")
    theirs, _ = await office.store.add_worker(two.id, "theirs")
    other = await office.get(f"/api/v1/workers/{theirs.id}")
    none = await office.get(f"/api/v1/workers/{'0' * 16}")
    assert other.status == none.status == 404
    assert other.body.replace(theirs.id.encode(), b"0" * 16) == none.body


# --- no key gives what it hasn't --------------------------------------------------------------


async def test_a_key_gives_no_more_than_it_has(office: Office):
    """Neither by role nor by permission, and the refusal names what is missing."""
    secret = await office.key("member", "manage_keys")
    for body in (
        {"name": "x", "role": "operator"},
        {"name": "x", "role": "owner"},
        {"name": "x", "role": "member", "permissions": ["manage_workers"]},
    ):
        reply = await office.ask("POST", "/api/v1/keys", body, key=secret)
        assert (reply.status, reply.code) == (403, "not_permitted")
        assert "manage_workers" in reply.json()["error"]["message"]


async def test_a_key_revokes_none_that_has_more(office: Office):
    """Else a helper could lock the owners out."""
    await office.store.add_key(office.organisation.id, "second", "owner")
    secret = await office.key("member", "manage_keys")
    path = f"/api/v1/keys/{office.owner.id}"
    assert (await office.ask("DELETE", path, key=secret)).status == 403
    assert await office.store.key_of(office.secret) is not None


async def test_the_last_owners_key_is_not_revoked(office: Office):
    """With what to do first."""
    reply = await office.ask("DELETE", f"/api/v1/keys/{office.owner.id}")
    assert (reply.status, reply.code) == (409, "last_owner_key")


# --- the console's session --------------------------------------------------------------------


async def test_the_cookie_is_for_the_browser_alone(office: Office):
    """No script reads it, no other site sends it, and it holds no key."""
    reply = await office.sign_in()
    flags = reply.headers["Set-Cookie"].split("; ")
    assert reply.status == 204
    assert {"HttpOnly", "SameSite=Strict", "Path=/", f"Max-Age={int(SESSION_S)}"} <= set(flags)
    assert "Secure" not in flags  # plain text on this machine itself
    assert re.fullmatch(r"[\w-]{43}", reply.cookie)
    assert reply.body == b""


async def test_the_cookie_is_secure_off_loopback(tmp_path: Path):
    """Whatever the proxy says of the scheme."""
    async with opened(tmp_path, behind_proxy=True, allowed_hosts=("fleet.example",)) as office:
        for headers in (
            {"Host": "fleet.example"},
            {"X-Forwarded-Host": "fleet.example", "X-Forwarded-Proto": "https"},
            {"X-Forwarded-Proto": "https"},
        ):
            body = {"key": office.secret}
            reply = await office.ask("POST", "/api/v1/session", body, key=None, headers=headers)
            assert "Secure" in reply.headers["Set-Cookie"]


@pytest.mark.parametrize("kind", ["wrong", "platform", "worker", "empty", "long"])
async def test_only_an_organisations_key_signs_in(office: Office, kind: str):
    """No cookie is set otherwise."""
    secret = {
        "wrong": "mwk_" + "A" * 43,
        "platform": await office.key("owner", of=None),
        "worker": office.worker_key,
        "empty": " ",
        "long": "mwk_" * 10_000,
    }[kind]
    reply = await office.sign_in(secret)
    assert (reply.status, "Set-Cookie" in reply.headers) == (401, False)


async def test_a_session_is_over_after_twelve_hours(office: Office, clock: Clock):
    """Whether or not it was used."""
    cookie = office.session((await office.sign_in()).cookie)
    clock.now_s += SESSION_S - 1
    assert (await office.get("/api/v1/me", key=None, headers=cookie)).status == 200
    clock.now_s += 1
    reply = await office.get("/api/v1/me", key=None, headers=cookie)
    assert (reply.status, reply.json()["error"]["message"]) == (
        401, "the session is over. hint: sign in again",
    )  # fmt: skip


async def test_signing_out_ends_the_session(office: Office):
    """On our side too, so that a kept cookie opens nothing."""
    cookie = office.session((await office.sign_in()).cookie)
    reply = await office.ask("DELETE", "/api/v1/session", key=None, headers=cookie)
    assert reply.status == 204
    assert f'{COOKIE}=""' in reply.headers["Set-Cookie"]
    assert (await office.get("/api/v1/me", key=None, headers=cookie)).status == 401


async def test_signing_in_again_ends_the_session_before(office: Office):
    """A cookie that was planted can't be gone on with."""
    old = office.session((await office.sign_in()).cookie)
    body = {"key": office.secret}
    await office.ask("POST", "/api/v1/session", body, key=None, headers=old)
    assert (await office.get("/api/v1/me", key=None, headers=old)).status == 401


async def test_a_revoked_keys_session_is_over(office: Office):
    """At once."""
    secret = await office.key("member")
    cookie = office.session((await office.sign_in(secret)).cookie)
    made = await office.store.key_of(secret)
    assert made is not None
    await office.ask("DELETE", f"/api/v1/keys/{made.id}")
    assert (await office.get("/api/v1/me", key=None, headers=cookie)).status == 401


async def test_a_wrong_bearer_is_not_mended_by_a_cookie(office: Office):
    """The header says who asks."""
    cookie = office.session((await office.sign_in()).cookie)
    assert (await office.get("/api/v1/me", key="mwk_wrong", headers=cookie)).status == 401


# --- pages of other origins -------------------------------------------------------------------

CHANGES = ({}, {"Origin": "OWN"}, {"X-CSRF": "1"}, {"Sec-Fetch-Site": "same-origin"})
FOREIGN = (
    {"Origin": "https://evil.example", "X-CSRF": "1"},
    {"Origin": "null", "X-CSRF": "1"},
    {"Origin": "OWN", "Sec-Fetch-Site": "cross-site", "X-CSRF": "1"},
    {"Origin": "OWN", "Sec-Fetch-Site": "same-site", "X-CSRF": "1"},
    {"Sec-Fetch-Site": "none", "X-CSRF": "1"},
)


@pytest.mark.parametrize("sent", [*CHANGES, *FOREIGN], ids=str)
async def test_a_change_through_a_session_is_our_own_pages_alone(
    office: Office, sent: dict[str, str]
):
    """Own origin and the header that no form sends; either alone changes nothing."""
    cookie = office.session((await office.sign_in()).cookie)["Cookie"]
    headers = {"Cookie": cookie, **{k: v.replace("OWN", office.url) for k, v in sent.items()}}
    reply = await office.ask("POST", "/api/v1/workers", {"name": "x"}, key=None, headers=headers)
    assert (reply.status, reply.code in ("csrf", "foreign_origin")) == (403, True)
    assert len(await office.store.workers(office.organisation.id)) == 1


async def test_a_change_through_a_session_of_our_page_is_made(office: Office):
    """With Origin, or with what browsers say instead."""
    cookie = office.session((await office.sign_in()).cookie)
    body = {"name": "x"}
    assert (
        await office.ask("POST", "/api/v1/workers", body, key=None, headers=cookie)
    ).status == 201
    headers = {"Cookie": cookie["Cookie"], "Sec-Fetch-Site": "same-origin", "X-CSRF": "1"}
    assert (
        await office.ask("POST", "/api/v1/workers", body, key=None, headers=headers)
    ).status == 201


async def test_a_foreign_page_signs_nobody_in(office: Office):
    """Else it could have its victim work in an organisation of its own."""
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        body = {"key": office.secret}
        reply = await office.ask("POST", "/api/v1/session", body, key=None, headers=headers)
        assert reply.status == 403


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""],
)
async def test_a_form_changes_nothing(office: Office, kind: str):
    """A body that isn't JSON is not read."""
    headers = {"Content-Type": kind}
    body = b'{"name": "x"}'
    reply = await office.ask("POST", "/api/v1/workers", body, headers=headers)
    assert (reply.status, reply.code) == (415, "unsupported_media_type")


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost:1", "0.0.0.0"]
)
async def test_a_rebound_name_is_refused(office: Office, host: str):
    """For everything, the health too."""
    reply = await office.get("/health", key=None, headers={"Host": host})
    assert (reply.status, reply.code) == (421, "wrong_host")


@pytest.mark.parametrize("host", ["a b", "http://x", "", "[::1"])
async def test_a_host_that_is_none_is_refused(office: Office, host: str):
    """Before anything else is looked at."""
    assert (await office.get("/health", key=None, headers={"Host": host})).status == 400


async def test_a_listed_name_is_ours(tmp_path: Path):
    """With any port, or with the one that is listed."""
    async with opened(tmp_path, allowed_hosts=("fleet.example", "x.example:1")) as office:
        for host, status in (
            ("fleet.example", 200), ("FLEET.example:99", 200), ("x.example:1", 200),
            ("x.example:2", 421), ("localhost", 200),
        ):  # fmt: skip
            reply = await office.get("/health", key=None, headers={"Host": host})
            assert (host, reply.status) == (host, status)


async def test_forwarded_headers_count_only_behind_a_proxy(tmp_path: Path):
    """A client that plays the proxy gains nothing."""
    headers = {"X-Forwarded-Host": "fleet.example", "Origin": "https://fleet.example"}
    headers["X-Forwarded-Proto"] = "https"
    async with opened(tmp_path / "a", allowed_hosts=("fleet.example",)) as office:
        assert (await office.get("/api/v1/me", headers=headers)).status == 403
    proxied = {"allowed_hosts": ("fleet.example",), "behind_proxy": True}
    async with opened(tmp_path / "b", **proxied) as office:
        assert (await office.get("/api/v1/me", headers=headers)).status == 200
        for host in ("evil.example", "fleet.example, evil.example"):
            reply = await office.get("/health", headers={"X-Forwarded-Host": host})
            assert reply.status in (400, 421)


# --- wrong keys -------------------------------------------------------------------------------


async def test_too_many_wrong_keys_have_to_wait(tmp_path: Path):
    """Then the right one too; and the refusal says how long."""
    async with opened(tmp_path, limits=LoginLimits(per_address=3, window_s=60)) as office:
        wrong = "mwk_" + "A" * 43
        for _ in range(2):
            await office.sign_in()  # right ones don't count
        assert [(await office.sign_in(wrong)).status for _ in range(4)] == [401, 401, 401, 429]
        reply = await office.sign_in()
        assert (reply.status, reply.code) == (429, "too_many_tries")
        assert 1 <= int(reply.headers["Retry-After"]) <= 60
        assert (await office.get("/api/v1/me")).status == 200  # bearers are not concerned


async def test_tries_at_once_are_counted_before_they_are_answered(tmp_path: Path):
    """A hundred connections are no way round the limit."""
    async with opened(tmp_path, limits=LoginLimits(per_address=5)) as office:
        tries = (office.sign_in("mwk_" + "A" * 43) for _ in range(30))
        found = [reply.status for reply in await asyncio.gather(*tries)]
        assert (found.count(401), found.count(429)) == (5, 25)


async def test_behind_a_proxy_each_client_has_its_own_count(tmp_path: Path):
    """As the proxy's last word says; what the client wrote before it doesn't count."""
    limits = LoginLimits(per_address=1)
    async with opened(tmp_path, limits=limits, behind_proxy=True) as office:

        async def tried(forwarded: str) -> int:
            headers = {"X-Forwarded-For": forwarded}
            body = {"key": "wrong"}
            return (
                await office.ask("POST", "/api/v1/session", body, key=None, headers=headers)
            ).status

        assert await tried("6.6.6.6, 1.1.1.1") == 401
        assert await tried("7.7.7.7, 1.1.1.1") == 429
        assert await tried("2.2.2.2") == 401


def test_tries_are_forgotten_after_their_window():
    """By address, and in all; a whole IPv6 network counts as one."""
    clock = Clock(0.0)
    logins = Logins(LoginLimits(per_address=2, in_all=3, window_s=10), clock)
    logins.begin("2001:db8::1")
    clock.now_s = 4
    logins.begin("2001:db8::2")
    with pytest.raises(TooManyTries) as refused:
        logins.begin("2001:db8::3")
    assert refused.value.retry_after_s == 6
    begun = logins.begin("1.1.1.1")
    with pytest.raises(TooManyTries):
        logins.begin("2.2.2.2")
    logins.forgive(begun)
    logins.begin("2.2.2.2")
    clock.now_s = 10
    logins.begin("2001:db8::3")
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") == "2001:db8::"


# --- what is written down ---------------------------------------------------------------------


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG, logger="mlx_worker"):
        yield caplog


async def test_no_key_is_in_a_log_or_in_a_reply(office: Office, logged: pytest.LogCaptureFixture):
    """Neither in a header, a query nor a body, right or wrong."""
    token = (await office.sign_in()).cookie
    wrong = "mwk_" + "Z" * 43
    replies = [
        await office.sign_in(wrong),
        await office.get("/api/v1/me", key=wrong),
        await office.get(f"/api/v1/usage?key={wrong}"),
        await office.get("/api/v1/keys"),
        await office.get("/api/v1/workers"),
        await office.get("/api/v1/audit"),
        await office.get("/api/v1/me", key=None, headers=office.session(token)),
    ]
    written = "\n".join(record.getMessage() for record in logged.records)
    lines = [json.loads(r.getMessage()) for r in logged.records if r.name == "mlx_worker.access"]
    assert len(lines) == 8
    for secret in (office.secret, office.worker_key, wrong, token):
        assert secret[8:] not in written
        assert not any(secret[8:].encode() in reply.body for reply in replies)


async def test_every_reply_has_the_headers_that_close_the_page(office: Office):
    """No frame around it, no script in it, nothing kept."""
    for reply in (await office.get("/api/v1/me"), await office.get("/api/v1/me", key=None)):
        assert reply.headers["X-Frame-Options"] == "DENY"
        assert reply.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert reply.headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in reply.headers


async def test_a_mistake_of_ours_shows_nothing_of_itself(tmp_path: Path):
    """500, with the id under which the log has it."""

    async def broken(request: web.Request) -> web.Response:
        raise RuntimeError("mwk_secret")

    async with opened(tmp_path, routes=[web.get("/broken", broken)]) as office:
        reply = await office.get("/broken")
    assert (reply.status, b"mwk_secret" in reply.body) == (500, False)
