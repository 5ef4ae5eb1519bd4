"""A course replays from its lines alone, bit for bit, and what was changed in them is noticed."""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlx_worker.control import controller, measure
from mlx_worker.control.controller import Controller
from mlx_worker.control.log import FORMAT, ReplayDiffers, head, replay, request_line, restored
from mlx_worker.control.pacer import RequestPacer
from mlx_worker.decisions import DecisionLog, read
from mlx_worker.records import Round, Traffic
from tests.courses import EVENTS, course_lines, curve, eventful_course, plain, serve
from tests.tiers import thinned

WORDS = {"request", "measuring", "on", "off", "baseline", "trial", "draft", "plain"}


def is_replayed(lines: list[dict[str, Any]]) -> bool:
    """Whether the head's controller writes the same requests again."""
    try:
        return plain(replay(lines)) == lines[1:]
    except ReplayDiffers:
        return False


def logged(**options: Any) -> tuple[Controller, list[dict[str, Any]]]:
    """A new controller and its lines, the head first."""
    lines: list[dict[str, Any]] = []
    controller = Controller(
        **options, on_concluded=lambda request: lines.append(request_line(controller, request))
    )
    lines.append(head(controller, {}, 0.0))
    return controller, lines


def strings(value: Any) -> Iterator[str]:
    """Every text in a value, but for keys."""
    match value:
        case str():
            yield value
        case dict():
            for each in value.values():
                yield from strings(each)
        case list():
            for each in value:
                yield from strings(each)
        case _:
            pass


# --- the same again ---------------------------------------------------------------------------


def test_a_course_replays_from_its_file_bit_for_bit(tmp_path: Path):
    """On, brackets, exits, a change of mind, Off; overlaps, a disturbance, clients that leave."""
    seed, expected = eventful_course()
    log = DecisionLog(tmp_path, {"model": "m", "draft": "d"}, now_s=lambda: 0.0)
    controller = Controller(curve=curve(seed), seed=seed, on_concluded=log.hear)
    log.attach(controller)
    serve(70, controller, seed=seed, **EVENTS)
    log.close()
    ((part,),) = [history.parts for history in read(tmp_path)]
    assert part.requests == expected[1:]
    assert plain(replay(part.lines)) == part.requests


@pytest.mark.parametrize("what", ["overlap", "disturbance", "early end", "long plain reply"])
def test_the_course_has_what_its_replay_is_tested_on(what: str):
    """Otherwise the test above would say nothing about it."""
    requests = eventful_course()[1][1:]
    found = {
        "overlap": any(b["begun_after"] < a["number"] for a, b in pairwise(requests)),
        "disturbance": any(
            line["disturbed"] and line["number"] in EVENTS["disturbed"] for line in requests
        ),
        "early end": any(line["left_early"] and line["mode"] == "on" for line in requests),
        "long plain reply": any("more" in part for line in requests for part in line["segments"]),
    }
    assert found[what]


def parts_of_a_course(
    is_time: Callable[[Controller, int], bool],
) -> list[list[dict[str, Any]]]:
    """A course whose log begins anew where it is time, told how many lines there are."""
    lines: list[dict[str, Any]] = []

    def hear(request: RequestPacer) -> None:
        lines.append(request_line(controller, request))
        if controller.is_idle and is_time(controller, len(lines)):
            lines.append(head(controller, {}, 0.0))

    seed = eventful_course()[0]
    controller = Controller(curve=curve(seed), seed=seed, on_concluded=hear)
    serve(70, controller, seed=seed, **EVENTS)
    lines = plain(lines)
    starts = [n for n, line in enumerate(lines) if line["kind"] == "head"]
    return [lines[start:stop] for start, stop in pairwise([*starts, len(lines)])]


def test_a_course_replays_from_a_head_in_its_middle():
    """As in a file that was begun when the one before was full."""
    parts = parts_of_a_course(lambda controller, _: controller.n_concluded in (5, 40))
    assert len(parts) == 2
    for part in parts:
        assert is_replayed(part)


def test_a_course_replays_from_a_head_written_while_costs_are_in_doubt():
    """The pairs that wait for the next request's are part of what a controller knows."""
    parts = parts_of_a_course(
        lambda controller, n_lines: bool(controller.memory.costs.suspects) and n_lines > 20
    )
    assert parts
    for part in parts:
        assert is_replayed(part)


@pytest.mark.parametrize("seed", thinned(range(3)))
def test_a_head_written_after_any_request_shows_the_same_status(seed: int):
    """Nothing that a controller shows rests on what its head leaves out; drafts stall here."""
    rng, found = random.Random(seed), list[tuple[Any, Any]]()

    def hear(_: RequestPacer) -> None:
        if controller.is_idle:
            (again,) = plain([head(controller, {}, 0.0)])
            found.append((restored(again).status, controller.status))

    controller = Controller(seed=seed, on_concluded=hear)
    for n in range(120):
        request, n_ids = controller.begin(Traffic(20), float(n)), 1
        while n_ids < (400 if n % 3 else 20):
            plan = request.plan()
            for _ in range(max(1, min(plan.tokens, 50) // 2)):
                round_ms = rng.gauss(10 + 3 * plan.depth, 1.0) * (4 if rng.random() < 0.1 else 1)
                accepted = min(plan.depth, rng.randrange(3))
                request.observe(Round(plan.depth, plan.depth, accepted, round_ms, 20 + n_ids))
                n_ids += accepted + 1
        request.end()
    assert len(found) == 120
    assert all(again == status for again, status in found)


def test_a_forced_controller_replays():
    """It drafts whatever it sees, from its head on."""
    controller, lines = logged(depths=(2, 3), forced="on")
    serve(5, controller)
    assert is_replayed(plain(lines))
    assert {line["status"]["state"] for line in lines[1:]} == {"on"}


def test_a_context_that_grows_over_the_edge_of_a_bucket_replays():
    """The line has a segment's first context; the first round of a trial doesn't price it."""
    for before_edge in range(60):
        controller, lines = logged()
        context = measure.BUCKETS[0] - before_edge
        request = controller.begin(Traffic(context), 0.0)
        for n in range(8):
            plan = request.plan()
            right, until = min(plan.depth, 2), context + plan.tokens
            while context < until:
                round_ms = 20.0 + plan.depth * (1 + n % 3)
                request.observe(Round(plan.depth, plan.depth, right, round_ms, context))
                context += right + 1
        request.end()
        assert is_replayed(plain(lines))


def test_rounds_that_a_grammar_forced_replay():
    """What it left no choice about is in the line, as it is no acceptance of the draft."""
    controller, lines = logged()
    for n in range(12):
        request = controller.begin(Traffic(20, has_grammar=True), float(n))
        context = 20
        while context < 150:
            plan = request.plan()
            depth, until = plan.depth, context + plan.tokens
            while context < until:
                forced = min(depth, context % 3)
                request.observe(Round(depth, depth, depth, 20.0 + depth, context, forced))
                context += depth + 1
        request.end()
    assert is_replayed(plain(lines))
    rounds = [line for line in lines[1:] if line["rounds"]]
    assert all(line["accepted"] == line["drafted"] for line in rounds)
    assert any(line["drafted"] < line["tokens"] - line["rounds"] for line in rounds)


# --- not the same -----------------------------------------------------------------------------


def test_a_changed_time_is_noticed():
    """One round of the first request, a thousandth slower."""
    lines = plain(eventful_course()[1])
    trial = next(part for part in lines[1]["segments"] if part["purpose"] == "trial")
    trial["times"][1][0] *= 1.001
    assert not is_replayed(lines)


def test_a_changed_count_is_noticed():
    """One more accepted id, or another depth than the controller plans."""
    for place in (1, 3):
        lines = plain(eventful_course()[1])
        trial = next(part for part in lines[1]["segments"] if part["purpose"] == "trial")
        trial["times"][1][place] += -1 if trial["times"][1][place] else 1
        assert not is_replayed(lines)


@pytest.mark.parametrize(
    ("home", "name", "value"),
    [(measure, "WINSOR", 1.05), (measure, "LEVEL_FADE", 0.96), (controller, "MAX_PAIRS", 7)],
)
def test_a_changed_constant_is_noticed(
    home: ModuleType, name: str, value: float, monkeypatch: pytest.MonkeyPatch
):
    """Of the estimates or of the course: a log tells which rules it was decided by."""
    lines = eventful_course()[1]
    monkeypatch.setattr(home, name, value)
    assert not is_replayed(lines)


def test_a_left_out_request_is_noticed():
    """Its successors would begin in another state."""
    lines = eventful_course()[1]
    assert not is_replayed(lines[:5] + lines[6:])


def test_a_log_without_its_head_or_of_another_format_is_refused():
    """By name, not by a difference somewhere in it."""
    first, *requests = plain(eventful_course()[1])
    for lines in (requests, [{**first, "format": FORMAT - 1}, *requests]):
        with pytest.raises(ReplayDiffers, match=f"no head of format {FORMAT}"):
            list(replay(lines))


# --- what a line holds ------------------------------------------------------------------------


def test_a_line_holds_no_word_of_a_conversation():
    """All texts in it are of a closed set, but for the status's own two."""
    for line in eventful_course()[1][1:]:
        assert {*strings({**line, "status": None})} <= WORDS
        assert {*strings(line["status"])} <= WORDS | {line["status"]["text"], line["status"]["why"]}


def test_a_line_counts_what_its_rounds_say():
    """The figures for a reader are those of the segments."""
    for line in eventful_course()[1][1:]:
        times = [time for part in line["segments"] for time in part["times"]]
        more = sum(part["more"][0] for part in line["segments"] if "more" in part)
        rounds = [time for time in times if len(time) == 4]
        assert line["rounds"] == len(rounds)
        assert line["depths"] == sorted({time[1] for time in rounds})
        assert line["drafted"] == sum(time[2] for time in rounds)
        assert line["accepted"] == sum(time[3] for time in rounds)
        assert line["tokens"] == len(times) + line["accepted"] + more


def test_a_requests_own_gain_has_the_sign_of_its_times():
    """Rounds of 1.25 steps that give 2 ids gain 60 %; without a plain step there is no gain."""
    controller, lines = logged(depths=(2,), forced="on")
    for has_steps in (False, True):
        request = controller.begin(Traffic(10), 0.0)
        request.plan()
        for n in range(3):
            request.observe(Round(2, 2, 1, 25.0, 10 + 2 * n))
            request.plan()
        if has_steps:
            controller.memory.step_ms[0] = 20.0
        request.end()
    assert [line["gain"] for line in lines[1:]] == [None, pytest.approx(0.6)]


def test_the_same_course_gives_the_same_lines():
    """Nothing in a line depends on the clock of the machine or on the order of a set."""
    assert course_lines(1, 12) == course_lines(1, 12)
