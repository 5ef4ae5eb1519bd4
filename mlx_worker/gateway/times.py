"""How long the gateway waits for workers and clients, in one place. Pure; any thread."""

from dataclasses import dataclass

from mlx_worker.http.stream import UNREAD_S
from mlx_worker.wire.link import GRACE_S, HELLO_S, PING_S, SILENCE_S


@dataclass(frozen=True)
class Times:
    """In seconds.

    hello      that a worker may take for its first frame
    heartbeat  between two pings of the WebSocket itself
    ping, silence  between two of our own, and without any frame until a worker counts as dead
    drain      that a worker may leave what is sent to it unread
    close      that it may take to answer a close
    grace      that requests are kept while its connection is lost
    keep       between two writes of what a worker reports
    unread     that a client may leave its stream unread
    changes    between two messages to a console
    """

    hello: float = HELLO_S
    heartbeat: float = 20.0
    ping: float = PING_S
    silence: float = SILENCE_S
    drain: float = 10.0
    close: float = 2.0
    grace: float = GRACE_S
    keep: float = 1.0
    unread: float = UNREAD_S
    changes: float = 0.5


TIMES = Times()
