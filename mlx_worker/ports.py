"""Who listens on a port of this machine, in words for a message.

Owns asking the system, which on a Mac tells only of this user's own processes. Blocking, some
tenths of a second; any thread.
"""

import http.client
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil

from mlx_worker.config import EVERYWHERE

OUR_MODULE, OUR_COMMAND = ("-m", "mlx_worker"), "mlx-worker"
UNKNOWN = "a process of another user"
ANSWERS_S = 1.0


class Listening(NamedTuple):
    pid: int | None  # None: it isn't told
    host: str
    port: int


def listener(host: str, port: int) -> str:
    """`another mlx-worker, pid 12`, `nginx, pid 34`, or that it can't be told."""
    pid = pid_at(host, port)
    if pid is None:
        return "another mlx-worker" if says_it_is_ours(host, port) else UNKNOWN
    try:
        process = psutil.Process(pid)
        name = "another mlx-worker" if is_ours(process) else process.name()
    except psutil.Error:
        return UNKNOWN
    return f"{name}, pid {pid}"


def pid_at(host: str, port: int) -> int | None:
    """None: nobody's, or that of a process which may not be looked at.

    host  the address that is wanted; one port may have a listener at each
    """
    found = [one for one in _listening() if one.port == port and one.pid is not None]
    same = [one for one in found if one.host in (host, *EVERYWHERE)]
    return next((one.pid for one in same or found), None)


def is_ours(process: psutil.Process) -> bool:
    """Whether it runs this package. Raises psutil.Error."""
    words = process.cmdline()
    is_module = any(pair == OUR_MODULE for pair in pairwise(words))
    return is_module or any(Path(word).name == OUR_COMMAND for word in words[:2])


def says_it_is_ours(host: str, port: int) -> bool:
    """By what it answers; not every process may be looked at."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWERS_S)
    try:
        connection.request("HEAD", "/health")
        return connection.getresponse().getheader("Server", "").startswith("mlx-worker")
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _listening() -> Iterator[Listening]:
    try:
        yield from _of(None, psutil.net_connections("tcp"))
    except psutil.AccessDenied:  # a Mac tells only root of all of them
        for process in psutil.process_iter():
            try:
                yield from _of(process.pid, process.net_connections("tcp"))
            except psutil.Error:
                continue


def _of(pid: int | None, connections: list) -> Iterator[Listening]:
    for one in connections:
        if one.status == psutil.CONN_LISTEN:
            yield Listening(getattr(one, "pid", None) or pid, one.laddr.ip, one.laddr.port)
