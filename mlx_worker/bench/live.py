"""Automatic mode under the bench: the live controller, settled on the batch and then timed.

Owns how a controller is made for a loaded pair, how it is settled, what its own work costs, and
what its arm is compared with. Leaves serving to run.py. Runs on the thread that owns MLX.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mlx_worker.bench.run import (
    AUTO,
    OFF,
    Arm,
    Batch,
    Estimate,
    Reply,
    Request,
    Served,
    answer,
    estimate_speedup,
    ratios_by_prompt,
)
from mlx_worker.bench.workloads import names
from mlx_worker.control.controller import Controller
from mlx_worker.control.pacer import RequestPacer
from mlx_worker.engine.costs import cost_curve
from mlx_worker.engine.load import LoadedPair
from mlx_worker.records import MAX_DEPTH, Pacer, Plan, Round, Status, Traffic

SETTLE_REQUESTS = 60  # at most so many before the timed ones, until there is a verdict


class Timed:
    """A pacer whose own work is timed, on the host, for bench's facts.

    took_ms   while the reply is written
    after_ms  once its last token is out: it keeps the next reply waiting, not this one
    """

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self.took_ms = self.after_ms = 0.0

    def plan(self) -> Plan:
        begin = time.perf_counter()
        plan = self._pacer.plan()
        self.took_ms += (time.perf_counter() - begin) * 1000
        return plan

    def observe(self, round: Round) -> None:
        begin = time.perf_counter()
        self._pacer.observe(round)
        self.took_ms += (time.perf_counter() - begin) * 1000

    def end(self) -> None:
        begin = time.perf_counter()
        self._pacer.end()
        self.after_ms += (time.perf_counter() - begin) * 1000


class Automatic:
    """Answers as a worker does whose draft is in Automatic mode. One for each loaded pair.

    depth                   the only one it may use; None or 0: it chooses
    forced, on_concluded    as of Controller
    overhead_ms, after_ms   what its controller took inside replies, and after them
    decode_ms               all decoding it was there for
    """

    def __init__(
        self,
        pair: LoadedPair,
        *,
        depth: int | None = None,
        forced: Literal["on"] | None = None,
        on_concluded: Callable[[RequestPacer], None] = lambda _: None,
    ) -> None:
        self.pair = pair
        self.controller = Controller(
            curve=cost_curve(pair),
            depths=[depth] if depth else range(1, MAX_DEPTH + 1),
            forced=forced,
            on_concluded=on_concluded,
        )
        self.overhead_ms = self.after_ms = self.decode_ms = 0.0

    @property
    def status(self) -> Status:
        return self.controller.status

    @property
    def overhead(self) -> float | None:
        """What the controller took inside replies, as a share of decode time."""
        return self.overhead_ms / self.decode_ms if self.decode_ms else None

    @property
    def overhead_after(self) -> float | None:
        """What it took after them, as such a share: of decode time, though not in it."""
        return self.after_ms / self.decode_ms if self.decode_ms else None

    def answer(self, request: Request, batch: Batch) -> tuple[Reply, RequestPacer | None]:
        """One reply, and the pacer that heard it; None for a reply that was over at once."""
        temperature = batch.limits.of(request).temperature
        traffic = Traffic(len(request.ids), temperature)
        awaited = self.controller.await_request(traffic, time.time())
        timed = Timed(awaited)
        reply = answer(self.pair, request, AUTO, batch.limits, timed)
        self.overhead_ms += timed.took_ms
        self.after_ms += timed.after_ms
        self.decode_ms += reply.timing.decode_ms
        return reply, awaited.request

    def reply_in(self, batch: Batch) -> Callable[[Request], Reply]:
        """How run.serve asks for a reply in the arm AUTO."""
        return lambda request: self.answer(request, batch)[0]

    def settle(self, batch: Batch) -> Iterator[Status]:
        """Serve the batch over and over, untimed, until there is a verdict; a status each."""
        for i in range(SETTLE_REQUESTS):
            if self.status.state in ("on", "off"):
                return
            request = batch.requests[i % len(batch.requests)]
            self.answer(replace(request, seed=request.seed + 1000 * (1 + i)), batch)
            yield self.status


@dataclass(frozen=True)
class LiveReply:
    """One request served as it came, and the status after it."""

    request: Request
    reply: Reply
    paced: RequestPacer | None
    status: Status


def serve_live(automatic: Automatic, batch: Batch) -> Iterator[LiveReply]:
    """Serve each request once, in order, in Automatic mode alone: as a worker would."""
    for request in batch.requests:
        reply, paced = automatic.answer(request, batch)
        yield LiveReply(request, reply, paced, automatic.status)


@dataclass(frozen=True)
class Comparison:
    """Automatic mode over the batch, once settled.

    estimate      its speed-up against plain decoding, with the 90 % interval
    hindsight     its speed over that of the best fixed depth of each workload, chosen afterwards
                  from the same replies: luck chooses too, so this is too low
    held_out      the same where each reply's depth is chosen by the others of its workload: luck
                  chooses wrong at times, so this is too high; None with one reply of a workload
    by_workload   its speed over plain decoding's, each workload's tokens over their time
    best_depths   workload → the fixed depth that was fastest, 0 is plain
    """

    status: Status
    settle_requests: int
    estimate: Estimate | None
    hindsight: float | None
    held_out: float | None
    by_workload: Mapping[str, float]
    best_depths: Mapping[str, int]
    overhead: float | None
    overhead_after: float | None

    @property
    def slowest(self) -> tuple[str, float] | None:
        """The workload with the least speed over plain."""
        return min(self.by_workload.items(), key=lambda item: item[1], default=None)


def compare(automatic: Automatic, settle_requests: int, served: Sequence[Served]) -> Comparison:
    ratios = [ratios[AUTO] for ratios in ratios_by_prompt(served, [AUTO])]
    by_workload: dict[str, float] = {}
    best_depths: dict[str, int] = {}
    best_ms = held_out_ms = auto_ms = 0.0
    for name in names([one.request.prompt for one in served]):
        mine = [one for one in served if one.request.prompt.workload == name]
        times = {arm: decode_ms(mine, arm) for arm in mine[0].replies}
        fixed = {arm: ms for arm, ms in times.items() if arm != AUTO}
        best = min(fixed, key=lambda arm: fixed[arm])
        best_depths[name] = best.depth
        best_ms += fixed[best]
        held_out_ms += chosen_by_others_ms(mine, fixed)
        auto_ms += times[AUTO]
        if times[AUTO] > 0:
            by_workload[name] = times[OFF] / times[AUTO]
    return Comparison(
        status=automatic.status,
        settle_requests=settle_requests,
        estimate=estimate_speedup(ratios) if ratios else None,
        hindsight=best_ms / auto_ms if auto_ms > 0 else None,
        held_out=held_out_ms / auto_ms if auto_ms > 0 and held_out_ms < math.inf else None,
        by_workload=by_workload,
        best_depths=best_depths,
        overhead=automatic.overhead,
        overhead_after=automatic.overhead_after,
    )


def chosen_by_others_ms(served: Sequence[Served], total_ms: Mapping[Arm, float]) -> float:
    """Decode time in which each reply has the arm that was fastest on the others together."""
    if len(served) < 2:
        return math.inf
    took_ms = 0.0
    for one in served:
        own = {arm: one.replies[arm].timing.decode_ms for arm in total_ms}
        took_ms += own[min(own, key=lambda arm: total_ms[arm] - own[arm])]
    return took_ms


def decode_ms(served: Sequence[Served], arm: Arm) -> float:
    return math.fsum(one.replies[arm].timing.decode_ms for one in served)
