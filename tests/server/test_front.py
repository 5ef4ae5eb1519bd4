"""What every request and reply has in common: errors' shape, limits, ids, headers, log lines."""

import asyncio
import gzip
import json
import logging
from typing import Any

import pytest
from aiohttp import web

from mlx_worker import errors
from mlx_worker.http.keys import REQUEST_ID
from mlx_worker.http.replies import MAX_BODY_BYTES
from tests.server.local import (
    BEARER,
    ECHO,
    JSON,
    KEY,
    KEYED,
    PAGE,
    Reply,
    lines,
    read_reply,
    serving,
)

SECRET = "/Users/somebody/models/secret.safetensors"


def failing(error: BaseException) -> list[web.RouteDef]:
    """A route that raises."""

    async def fail(request: web.Request) -> web.Response:
        raise error

    return [web.get("/fail", fail)]


def head(port: int, *headers: str, path: str = "/echo") -> bytes:
    return lines(f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", JSON, *headers)


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(one.message) for one in caplog.records if one.name == "mlx_worker.access"]


# --- errors -----------------------------------------------------------------------------------


async def test_an_unknown_path_is_404_in_our_shape():
    """By any method that may come in."""
    async with serving() as local:
        for reply in (await local.get("/nothing"), await local.post(JSON, path="/nothing")):
            assert (reply.status, reply.code) == (404, "not_found")
            assert reply.json()["error"]["type"] == "invalid_request_error"
            assert reply.json()["error"]["param"] is None


async def test_a_wrong_method_is_405_and_says_which_are_right():
    """In Allow, as RFC 9110 asks, and in the message."""
    async with serving() as local:
        reply = await local.post(JSON, path="/status")
        assert (reply.status, reply.code) == (405, "method_not_allowed")
        assert reply.headers["allow"] == "GET, HEAD"
        assert "GET, HEAD" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "code", "param", "kind"),
    [
        (errors.UnknownModel("x", ["demo"]), 404, "model_not_found", "model", "invalid_request"),
        (errors.ContextTooLong(tokens=9, limit=8), 400, "context_length_exceeded", "messages",
         "invalid_request"),
        (errors.InvalidParameter("n", 9, "1 to 8"), 400, "invalid_parameter", "n",
         "invalid_request"),
        (errors.EngineDied("the engine ended"), 500, "engine_died", None, "server"),
        (errors.GenerationFailed("NaN"), 500, "generation_failed", None, "server"),
        (errors.LinkLost("gone"), 502, "link_lost", None, "server"),
    ],
)  # fmt: skip
async def test_an_error_of_the_world_has_its_own_status_and_code(
    error: errors.WorkerError, status: int, code: str, param: str | None, kind: str
):
    """With the message that a person reads at every door."""
    async with serving(routes=failing(error)) as local:
        reply = await local.get("/fail")
        assert (reply.status, reply.code) == (status, code)
        shown = reply.json()["error"]
        assert (shown["message"], shown["param"]) == (str(error), param)
        assert shown["type"] == f"{kind}_error"


@pytest.mark.parametrize(("wait_s", "header"), [(0.0, "1"), (1.2, "2"), (30, "30")])
async def test_a_busy_worker_says_when_to_come_back(wait_s: float, header: str):
    """Retry-After in whole seconds, rounded up, and never at once."""
    busy = errors.Overloaded("requests waiting: 8, limit 8", retry_after_s=wait_s)
    async with serving(routes=failing(busy)) as local:
        reply = await local.get("/fail")
        assert (reply.status, reply.code) == (503, "overloaded")
        assert reply.headers["retry-after"] == header


@pytest.mark.parametrize(
    "bug", [RuntimeError(SECRET), TimeoutError(SECRET), ConnectionError(SECRET), KeyError(SECRET)]
)
async def test_a_mistake_of_ours_shows_nothing_but_its_id(
    bug: Exception, caplog: pytest.LogCaptureFixture
):
    """The log has the traceback under that id."""
    async with serving(routes=failing(bug)) as local:
        reply = await local.get("/fail", "X-Request-Id: find.me")
        assert (reply.status, reply.code) == (500, "internal_error")
        assert SECRET.encode() not in reply.body
        assert b"Traceback" not in reply.body
        assert "find.me" in reply.json()["error"]["message"]
        logged = [one for one in caplog.records if "find.me failed" in one.message]
        assert len(logged) == 1
        assert logged[0].exc_info
        assert logged[0].exc_info[1] is bug
        assert (await local.get("/health")).status == 200


@pytest.mark.parametrize(
    "garbage",
    [b"garbage\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
     b"GET /health HTTP/9.9\r\n\r\n", b"GET /health HTTP/1.1\r\nHost localhost\r\n\r\n",
     b"GET /health HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n",
     b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: \x00\r\n\r\n",
     b"GET /health HTTP/1.1\r\nHost: localhost\r\nBad Name: 1\r\n\r\n",
     b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
     b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
     b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
     b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
     b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
     b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
)  # fmt: skip
async def test_what_is_no_request_is_400_in_our_shape(garbage: bytes):
    """With the headers of every reply, without a word of what came; then the line is closed."""
    async with serving() as local:
        reply = await local.send(garbage)
        assert (reply.status, reply.code) == (400, "bad_request")
        assert reply.json()["error"]["message"] == "the request is not valid HTTP"
        assert_dressed(reply)
        assert await local.is_closed_after(garbage)
        assert (await local.get("/health")).status == 200


async def test_a_key_in_a_broken_request_is_not_logged(caplog: pytest.LogCaptureFixture):
    """aiohttp quotes what it can't read; it must not get to."""
    caplog.set_level(logging.DEBUG)
    async with serving(**KEYED) as local:
        for broken in (f"{BEARER}\x00", f"{KEY}: x y\x00", f"Authorization {KEY}"):
            assert (await local.send(lines("GET / HTTP/1.1", broken))).status == 400
        assert (await local.send(lines(f"GET {KEY} HTTP/1.1", "Host: localhost"))).status == 400
    assert KEY not in caplog.text
    assert "Traceback" not in caplog.text


async def test_an_unknown_expectation_is_417_in_our_shape(caplog: pytest.LogCaptureFixture):
    """aiohttp answers these before any middleware; the reply still looks like ours."""
    caplog.set_level(logging.INFO, "mlx_worker.access")
    async with serving() as local:
        reply = await local.post(JSON, "Expect: a miracle", "X-Request-Id: hopeful")
        assert (reply.status, reply.code) == (417, "expectation_failed")
        assert reply.headers["x-request-id"] == "hopeful"
        assert_dressed(reply)
    assert [line["status"] for line in access_lines(caplog)] == [417]


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on():
    """curl does so for long bodies."""
    async with serving() as local:
        start = head(local.port, "Expect: 100-continue", "Content-Length: 2")
        reader, writer = await asyncio.open_connection(local.host, local.port)
        writer.write(start)
        assert (await read_reply(reader)).status == 100
        writer.write(b"{}")
        assert (await read_reply(reader)).status == 200
        writer.close()


# --- bodies -----------------------------------------------------------------------------------


async def test_a_body_of_the_largest_size_is_read():
    """16 MiB, and not a byte more."""
    async with serving() as local:
        reply = await local.post(JSON, body=b"a" * MAX_BODY_BYTES)
        assert reply.json()["length"] == MAX_BODY_BYTES


async def test_a_body_that_says_it_is_too_long_is_not_read():
    """The reply comes before the body does, from any route."""
    async with serving() as local:
        for path in ("/echo", "/nothing"):
            length = f"Content-Length: {MAX_BODY_BYTES + 1}"
            reply = await local.send(head(local.port, length, path=path), b"a")
            assert (reply.status, reply.code) == (413, "body_too_large")
            assert "16,777,216" in reply.json()["error"]["message"]


async def test_a_chunked_body_is_counted_while_it_is_read():
    """It names no length, so only reading tells; it ends one byte past the limit."""
    chunk = b"100000\r\n" + b"a" * 2**20 + b"\r\n"
    async with serving() as local:
        start = head(local.port, "Transfer-Encoding: chunked")
        whole = await local.send(start, *[chunk] * 16, b"0\r\n\r\n")
        assert whole.json()["length"] == MAX_BODY_BYTES
        reply = await local.send(start, *[chunk] * 16, b"1\r\na\r\n", b"0\r\n\r\n")
        assert (reply.status, reply.code) == (413, "body_too_large")


async def test_a_compressed_body_counts_at_its_full_size():
    """A small file that unpacks to a huge one is refused, in bounded memory."""
    small = gzip.compress(b"a" * (MAX_BODY_BYTES + 1))
    assert len(small) < 50_000
    async with serving() as local:
        reply = await local.post(JSON, "Content-Encoding: gzip", body=small)
        assert (reply.status, reply.code) == (413, "body_too_large")
        fine = await local.post(JSON, "Content-Encoding: gzip", body=gzip.compress(b"{}"))
        assert fine.json()["length"] == 2


@pytest.mark.parametrize(
    ("header", "body"),
    [("Transfer-Encoding: chunked", b"zz\r\n{}\r\n"),
     ("Content-Encoding: gzip\r\nContent-Length: 4", b"nope")],
)  # fmt: skip
async def test_a_body_that_belies_its_headers_is_400(header: str, body: bytes):
    """It is the client's mistake, not ours."""
    async with serving() as local:
        reply = await local.send(head(local.port, header), body)
        assert (reply.status, reply.code) == (400, "bad_request")


# --- ids and headers --------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["a", "req-1_2.3", "A" * 64])
async def test_a_clients_own_id_is_kept(given: str):
    """So that its log and ours can be laid side by side."""
    async with serving() as local:
        reply = await local.get("/health", f"X-Request-Id: {given}")
        assert reply.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "A" * 65, "a b", "a\tb", "é", "<script>", "a,b", '"', "a/b"])
async def test_an_id_that_is_no_plain_word_is_replaced(given: str):
    """It stands in headers and logs, so it can't be just anything."""
    async with serving() as local:
        reply = await local.get("/health", f"X-Request-Id: {given}")
        assert len(reply.headers["x-request-id"]) == 32
        twice = await local.get("/health", "X-Request-Id: a", "X-Request-Id: a")
        assert twice.headers["x-request-id"] != "a"


async def test_every_request_has_its_own_id_and_the_handler_knows_it():
    """The reply says the same id as the handler saw."""

    async def tell(request: web.Request) -> web.Response:
        return web.json_response(request[REQUEST_ID])

    async with serving(routes=[web.get("/tell", tell)]) as local:
        replies = [await local.get("/tell") for _ in range(3)]
        ids = [reply.headers["x-request-id"] for reply in replies]
        assert [reply.json() for reply in replies] == ids
        assert len(set(ids)) == 3


def assert_dressed(reply: Reply, policy: str = "default-src 'none'; frame-ancestors 'none'"):
    expected = {
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "x-frame-options": "DENY",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
        "server": "mlx-worker",
        "content-security-policy": policy,
    }
    assert {name: reply.headers.get(name) for name in expected} == expected
    assert reply.headers["x-request-id"]


async def test_every_reply_carries_the_safety_headers():
    """Good ones, refusals of every rule, and a preflight's."""
    async with serving(**KEYED, allowed_origins=[PAGE]) as local:
        asks = (f"Origin: {PAGE}", "Access-Control-Request-Method: POST")
        replies = [
            await local.get("/health"),
            await local.get("/metrics", BEARER),
            await local.get("/nothing", BEARER),
            await local.post(JSON, BEARER, path="/status"),
            await local.get("/status"),
            await local.get(host="evil"),
            await local.get("/status", "Origin: null"),
            await local.post(BEARER),
            await local.send(head(local.port, BEARER, f"Content-Length: {2**30}")),
            await local.ask("OPTIONS", "/echo", *asks),
        ]
        statuses = [200, 200, 404, 405, 401, 421, 403, 415, 413, 204]
        assert [reply.status for reply in replies] == statuses
        for reply in replies:
            assert_dressed(reply)


async def test_a_page_may_load_nothing_from_elsewhere():
    """Scripts and styles from us alone, no frames, no forms."""

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<p>", content_type="text/html")

    async with serving(routes=[web.get("/other", page)]) as local:
        reply = await local.get("/other")
        policy = reply.headers["content-security-policy"]
        assert_dressed(reply, policy)
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert (rules["default-src"], rules["script-src"]) == ("'none'", "'self'")
        assert {rules[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {
            "'none'"
        }
        assert "unsafe" not in policy


# --- streams and clients that leave ----------------------------------------------------------


async def test_a_stream_has_the_headers_too():
    """They are put in before its first byte."""

    async def stream(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        await reply.write(b"data: 1\n\n")
        return reply

    async with serving(routes=[web.get("/stream", stream)]) as local:
        assert_dressed(await local.get("/stream"))


async def test_a_stream_that_fails_midway_is_cut_off(caplog: pytest.LogCaptureFixture):
    """The client sees that it is not whole: no second reply in it, no proper end."""

    async def breaking(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        await reply.write(b"begun")
        raise RuntimeError(SECRET)

    async with serving(routes=[web.get("/stream", breaking)]) as local:
        reader, writer = await asyncio.open_connection(local.host, local.port)
        writer.write(lines("GET /stream HTTP/1.1", "Host: localhost"))
        received = await reader.read()
        writer.close()
        assert received.endswith(b"begun\r\n")
        assert received.count(b"HTTP/1.1") == 1
        assert SECRET.encode() not in received
    assert SECRET in caplog.text


async def test_a_handler_is_cancelled_when_its_client_goes(caplog: pytest.LogCaptureFixture):
    """Also before it has written anything; the log shows 499."""
    caplog.set_level(logging.INFO, "mlx_worker.access")
    entered, left = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        entered.set()
        try:
            await asyncio.Event().wait()
            raise AssertionError("nobody sets it")
        finally:
            left.set()

    async with serving(routes=[web.get("/wait", wait)]) as local:
        _, writer = await asyncio.open_connection(local.host, local.port)
        writer.write(lines("GET /wait HTTP/1.1", "Host: localhost"))
        async with asyncio.timeout(5):
            await entered.wait()
            writer.close()
            await left.wait()
            text = await local.get("/metrics")
    assert b'mlx_worker_http_replies_total{route="/wait",status="499"} 1.0' in text.body
    assert [line["status"] for line in access_lines(caplog)] == [499, 200]


async def test_a_client_that_leaves_inside_its_body_is_no_mistake_of_ours(
    caplog: pytest.LogCaptureFixture,
):
    """Nothing is logged as a failure."""
    caplog.set_level(logging.INFO)
    async with serving() as local:
        _, writer = await asyncio.open_connection(local.host, local.port)
        writer.write(head(local.port, "Content-Length: 100") + b"half")
        await writer.drain()
        writer.close()
        async with asyncio.timeout(5):
            while not access_lines(caplog):
                await local.get("/health")
    assert [one for one in caplog.records if one.levelno > logging.INFO] == []


async def test_one_connection_serves_request_after_request():
    """A refusal in between does not end it."""
    async with serving() as local:
        reader, writer = await asyncio.open_connection(local.host, local.port)
        statuses = []
        for headers in ([], ["Origin: null"], []):
            writer.write(lines("GET /health HTTP/1.1", "Host: localhost", *headers))
            statuses.append((await read_reply(reader)).status)
        writer.close()
        assert statuses == [200, 403, 200]


# --- the access log ---------------------------------------------------------------------------


async def test_each_request_has_one_line_in_the_access_log(caplog: pytest.LogCaptureFixture):
    """JSON, with what it was and how it went."""
    caplog.set_level(logging.INFO, "mlx_worker.access")
    async with serving() as local:
        reply = await local.get("/v1/models/org/other?key=hidden", "X-Request-Id: one")
        await local.send(b"garbage\r\n\r\n")
    first, second = access_lines(caplog)
    assert first.pop("ms") >= 0
    assert first == {
        "id": "one",
        "method": "GET",
        "path": "/v1/models/org/other",
        "status": 200,
        "bytes": len(reply.body),
        "is_loopback": True,
    }
    assert (second["status"], len(second["id"])) == (400, 32)


async def test_the_access_log_counts_a_streams_bytes(caplog: pytest.LogCaptureFixture):
    """With its head, as they were written."""
    caplog.set_level(logging.INFO, "mlx_worker.access")

    async def stream(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        reply.content_length = 50_000
        await reply.prepare(request)
        await reply.write(b"a" * 50_000)
        return reply

    async with serving(routes=[web.get("/stream", stream)]) as local:
        assert len((await local.get("/stream")).body) == 50_000
    assert 50_000 <= access_lines(caplog)[0]["bytes"] < 52_000


async def test_no_log_has_keys_bodies_or_queries(caplog: pytest.LogCaptureFixture):
    """At any level, right key or wrong."""
    caplog.set_level(logging.DEBUG)
    wrong = "mwk-wrong-key-0000"
    async with serving(routes=[*ECHO, *failing(RuntimeError("bug"))], **KEYED) as local:
        await local.post(JSON, BEARER, body=b'{"prompt": "a whale named Olga"}')
        await local.post(JSON, f"Authorization: Bearer {wrong}", body=b"Olga")
        await local.get(f"/status?key={KEY}", BEARER)
        await local.get("/fail", BEARER)
        await local.get(f"http://{KEY}@localhost/")
    for hidden in (KEY, wrong, "Olga"):
        assert hidden not in caplog.text
    assert len(access_lines(caplog)) == 5


async def test_a_line_of_the_log_stays_one_line(caplog: pytest.LogCaptureFixture):
    """Whatever is in the path, it is JSON, and not long."""
    caplog.set_level(logging.INFO, "mlx_worker.access")
    async with serving() as local:
        await local.get("/a%0a%0dforged" + "x" * 1000)
        await local.get('/"}{"forged":1')
    first, second = access_lines(caplog)
    assert len(first["path"]) == 200
    assert second["path"] == '/"}{"forged":1'
    assert all("\n" not in one.message for one in caplog.records)
