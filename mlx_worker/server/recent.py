"""The last replies, one by one: what the console page draws.

Owns how many are kept and what is known of each. Leaves sums and histograms to metrics.py. Event
loop.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx_worker.records import Done

KEPT = 60


@dataclass(frozen=True)
class RecentReply:
    """One choice that was written to its end.

    is_drafted    a draft proposed at least one id of it
    acceptance    accepted over drafted, 0..1; None when nothing was drafted
    ttft_ms       from submit to the first token; None for later choices, which read no prompt
    tokens_per_s  None below two ids
    """

    is_drafted: bool
    acceptance: float | None
    ttft_ms: float | None
    tokens_per_s: float | None


class Recent:
    """The last KEPT replies, the oldest first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replies: deque[tuple[float, RecentReply]] = deque(maxlen=KEPT)

    def add(self, replies: Sequence[Done], queue_wait_ms: float) -> None:
        """Those of one request, the first first."""
        for n, reply in enumerate(replies):
            timing = reply.timing
            ttft_ms = queue_wait_ms + timing.ttft_ms if n == 0 else None
            kept = RecentReply(timing.drafted > 0, timing.acceptance, ttft_ms, timing.tokens_per_s)
            self._replies.append((self._clock(), kept))

    def shown(self) -> list[dict[str, Any]]:
        """As /status has them. ago_s: since it ended, by which an old speed isn't taken for now."""
        now_s = self._clock()
        return [
            {**asdict(reply), "ago_s": round(now_s - ended_s, 1)}
            for ended_s, reply in self._replies
        ]
