"""The port, the background service and the worker itself: who runs, and how the last one ended.

Owns looking at the port, and judging all three. Leaves the worker to local.py, the supervisor to
service/. Blocking; any thread. Takes no lock and listens nowhere.
"""

import errno
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from mlx_worker import ports
from mlx_worker.config import bracketed
from mlx_worker.doctor.check import Check, fault, ok, warning
from mlx_worker.errors import parted
from mlx_worker.local import Seen
from mlx_worker.service.manager import ServiceState

LOGS = "mlx-worker service logs"
NOISY = "the times below are noisy while it works"


@dataclass(frozen=True)
class Port:
    """problem: why it can't be listened on, as the system says; None: it is free.

    is_taken  somebody listens there; who: its name and pid, where that may be known
    """

    host: str
    port: int
    problem: str | None = None
    is_taken: bool = False
    who: str | None = None
    pid: int | None = None

    @property
    def place(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def look_at_port(host: str, port: int) -> Port:
    """Bind to it as a worker would, without listening, and let go. Raises OSError: no such name."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(address)
        except OSError as error:
            what = error.strerror or str(error)
            if error.errno != errno.EADDRINUSE:
                return Port(host, port, what)
            who, pid = _listener(host, port)
            return Port(host, port, what, is_taken=True, who=who, pid=pid)
    return Port(host, port)


def _listener(host: str, port: int) -> tuple[str | None, int | None]:
    """Name and pid of who listens there; macOS tells them of a user's own processes alone."""
    pid = ports.pid_at(host, port)
    try:
        return (None, None) if pid is None else (psutil.Process(pid).name(), pid)
    except psutil.Error:
        return None, None


# --- judging ----------------------------------------------------------------------------------


def port_check(port: Port, seen: Seen) -> Check:
    """seen: the worker of this folder."""
    if port.port == 0:
        return ok("port", "any that is free, chosen at each start")
    if not port.problem:
        return ok("port", f"{port.place} is free")
    if port.is_taken and port.pid is not None and port.pid == seen.pid:
        return ok("port", f"{port.place}, this worker's own")
    if port.is_taken:
        who = f"{port.who}, pid {port.pid}" if port.pid else ports.UNKNOWN
        step = "stop that, or choose another server.port in config.yaml"
        level = warning if seen.status is not None else fault
        return level("port", f"{port.place} is taken by {who}", step)
    step = "set server.host to an address of this machine, and server.port to 1024 or more"
    return fault("port", f"{port.place} can't be listened on: {port.problem}", step)


def service_check(state: ServiceState, seen: Seen, home: Path) -> Check:
    """home: the folder that is looked at, which is seen's."""
    name, is_up = "service", seen.is_running
    if state.problem:
        what, step = parted(state.problem)
        return warning(name, what, step or "mlx-worker serve runs it in a terminal")
    if not state.is_installed:
        return ok(name, "not installed; `mlx-worker service install` runs it from login on")
    if state.home not in (None, home):
        what = f"it serves another folder, {state.home}; this is about {home}"
        return warning(name, what, f"MLX_WORKER_HOME={state.home} mlx-worker doctor")
    if state.is_running and is_up and seen.pid not in (None, state.pid):
        what = f"it runs as pid {state.pid}, but pid {seen.pid} is the worker of this folder"
        return warning(name, what, "stop the one that was started by hand")
    if state.is_running:
        return ok(name, f"runs, pid {state.pid}{_at_login(state)}")
    if is_up:
        what = f"installed, and doesn't run: pid {seen.pid} was started by hand"
        return warning(name, what, "stop that one, then mlx-worker service start")
    if state.last_exit:
        return fault(name, f"doesn't run: it ended with code {state.last_exit}", LOGS)
    return warning(
        name, f"installed, and doesn't run{_at_login(state)}", "mlx-worker service start"
    )


def _at_login(state: ServiceState) -> str:
    return "" if state.is_enabled else "; it does not start at the next login"


def _unloaded(seen: Seen) -> str | None:
    """The first model that it could not load, and why."""
    for model in (seen.status or {}).get("models") or ():
        if problem := model.get("load_problem"):
            return f"{model.get('id')}: {problem}"
    return None


def worker_check(seen: Seen) -> Check:
    """What it says, or last said, of itself."""
    name, who = "worker", f"pid {seen.pid}" if seen.pid else "its process"
    why = f": {seen.error}" if seen.error else ""
    log = f"see {seen.log}"
    match seen.condition:
        case "ready":
            if unloaded := _unloaded(seen):
                return fault(name, f"runs, {who}, but can't load {unloaded}", log)
            where = f" at {seen.address}" if seen.address else ""
            return ok(name, f"runs, {who}{where}; {NOISY}")
        case "starting" | "draining":
            is_starting = seen.condition == "starting"
            return ok(name, f"{who} {'starts' if is_starting else 'finishes its requests'}")
        case "failing":
            return fault(name, f"{who} can't serve{why}", f"mlx-worker service restart; {log}")
        case "silent":
            step = f"mlx-worker service restart, or end {who}; {log}"
            return fault(name, f"{who} is there and doesn't answer{why}", step)
        case "refused":
            return fault(
                name, f"the last start was refused{why}", f"mend that, then start it; {log}"
            )
        case "crashed":
            return fault(name, f"the last one ended without a word{why}", log)
        case "stopped" if seen.error:
            return warning(name, f"doesn't run; the last one ended{why}", log)
        case "stopped":
            return ok(name, "doesn't run; the last one was stopped")
    return ok(name, "none ran here yet")
