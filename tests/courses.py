"""A real controller led through requests of a simulated machine, for tests of logs.

Drafts gain at first, in two of three kinds of text; later the machine and its text change, and
they lose.
"""

import json
from collections.abc import Collection, Iterator
from functools import cache
from itertools import count
from typing import Any

from mlx_worker.control import log, scenario
from mlx_worker.control.controller import Controller
from mlx_worker.control.machine import Machine
from mlx_worker.control.pacer import RequestPacer
from mlx_worker.control.simulate import Serving
from mlx_worker.records import Plan, Round, Status, Traffic

CHANGE = 30
SCENARIO: dict[str, Any] = {
    "reply_tokens": 300,
    "spread": 0.15,
    "round_base": 1.1,
    "round_per_depth": 0.1,
    "workloads": [
        {"name": "json", "acceptance": 0.9, "weight": 5},
        {"name": "prose", "acceptance": 0.75, "temperature": 0.8, "weight": 3},
        {"name": "noise", "acceptance": 0.1, "prompt_tokens": 5000},
    ],
    "changes": [
        {
            "at_request": CHANGE,
            "round_base": 2.0,
            "round_per_depth": 0.4,
            "workloads": [{"name": "prose", "acceptance": 0.6}],
        }
    ],
}


EVENTS: dict[str, Any] = {
    "disturbed": {4, 20},
    "leaving": {8, 15, 16, 17, 18, 26, 40},
    "overlapped": {12, 22, 52},
}


class LeavingPacer:
    """Of a client that leaves as its next round is prepared: a plan is asked for, then it ends."""

    def __init__(self, request: RequestPacer) -> None:
        self._request = request

    def plan(self) -> Plan:
        return self._request.plan()

    def observe(self, round: Round) -> None:
        self._request.observe(round)

    def end(self) -> None:
        self._request.plan()
        self._request.end()


class Eventful:
    """A controller in whose requests more happens than the simulator makes happen.

    By number: `disturbed`; `leaving` early; `overlapped`: begun beside another, which goes on
    until the next has begun.
    """

    def __init__(
        self,
        controller: Controller,
        disturbed: Collection[int] = (),
        leaving: Collection[int] = (),
        overlapped: Collection[int] = (),
    ) -> None:
        self._controller = controller
        self._disturbed, self._leaving, self._overlapped = disturbed, leaving, overlapped
        self._beside: list[RequestPacer] = []

    def begin(self, traffic: Traffic, now_s: float) -> RequestPacer | LeavingPacer:
        request = self._controller.begin(traffic, now_s)
        while self._beside:
            play(self._beside.pop())
        if request.number in self._overlapped:
            self._beside.append(self._controller.begin(Traffic(30), now_s + 0.1))
        if request.number in self._disturbed:
            request.disturb()
        return LeavingPacer(request) if request.number in self._leaving else request

    @property
    def status(self) -> Status:
        return self._controller.status


def play(request: RequestPacer, n_plans: int = 6, step_ms: float = 20.0) -> None:
    """A few plans of one request, each to its end, half of the drafts right; then it ends."""
    for _ in range(n_plans):
        plan = request.plan()
        tokens = 0
        while tokens < min(plan.tokens, 100):
            round_ms = step_ms * (1 + 0.1 * plan.depth)
            request.observe(Round(plan.depth, plan.depth, plan.depth // 2, round_ms, 100 + tokens))
            tokens += plan.depth // 2 + 1
        if plan.tokens > 100:
            break
    request.end()


def served(
    controller: Controller,
    seed: int = 0,
    keys: dict[str, Any] = SCENARIO,
    start_s: float = 0.0,
    **events: Any,
) -> Iterator[int]:
    """Serve one request of the scenario after the other, as long as the next is asked for."""
    serving = Serving(Eventful(controller, **events))
    serving.now_s = start_s
    machine = Machine(scenario.parse(keys), str(seed))
    for n in count():
        for request in machine.requests(n, n + 1):
            serving.serve(request)
        yield n


def serve(n: int, controller: Controller, **options: Any) -> None:
    """Serve n requests."""
    for _ in zip(range(n), served(controller, **options), strict=False):
        pass


def curve(seed: int = 0, keys: dict[str, Any] = SCENARIO) -> dict[int, float]:
    found = Machine(scenario.parse(keys), str(seed)).curve()
    assert found
    return found


@cache
def eventful_course() -> tuple[int, list[dict[str, Any]]]:
    """A seed, and the head and request lines of a course in which everything happens.

    It measures, goes On, times its costs again while On, lets requests go, and goes Off; some
    requests overlap, are disturbed, or end early.
    """
    for seed in range(20):
        lines = course_lines(seed, 70, **EVENTS)
        requests = lines[1:]
        states = {line["status"]["state"] for line in requests}
        has_bracket = any(line["mode"] == "on" and line["pairs"] for line in requests)
        has_exit = any(line["stops"] for line in requests)
        if states == {"measuring", "on", "off"} and has_bracket and has_exit:
            return seed, lines
    raise AssertionError("no seed leads through all of it: choose another scenario")


def course_lines(seed: int, n: int, **options: Any) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []

    def hear(request: RequestPacer) -> None:
        lines.append(log.request_line(controller, request))

    controller = Controller(curve=curve(seed), seed=seed, on_concluded=hear)
    lines.append(log.head(controller, {"model": "m", "draft": "d"}, 0.0))
    serve(n, controller, seed=seed, **options)
    return plain(lines)


def plain(lines: Any) -> Any:
    """As a file gives it back."""
    return json.loads(json.dumps(list(lines)))
