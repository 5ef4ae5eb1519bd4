"""What the worker of this folder is doing now: asked over its local API, else as it last said.

Owns asking, and what it means that nobody answers. Never fails because a worker is down. Blocking,
some 2 s at most; any thread. Without a library for HTTP, so that commands which look stay fast.
"""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from mlx_worker import config, logs, state
from mlx_worker.errors import ConfigError, NotSignedIn, WorkerError
from mlx_worker.state import WorkerState

Condition = Literal[
    "never", "starting", "ready", "failing", "draining", "silent", "stopped", "refused", "crashed"
]
# Of a process that is there: what is meant where it doesn't answer, and where it wants a key.
UNHEARD: Mapping[str, Condition] = {
    "starting": "starting",
    "draining": "draining",
    "stopped": "stopped",  # and is about to be gone
    "refused": "refused",
}
UNKEYED: Mapping[str, Condition] = {"starting": "starting", "draining": "draining"}
ANSWERS_S = 2.0
MAX_BYTES = 4_000_000  # of an answer


@dataclass(frozen=True)
class Seen:
    """never: none ran here yet, as far as is known; silent: its process is there and doesn't
    answer; refused: its last start ended in an error that a restart can't mend; crashed: it ended
    by a failure of its own, or without saying so.

    status  GET /status as it answered; None: it didn't, or wants a key that isn't known here
    error   the last one, or why nothing is known, in one line
    log     the folder of its logs
    at_s    when it last said something of itself, unix seconds
    """

    condition: Condition
    log: Path
    pid: int | None = None
    address: str | None = None
    version: str | None = None
    at_s: float | None = None
    error: str | None = None
    status: Mapping[str, Any] | None = None
    models: tuple[tuple[str, str | None], ...] = ()  # as last seen, where status is None

    @property
    def is_running(self) -> bool:
        return self.condition in ("starting", "ready", "failing", "draining", "silent")


def look() -> Seen:
    """Of the worker in home()."""
    said, why = state.look_up()
    if said is not None and state.is_alive(said):
        return _asked(said)
    if state.is_held():
        return _unnamed(why)
    if said is None:
        return Seen("never", logs.default_folder(), error=why)
    return _seen(said, _ended(said))


def _asked(said: WorkerState) -> Seen:
    """What it answers goes before what it said: it may not have been able to write it."""
    unheard = UNHEARD.get(said.phase, "silent")
    if said.address is None:
        return _seen(said, unheard)
    try:
        answer = ask(said.address, "/status")
    except NotSignedIn as error:
        return _seen(said, UNKEYED.get(said.phase, "ready"), error=str(error))
    except WorkerError as error:
        return _seen(said, unheard, error=said.error or str(error))
    is_starting = said.phase == "starting" and answer.get("state") == "failing"
    condition = "starting" if is_starting else _condition(answer)
    why = None if is_starting else answer.get("why") or None
    return _seen(said, condition, status=answer, error=said.error or why)


def _condition(answer: Mapping[str, Any]) -> Condition:
    found: dict[str, Condition] = {"draining": "draining", "failing": "failing"}
    return found.get(str(answer.get("state")), "ready")


def _unnamed(why: str | None) -> Seen:
    """A worker lives that could not say who it is: perhaps it listens where config.yaml says."""
    seen = Seen("silent", logs.default_folder(), error=why or "it could not write its state")
    try:
        server = config.load().server
        address = f"http://{config.reachable(server.host)}:{server.port}/"
        answer = ask(address, "/status")
    except WorkerError:
        return seen
    version = answer.get("version")
    if not isinstance(version, str):
        return seen
    return replace(
        seen, condition=_condition(answer), address=address, version=version, status=answer
    )


def _ended(said: WorkerState) -> Condition:
    """What became of a process that is gone."""
    if said.phase == "refused":
        return "refused"
    return "stopped" if said.phase == "stopped" else "crashed"


def _seen(said: WorkerState, condition: Condition, **fields: Any) -> Seen:
    fields = {"error": said.error, **fields}
    return Seen(
        condition,
        logs.default_folder(),
        pid=said.pid if condition not in ("stopped", "refused", "crashed") else None,
        address=said.address,
        version=said.version,
        at_s=said.at_s,
        models=said.models,
        **fields,
    )


def ask(
    address: str, path: str, *, method: str = "GET", body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a worker's local API answers, with the key of config.yaml where there is one.

    Raises NotSignedIn where it wants another key, else WorkerError: nobody answers within
    ANSWERS_S, or it says no.
    """
    connection = _connection(address)
    sent = None if body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, sent, _headers())
        reply = connection.getresponse()
        return _object(reply.status, reply.read(MAX_BYTES))
    except (OSError, http.client.HTTPException) as error:
        raise WorkerError(f"{address}: no answer: {error}") from None
    finally:
        connection.close()


def _connection(address: str) -> http.client.HTTPConnection:
    try:
        url = urlsplit(address)
        return http.client.HTTPConnection(url.hostname or "", url.port, timeout=ANSWERS_S)
    except (ValueError, http.client.HTTPException):
        raise WorkerError(f"{address}: is no address") from None


def _headers() -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Connection": "close"}
    try:
        key = config.load().server.api_key
    except ConfigError:  # a broken file stops the worker's next start, not whoever looks
        key = None
    if key is not None:
        headers["Authorization"] = f"Bearer {key.get_secret_value()}"
    return headers


def _object(status: int, body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise WorkerError(f"what answers there is no worker: {status}, no JSON object")
    if status == 401:
        raise NotSignedIn(
            "the worker wants a key that isn't known here",
            hint="set MLX_WORKER_SERVER__API_KEY here too, or server.api_key in config.yaml",
        )
    if status >= 400:
        error = found.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        raise WorkerError(f"the worker answers {status}: {message or 'no reason given'}")
    return found
