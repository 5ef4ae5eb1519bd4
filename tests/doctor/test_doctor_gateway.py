"""Reaching a gateway, step by step, over real sockets; and clocks that disagree."""

import errno
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from mlx_worker.doctor import gateway
from mlx_worker.doctor.check import Check
from mlx_worker.doctor.gateway import Reach

LAN = Reach("10.0.0.5", 443, ("10.0.0.5",))
REACHED = replace(LAN, status=401, answered_ms=12.0, skew_s=0.2)
NO_ROUTE = replace(LAN, failed="connection", error="No route to host", number=errno.EHOSTUNREACH)


class Site(BaseHTTPRequestHandler):
    """Answers 401 where the link dials, as a gateway does to who shows no key."""

    ahead_s = 0.0
    is_dated = True
    status = 401

    def do_GET(self) -> None:
        assert "Authorization" not in self.headers, "the key is not for this"
        self.send_response_only(self.status if self.path == "/ws/worker" else 404)
        if self.is_dated:
            self.send_header("Date", formatdate(self.now_s() + self.ahead_s, usegmt=True))
        self.end_headers()

    def now_s(self) -> float:
        import time

        return time.time()

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def serving(**changes: Any) -> Iterator[int]:
    """A web server on this machine; gives its port."""
    server = HTTPServer(("127.0.0.1", 0), type("Changed", (Site,), changes))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def listening(answer: bytes | None) -> Iterator[int]:
    """A server that says this to whoever comes, and closes; None: it says nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            one, _ = server.accept()
            with one:
                one.recv(1000)
                if answer is None:
                    one.recv(1)  # until the other side gives up
                else:
                    one.sendall(answer)

        thread = threading.Thread(target=talk)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            thread.join()


def told(reach: Reach | None, link: Any = None, *, is_mac: bool = False) -> list[Check]:
    return gateway.checks(reach, link, is_mac=is_mac)


# --- looking ----------------------------------------------------------------------------------


def test_a_gateway_that_answers_is_reached_without_the_key():
    """Whatever it answers: that it does is what is asked."""
    with serving() as port:
        reach = gateway.look(f"ws://127.0.0.1:{port}/ws/worker")
    assert (reach.failed, reach.status) == (None, 401)
    assert [one.level for one in told(reach)] == ["ok", "ok"]


@pytest.mark.parametrize("status", [301, 404, 502])
def test_what_answers_but_is_no_gateway_is_a_warning(status: int):
    """Another web server, one that points elsewhere, or a proxy with nobody behind it."""
    with serving(status=status) as port:
        reach = gateway.look(f"ws://127.0.0.1:{port}/ws/worker")
    assert [one.level for one in told(reach)] == ["warning", "ok"]


@pytest.mark.parametrize("ahead_s", [3600.0, -90.0])
def test_a_gateway_whose_clock_differs_is_a_warning(ahead_s: float):
    """Either way."""
    with serving(ahead_s=ahead_s) as port:
        reach = gateway.look(f"ws://127.0.0.1:{port}/ws/worker")
    assert reach.skew_s == pytest.approx(ahead_s, abs=2)
    assert told(reach)[1].level == "warning"


def test_a_gateway_that_names_no_time_is_not_held_against_it():
    """There is nothing to compare."""
    with serving(is_dated=False) as port:
        assert told(gateway.look(f"ws://127.0.0.1:{port}/"))[1].level == "ok"


def test_a_port_where_nobody_listens_is_a_failed_connection():
    """The name is known, the machine is there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    reach = gateway.look(f"ws://127.0.0.1:{port}/ws/worker")
    assert (reach.failed, reach.number) == ("connection", errno.ECONNREFUSED)


def test_a_name_that_nobody_knows_is_a_failed_name():
    """.invalid never has an address."""
    reach = gateway.look("wss://gateway.invalid/ws/worker")
    assert reach.failed == "name"
    assert [one.name for one in told(reach)] == ["gateway"]


def test_what_does_not_speak_http_is_a_failed_answer():
    """Another service listens there."""
    with listening(b"SSH-2.0-OpenSSH_9.9\r\n") as port:
        assert gateway.look(f"ws://127.0.0.1:{port}/ws/worker").failed == "answer"


def test_what_never_answers_ends_within_the_time(monkeypatch: pytest.MonkeyPatch):
    """Doctor must not wait for it."""
    monkeypatch.setattr(gateway, "STEP_S", 0.2)
    with listening(None) as port:
        reach = gateway.look(f"ws://127.0.0.1:{port}/ws/worker")
    assert (reach.failed, reach.error) == ("answer", "no answer within 0.2 s")


def test_what_has_no_tls_is_a_failed_tls():
    """wss:// to a plain server."""
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        assert gateway.look(f"wss://127.0.0.1:{port}/ws/worker").failed == "tls"


def test_a_certificate_that_is_not_trusted_is_told_in_its_own_words():
    """Not as a number."""
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "certificate has expired"
    assert gateway._words(error) == "certificate has expired"


# --- judging ----------------------------------------------------------------------------------


def test_on_a_mac_no_route_to_the_lan_names_the_permission():
    """macOS says so where Local Network isn't allowed, and no firewall or cable is to blame."""
    first = told(NO_ROUTE, is_mac=True)[0]
    assert first.level == "fault"
    assert "System Settings > Privacy & Security > Local Network" in (first.next_step or "")


@pytest.mark.parametrize(
    ("reach", "is_mac"),
    [
        (NO_ROUTE, False),
        (replace(NO_ROUTE, host="gw.example", addresses=("8.8.8.8",)), True),
        (replace(NO_ROUTE, host="127.0.0.1", addresses=("127.0.0.1",)), True),
        (replace(NO_ROUTE, number=errno.ECONNREFUSED), True),
    ],
)
def test_elsewhere_it_is_a_connection_that_failed(reach: Reach, is_mac: bool):
    """Another system, a host outside the network, or another error."""
    first = told(reach, is_mac=is_mac)[0]
    assert first.level == "fault"
    assert "Local Network" not in (first.next_step or "")


@pytest.mark.parametrize(
    ("host", "addresses", "is_local"),
    [
        ("studio.local", (), True),
        ("studio.local.", ("8.8.8.8",), True),
        ("gw", ("192.168.1.4",), True),
        ("gw", ("fe80::1%en0",), True),
        ("gw", ("8.8.8.8",), False),
        ("10.1.2.3", (), True),
    ],
)
def test_a_host_is_on_the_lan_by_its_name_or_its_address(
    host: str, addresses: tuple[str, ...], is_local: bool
):
    """mDNS names, private and link-local addresses."""
    assert Reach(host, 443, addresses).is_local is is_local


def test_a_worker_that_may_not_reach_what_this_terminal_reaches_is_told():
    """Terminal is exempt from the permission, an agent of launchd isn't."""
    why = "the gateway can't be reached: No route to host"
    first = told(REACHED, {"state": "waiting", "why": why}, is_mac=True)[0]
    assert first.level == "fault"
    assert "Local Network" in (first.next_step or "")


def test_a_link_that_dials_again_and_again_is_not_ok():
    """While it dials, `why` is of the time before."""
    why = "the gateway can't be reached: No route to host"
    dialling = {"state": "connecting", "why": why}
    assert told(REACHED, dialling)[0].level == "warning"
    assert told(REACHED, dialling, is_mac=True)[0].level == "fault"
    assert told(REACHED, {"state": "connecting", "why": ""})[0].level == "ok"


def test_a_rejected_key_is_told_though_the_gateway_answers():
    """As the running worker's own link has it."""
    link = {"state": "key rejected", "why": "the gateway doesn't know this key"}
    first = told(REACHED, link)[0]
    assert first.level == "fault"
    assert "gateway.key" in (first.next_step or "")


def test_a_connected_link_is_ok():
    """With whatever it last said."""
    assert told(REACHED, {"state": "connected", "why": "welcomed"})[0].level == "ok"


def test_without_a_gateway_there_is_nothing_to_do():
    """Most workers have none."""
    assert [(one.level, one.name) for one in told(None)] == [("ok", "gateway")]


def test_skew_is_against_the_middle_of_the_request():
    """The header leaves out fractions of a second, so half of one is added."""
    assert gateway.skew("Tue, 01 Dec 2026 00:00:30 GMT", 1796083200.0) == 30.5
    assert gateway.skew("soon", 0.0) is None
    assert gateway.skew(None, 0.0) is None
