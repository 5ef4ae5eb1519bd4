"""When to dial again: after a network that failed, and after a gateway that said no.

Owns the delays, and what a close code or a refused handshake means. Leaves waiting to client.py.
Pure; any thread.

A network that fails gets full jitter, so that workers whose gateway was restarted don't all come
back at once. What another dial can't mend, such as a key that isn't known, waits for minutes, and
is shown.
"""

import random
from dataclasses import dataclass

from mlx_worker.wire.link import GRACE_S, HELLO_S, PING_S, SILENCE_S, Close


@dataclass(frozen=True)
class Times:
    """Seconds; tests use shorter ones.

    first, most   bounds of a delay before it is dialled again: 0 to first, doubled up to most
    healthy       that a connection must have lasted for the delays to begin anew
    refused       before it is dialled again where that can't help
    slow_down     at least so long where the gateway asked for it
    dial          for a handshake
    heartbeat     of the WebSocket
    drain         that the gateway may take to read what was written
    coalesce      that a piece of a reply may wait for the next
    look          between two looks at clocks, and at what there is to report
    slept         that the wall clock must be ahead of the loop's: the machine slept
    flush         for the last frames before the end
    """

    first: float = 1.0
    most: float = 60.0
    healthy: float = 60.0
    refused: float = 300.0
    slow_down: float = 60.0
    dial: float = 10.0
    hello: float = HELLO_S
    heartbeat: float = 20.0
    ping: float = PING_S
    silence: float = SILENCE_S
    drain: float = 10.0
    grace: float = GRACE_S
    coalesce: float = 0.02
    look: float = 0.5
    slept: float = 10.0
    flush: float = 3.0


class Delays:
    """How long to wait before each dial."""

    def __init__(self, times: Times, uniform: random.Random) -> None:
        self._times = times
        self._uniform = uniform
        self._most = times.first

    def next_s(self) -> float:
        delay = self._uniform.uniform(0, self._most)
        self._most = min(self._times.most, 2 * self._most)
        return delay

    def lasted(self, connected_s: float) -> None:
        """A connection has ended that was good for so long."""
        if connected_s >= self._times.healthy:
            self._most = self._times.first


@dataclass(frozen=True)
class Ending:
    """How an attempt or a connection ended.

    state    what is shown until the next dial
    why      in one sentence, for a person
    wait     retry: as Delays say; slow: no sooner than slow_down; refused: minutes; now: at once
    """

    state: str
    why: str
    wait: str = "retry"


WAITING = "waiting"
KEY_REJECTED = "key rejected"
UPDATE = "update needed"
SLOW = Ending("slow down", "the gateway asked to slow down", "slow")

OF_CLOSE = {
    Close.KEY_REFUSED: Ending(KEY_REJECTED, "the gateway doesn't know this key", "refused"),
    Close.DISABLED: Ending(KEY_REJECTED, "this worker is disabled at the gateway", "refused"),
    Close.REPLACED: Ending(
        "replaced", "another worker connected with the same key, and took this one's place",
        "refused",
    ),
    Close.UPDATE_NEEDED: Ending(UPDATE, "the gateway needs a newer version of it", "refused"),
    Close.SLOW_DOWN: SLOW,
    Close.GOING_AWAY: Ending(WAITING, "the gateway went away"),
    Close.BAD_FRAME: Ending(WAITING, "the gateway could not read what this worker said"),
    1009: Ending(WAITING, "a message was larger than the link takes"),
}  # fmt: skip
OF_STATUS = {
    401: Ending(KEY_REJECTED, "the gateway doesn't know this key", "refused"),
    403: Ending(KEY_REJECTED, "this worker is disabled at the gateway", "refused"),
    404: Ending(WAITING, "there is no gateway at this address"),
    421: Ending(WAITING, "the gateway doesn't go by this name; see its allowed_hosts"),
    426: Ending(UPDATE, "the gateway needs a newer version of it", "refused"),
    429: SLOW,
}


def of_close(code: int | None) -> Ending:
    """What a connection's close code means."""
    if code in OF_CLOSE:
        return OF_CLOSE[code]
    shown = "without a word" if code in (None, 1006) else f"with code {code}"
    return Ending(WAITING, f"the connection ended {shown}")


def of_status(status: int) -> Ending:
    """What an HTTP status means that came instead of the handshake."""
    if 300 <= status < 400:
        return of_redirect()
    return OF_STATUS.get(status) or Ending(WAITING, f"the gateway answered with status {status}")


def of_redirect() -> Ending:
    """Not followed: the key would be sent to whoever is named, or be dropped."""
    why = "the gateway points to another address, which isn't followed: set gateway.url to it"
    return Ending("redirected", why, "refused")
