"""Who has a port is named, as far as this user may know."""

import os
import socket
import subprocess
import sys

import psutil
import pytest

from mlx_worker import ports
from mlx_worker.ports import UNKNOWN, listener
from tests.answering import Handler, answering
from tests.workers import STARTS_S

LISTEN = (
    "import socket, sys\n"
    "s = socket.create_server(('127.0.0.1', 0))\n"
    "print(s.getsockname()[1], flush=True)\n"
    "sys.stdin.read()\n"
)
HERE = "127.0.0.1"


@pytest.fixture
def stranger():
    """(pid, port) of a process that listens and answers nothing."""
    command = [sys.executable, "-c", LISTEN]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.stdin.close()
        process.wait(STARTS_S)


def test_a_stranger_is_named(stranger: tuple[int, int]):
    """By its program and its number."""
    pid, port = stranger
    assert listener(HERE, port) == f"{psutil.Process(pid).name()}, pid {pid}"


def test_of_two_on_one_port_that_of_the_address_is_meant(stranger: tuple[int, int]):
    """Each may listen at an address of its own."""
    pid, port = stranger
    try:
        other = socket.create_server(("127.0.0.2", port))
    except OSError:
        pytest.skip("this machine has no second address of its own")
    with other:
        assert ports.pid_at(HERE, port) == pid
        assert ports.pid_at("127.0.0.2", port) == os.getpid()


def test_a_port_of_nobody_is_nobodys():
    """It may have been let go meanwhile."""
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
    assert ports.pid_at(HERE, port) is None
    assert listener(HERE, port) == UNKNOWN


def test_where_processes_cant_be_looked_at_each_is_tried(
    stranger: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    """As on a Mac, which tells of all connections only to root."""

    def denied(kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", denied)
    pid, port = stranger
    assert ports.pid_at(HERE, port) == pid


def test_a_worker_whose_process_is_hidden_is_known_by_its_answer(monkeypatch: pytest.MonkeyPatch):
    """That of another user."""
    monkeypatch.setattr(ports, "pid_at", lambda host, port: None)
    with answering() as server:
        assert listener(HERE, server.server_port) == UNKNOWN
        monkeypatch.setattr(Handler, "server_version", "mlx-worker")
        assert listener(HERE, server.server_port) == "another mlx-worker"
