"""What one call took, over all its choices → usage, the pendra block, Server-Timing.

Owns how figures of several choices are added up. The prompt is read once for all of them, so
what it cost is that of the choice which came first. Pure; any thread.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlx_worker.records import Done, Notice, ReplyEvent, Started, Timing, per_second


@dataclass(frozen=True)
class WorkerIdentity:
    """Who answers, as every reply says it."""

    id: str
    name: str
    version: str


@dataclass
class Account:
    """Fed every event of one call; its figures are whole once is_closed.

    n      choices that were asked for
    first  the choice whose events came first: it read the prompt; None: no event yet
    """

    request_id: str
    worker: WorkerIdentity
    n: int
    started: Started | None = None
    first: int | None = None
    ends: dict[int, Done] = field(default_factory=dict[int, Done])

    def add(self, event: Started | ReplyEvent) -> None:
        if isinstance(event, Started):
            self.started = event
            return
        if self.first is None:
            self.first = event.choice
        if isinstance(event.event, Done):
            self.ends[event.choice] = event.event

    @property
    def is_closed(self) -> bool:
        """Every choice has ended."""
        return len(self.ends) == self.n

    @property
    def start(self) -> Started:
        assert self.started is not None, "events before Started"
        return self.started

    @property
    def model(self) -> str:
        return self.start.model

    def usage(self) -> dict[str, Any]:
        """Tokens of all choices; the prompt counted once."""
        prompt_tokens = self.start.prompt_tokens
        completion_tokens = sum(end.usage.completion_tokens for end in self.ends.values())
        reasoning_tokens = sum(end.usage.reasoning_tokens for end in self.ends.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._first.usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        }

    def pendra(self) -> dict[str, Any]:
        """The block beside the OpenAI shape; notice only if there is something to say."""
        block: dict[str, Any] = {
            "request_id": self.request_id,
            "worker": asdict(self.worker),
            "timing": self.timing(),
        }
        if self._notice is not None:
            code, message = self._notice
            block["notice"] = {"code": code, "message": message}
        return block

    def timing(self) -> dict[str, Any]:
        """Times from submit on. No gateway is before this door, so both waits are the worker's.

        ttft_ms has the wait in it: it is what the client saw.
        """
        queue_wait_ms = round(self.start.queue_wait_ms, 3)
        timing: dict[str, Any] = {
            "ttft_ms": round(self.start.queue_wait_ms + self._first.timing.ttft_ms, 3),
            "tokens_per_second": tokens_per_second(self._timings),
            "queue_wait_ms": queue_wait_ms,
            "worker_queue_wait_ms": queue_wait_ms,
            "model_load_ms": round(self.start.model_load_ms, 3),
            "cold_start": self.start.model_load_ms > 0,
        }
        acceptance = acceptance_rate(self._timings)
        return timing if acceptance is None else timing | {"draft_acceptance_rate": acceptance}

    def server_timing(self) -> str:
        """The Server-Timing header: spans that add up, in milliseconds."""
        load_ms = self.start.model_load_ms
        spans = {
            "queue": self.start.queue_wait_ms - load_ms,
            "load": load_ms,
            "prefill": self._first.timing.ttft_ms,
            "decode": sum(timing.decode_ms for timing in self._timings),
        }
        return ", ".join(f"{name};dur={ms:.1f}" for name, ms in spans.items())

    @property
    def _notice(self) -> Notice | None:
        """What an end cut off is said before what was wanted from the start and can't be had."""
        ends = (end.notice for _, end in sorted(self.ends.items()))
        return next((notice for notice in ends if notice is not None), self.start.notice)

    @property
    def _first(self) -> Done:
        assert self.first is not None
        return self.ends[self.first]

    @property
    def _timings(self) -> list[Timing]:
        return [end.timing for end in self.ends.values()]


def tokens_per_second(timings: Sequence[Timing]) -> float | None:
    """Ids after each choice's first over the time they took; None where there are none."""
    n_later = sum(timing.completion_tokens for timing in timings) - len(timings)
    rate = per_second(n_later, sum(timing.decode_ms for timing in timings))
    return None if rate is None else round(rate, 3)


def acceptance_rate(timings: Sequence[Timing]) -> float | None:
    """Accepted over drafted, 0..1; None when no choice drafted."""
    drafted = sum(timing.drafted for timing in timings)
    return sum(timing.accepted for timing in timings) / drafted if drafted else None
