"""What happens to the machine: timings around it teach nothing, and a log replays all the same."""

import threading
from copy import deepcopy
from random import Random
from typing import Any

import pytest

from mlx_worker.control.controller import BRACKETS, RETRY_TOKENS, Controller, Phase
from mlx_worker.control.log import head, replay, request_line
from mlx_worker.control.pacer import RequestPacer
from mlx_worker.records import Disturbance, Round, Traffic
from tests.courses import EVENTS, curve, plain, play, serve, served

SLEEP = Disturbance("sleep", lasts=False)
HEAT = Disturbance("thermal state", lasts=True)
SOURCE = Disturbance("power source", lasts=True)
LOSING: dict[str, Any] = {  # at any depth
    "spread": 0.15,
    "round_base": 1.6,
    "round_per_depth": 0.3,
    "workloads": [{"name": "prose", "acceptance": 0.3}],
}


@pytest.mark.parametrize("disturbance", [SLEEP, HEAT])
def test_a_pair_cut_by_an_event_isnt_counted(disturbance: Disturbance):
    """Nor is anything else of its request; the bill has it all."""
    controller = Controller(curve=curve())
    before = deepcopy(controller.memory)
    request = controller.begin(Traffic(20), 0.0)
    controller.disturb(disturbance)
    play(request)
    memory = controller.memory
    assert request.is_disturbed
    assert (memory.costs.pairs, memory.samples, memory.step_ms) == ([], [], {})
    assert memory.levels == before.levels
    assert memory.ledger.decode > 0
    assert memory.ledger.trial_loss != 0


def test_an_event_between_requests_spoils_none():
    """The next one is timed on the machine as it is."""
    controller = Controller(curve=curve())
    play(controller.begin(Traffic(20), 0.0))
    controller.disturb(HEAT)
    request = controller.begin(Traffic(20), 1.0)
    play(request)
    assert not request.is_disturbed
    assert list(request.changed) == ["thermal state"]
    assert len(controller.memory.samples) == 2


@pytest.mark.parametrize("disturbance", [SLEEP, HEAT])
def test_while_on_a_lasting_change_has_costs_timed_soon(disturbance: Disturbance):
    """A sleep changes nothing for later."""
    controller = Controller(curve=curve())
    controller.memory.phase = "on"
    controller.disturb(disturbance)
    controller.begin(Traffic(20), 0.0)
    assert controller.memory.haste == (len(BRACKETS) - 1 if disturbance.lasts else 0)


@pytest.mark.parametrize("disturbance", [SLEEP, HEAT])
def test_while_off_a_lasting_change_has_drafts_tried_sooner(disturbance: Disturbance):
    """Though never sooner than the first time."""
    controller = Controller(curve=curve())
    controller.memory.phase, controller.memory.retry_tokens = "off", RETRY_TOKENS[1]
    controller.memory.plain_tokens = RETRY_TOKENS[0]
    controller.memory.kinds = ["greedy/0"]
    controller.disturb(disturbance)
    request = controller.begin(Traffic(20), 0.0)
    assert request.course.times is disturbance.lasts


def disturbed_course(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """A head and n requests; something happens between some, and while others decode."""
    lines: list[dict[str, Any]] = []

    def hear(request: RequestPacer) -> None:
        lines.append(request_line(controller, request))
        if request.number % 9 == 0:
            controller.disturb(HEAT)  # heard by the next to begin, and by one that goes on beside

    controller = Controller(curve=curve(seed), seed=seed, on_concluded=hear)
    lines.append(head(controller, {}, 0.0))
    begin = controller.begin

    def disturbed(traffic: Traffic, now_s: float) -> RequestPacer:
        request = begin(traffic, now_s)
        if request.number % 7 == 0:
            controller.disturb(SLEEP if request.number % 2 else HEAT)
        return request

    controller.begin = disturbed
    for _ in zip(range(n), served(controller, seed=seed, **EVENTS), strict=False):
        pass
    return plain(lines)


def test_a_course_with_events_replays_bit_for_bit():
    """On, Off, and measuring again; events between requests, in them, and in those that overlap."""
    lines = disturbed_course(70)
    assert plain(replay(lines)) == lines[1:]
    assert {line["status"]["state"] for line in lines[1:]} >= {"measuring", "on"}
    assert any("changed" in line for line in lines)
    assert {reason for line in lines for reason in line.get("disturbed_by", ())} == {
        "sleep",
        "thermal state",
    }


def test_a_request_without_events_is_logged_as_before():
    """So that a log of an older version replays."""
    controller = Controller(curve=curve())
    request = controller.begin(Traffic(20), 0.0)
    play(request)
    assert not {"changed", "disturbed_by"} & request_line(controller, request).keys()


# --- a machine that is never at rest


def restless(phase: Phase, reply_tokens: int, n_requests: int) -> tuple[float, float]:
    """ps that drafts lost, and all that was decoded, where something happens in each request."""
    keys = {**LOSING, "reply_tokens": reply_tokens}
    losses: list[float] = []
    controller = Controller(
        curve=curve(keys=keys), on_concluded=lambda request: losses.append(request.report.loss)
    )
    controller.memory.phase = phase
    begin = controller.begin

    def disturbed(traffic: Traffic, now_s: float) -> RequestPacer:
        request = begin(traffic, now_s)
        controller.disturb(HEAT)
        return request

    controller.begin = disturbed
    serve(n_requests, controller, keys=keys)
    return sum(losses), controller.memory.ledger.decode


@pytest.mark.parametrize("phase", ["measuring", "on", "off"])
@pytest.mark.parametrize(
    ("reply_tokens", "n_requests"),
    [(100, 60), *(pytest.param(n, 20_000 // n, marks=pytest.mark.long) for n in (14, 40, 300))],
)
def test_a_machine_that_is_never_at_rest_costs_hardly_anything(
    phase: Phase, reply_tokens: int, n_requests: int
):
    """Nothing can be learnt there, so a draft that loses is tried at its bounded price alone."""
    lost, decode = restless(phase, reply_tokens, n_requests)
    assert lost <= 150 + 0.01 * decode


def test_drafts_are_tried_again_once_the_machine_is_at_rest():
    """However long it was not."""
    controller = Controller(curve=curve())
    controller.memory.ledger.trial_loss = 1000.0
    controller.memory.is_wasted = True
    request = controller.begin(Traffic(20), 0.0)
    assert not request.course.times
    play(request)
    assert controller.begin(Traffic(20), 1.0).course.times


# --- any schedule of events


def any_course(n: int, seed: int) -> list[dict[str, Any]]:
    """A head and n requests; anything happens to the machine in any of their rounds, or between."""
    lines: list[dict[str, Any]] = []
    dice = Random(seed)

    def happen(often: float) -> None:
        while dice.random() < often:
            controller.disturb(dice.choice([SLEEP, HEAT, SOURCE]))

    def hear(request: RequestPacer) -> None:
        lines.append(request_line(controller, request))
        happen(0.15)

    def begun(traffic: Traffic, now_s: float) -> RequestPacer:
        request = begin(traffic, now_s)
        observe = request.observe

        def observed(round: Round) -> None:
            happen(0.002)
            observe(round)

        request.observe = observed
        return request

    controller = Controller(curve=curve(seed % 5), seed=seed, on_concluded=hear)
    begin, controller.begin = controller.begin, begun
    lines.append(head(controller, {}, 0.0))
    serve(n, controller, seed=seed % 5, **EVENTS)
    return plain(lines)


@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 60))]
)
def test_any_schedule_of_events_replays_bit_for_bit(seed: int):
    """Also what began beside another, and what its client left."""
    lines = any_course(30 if seed < 3 else 90, seed)
    assert plain(replay(lines)) == lines[1:]


def test_every_event_is_heard_once_whoever_tells_it():
    """Many threads at once, while requests begin and end."""
    controller = Controller(curve=curve())
    tellers = [
        threading.Thread(
            target=lambda n=n: [
                controller.disturb(Disturbance(f"{n}/{i}", lasts=True)) for i in range(200)
            ]
        )
        for n in range(4)
    ]
    for teller in tellers:
        teller.start()
    changed: list[str] = []
    while any(teller.is_alive() for teller in tellers):
        request = controller.begin(Traffic(20), 0.0)
        changed += request.changed
        request.end()
    changed += controller.begin(Traffic(20), 0.0).changed
    assert sorted(changed) == sorted(f"{n}/{i}" for n in range(4) for i in range(200))
