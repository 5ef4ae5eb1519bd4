"""A controller's course as plain values for a log, and the same course again from them.

Owns the lines: a *head* with all that a controller knows, then one for each request with its
rounds and the status after it. Replaying them through a controller must give the same lines again,
bit for bit. Leaves files to decisions.py. Pure; any thread.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mlx_worker.control.controller import Controller, Ledger, Memory
from mlx_worker.control.measure import CostPair, Costs, Levels, Sample, Tail
from mlx_worker.control.pacer import RequestPacer, Stretch
from mlx_worker.records import Plan, Round, Traffic

PAIRS = ("pairs", "suspects", "waiting", "dismissed")
FORMAT = 5  # of the lines; a replay refuses others

Line = Mapping[str, Any]


class ReplayDiffers(Exception):
    """A log that its own controller wouldn't have written."""


def head(controller: Controller, facts: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    """The line a log begins with. facts: what is loaded, for the reader."""
    return {
        "kind": "head",
        "format": FORMAT,
        "at_s": now_s,
        **facts,
        "seed": controller.seed,
        "depths": list(controller.depths),
        "forced": controller.forced,
        "n_concluded": controller.n_concluded,
        "memory": asdict(controller.memory),
    }


def request_line(controller: Controller, request: RequestPacer) -> dict[str, Any]:
    """What one request did, round by round, its figures for a reader, and the status after it.

    left_early  its session had asked for a plan that nothing followed: the client was gone
    changed     what of the machine had changed for good before it began; left out for nothing
    disturbed_by  what happened to the machine while it decoded; left out for nothing
    gain        tokens a ps of its own drafted rounds − 1; None without a round or a known step
    """
    status = controller.status
    return {
        "kind": "request",
        "number": request.number,
        "begun_s": request.begun_s,
        "begun_after": request.begun_after,
        "traffic": asdict(request.traffic),
        "mode": request.mode,
        "pairs": request.course.n_pairs,
        "whole": request.course.whole,
        "disturbed": request.is_disturbed,
        **({"disturbed_by": list(request.disturbed_by)} if request.disturbed_by else {}),
        **({"changed": list(request.changed)} if request.changed else {}),
        "stops": request.n_stops,
        "left_early": _left_early(request),
        **_figures(controller, request),
        "segments": [segment(stretch) for stretch in request.stretches if stretch.rounds],
        "status": {**asdict(status), "text": status.text},
    }


def _figures(controller: Controller, request: RequestPacer) -> dict[str, Any]:
    rounds = [round for stretch in request.stretches for round in stretch.rounds if round.depth]
    tokens = sum(round.accepted + 1 for round in rounds)
    report = request.report
    is_priced = bool(report.steps_ms or request.bucket in controller.memory.step_ms)
    return {
        "tokens": sum(stretch.tokens for stretch in request.stretches),
        "rounds": len(rounds),
        "depths": sorted({round.depth for round in rounds}),
        "drafted": sum(round.own[0] for round in rounds),
        "accepted": sum(round.own[1] for round in rounds),
        "gain": tokens / (tokens + report.loss) - 1 if rounds and is_priced else None,
    }


def _left_early(request: RequestPacer) -> bool:
    """A plan either opens a stretch or, between the rounds of a draft, takes in the last one."""
    if not request.stretches:
        return False
    n_heard = sum(len(s.rounds) for s in request.stretches if s.purpose in ("trial", "draft"))
    last = request.stretches[-1]
    return not last.rounds or (last.purpose == "draft" and request.level.n_rounds == n_heard)


def segment(stretch: Stretch) -> dict[str, Any]:
    """A stretch; each round's context follows from the first one's.

    times  [ms] of a plain step, [ms, depth, drafted, accepted, forced] of a round; less a forced 0
    """
    found: dict[str, Any] = {
        "purpose": stretch.purpose,
        "context": stretch.rounds[0].context_tokens,
        "times": [_time(round) for round in stretch.rounds],
    }
    if stretch.more[0]:
        found["more"] = list(stretch.more)
    return found


def _time(round: Round) -> list[float]:
    if not round.depth:
        return [round.round_ms]
    time = [round.round_ms, round.depth, round.drafted, round.accepted]
    return [*time, round.forced] if round.forced else time


def restored(line: Line) -> Controller:
    """A controller as it was when its head was written."""
    if line.get("kind") != "head" or line.get("format") != FORMAT:
        raise ReplayDiffers(f"no head of format {FORMAT}: {str(line)[:80]}")
    controller = Controller(seed=line["seed"], depths=line["depths"], forced=line["forced"])
    controller.memory = _memory(line["memory"])
    controller.n_concluded = line["n_concluded"]
    controller.refresh()
    return controller


def replay(lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """The request lines that the head's controller writes on the same rounds.

    lines  a head and the requests after it, of one load

    Raises ReplayDiffers where it plans otherwise than it did.
    """
    controller = restored(lines[0])
    requests = [line for line in lines[1:] if line["kind"] == "request"]
    waiting: dict[int, list[Line]] = defaultdict(list)
    for line in sorted(requests, key=lambda line: line["number"]):
        waiting[line["begun_after"]].append(line)
    begun: dict[int, RequestPacer] = {}
    for line in requests:
        for one in waiting.pop(controller.n_concluded, ()):
            controller.change(one.get("changed", ()))
            begun[one["number"]] = controller.begin(Traffic(**one["traffic"]), one["begun_s"])
        request = begun.pop(line["number"], None)
        if request is None or request.number != line["number"]:
            raise ReplayDiffers(f"request {line['number']} began elsewhere")
        _play(request, line)
        yield request_line(controller, request)


def _play(request: RequestPacer, line: Line) -> None:
    """Give a request the rounds that it had, asking for plans where its session did."""
    plan, left = Plan(0, 0), 0
    for part in line["segments"]:
        context = part["context"]
        for time in part["times"]:
            ms, depth, drafted, accepted, forced = [*time, 0, 0, 0, 0][:5]
            if left <= 0:
                plan = request.plan()
                left = plan.tokens
            if plan.depth != depth:
                raise ReplayDiffers(
                    f"request {request.number}: planned depth {plan.depth}, ran at {depth}"
                )
            request.observe(Round(depth, drafted, accepted, ms, context, forced))
            left -= accepted + 1
            context += accepted + 1
        if "more" in part:
            n_steps, took_ms = part["more"]
            request.hear_more(n_steps, took_ms)
            left -= n_steps
    if line["left_early"]:
        request.plan()
    if line["disturbed"]:
        request.disturb()
    for reason in line.get("disturbed_by", ()):
        request.disturb(reason)
    request.end()


def _memory(values: Mapping[str, Any]) -> Memory:
    """What asdict made of a Memory, back again; JSON has made its int keys strings."""
    costs: dict[str, Any] = dict(values["costs"])
    costs |= {name: [CostPair(**pair) for pair in costs[name]] for name in PAIRS}
    costs["curve"] = _int_keys(costs["curve"])
    costs |= {name: Tail(**costs[name]) for name in ("rounds_tail", "steps_tail")}
    parts: dict[str, Any] = {
        "costs": Costs(**costs),
        "levels": Levels(**values["levels"]),
        "ledger": Ledger(**values["ledger"]),
        "samples": [Sample(**sample) for sample in values["samples"]],
        "step_ms": _int_keys(values["step_ms"]),
        "verdict_step_ms": _int_keys(values["verdict_step_ms"]),
        "whole_steps": _int_keys(values["whole_steps"]),
    }
    return Memory(**{**values, **parts})


def _int_keys(values: Mapping[Any, Any]) -> dict[int, Any]:
    return {int(key): value for key, value in values.items()}
