"""Figures of one call, added up over its choices as the API defines them."""

from dataclasses import replace
from typing import Any

import pytest

from mlx_worker.records import Progress, ReplyEvent, Started
from mlx_worker.wire.account import Account
from tests.wire.events import STARTED, WORKER, done, text


def account(*events: ReplyEvent, started: Started = STARTED, n: int = 1) -> Account:
    account = Account("r1", WORKER, n)
    for event in (started, *events):
        account.add(event)
    return account


def timing(*events: ReplyEvent, **more: Any) -> dict[str, Any]:
    return account(*events, **more).timing()


def test_usage_counts_the_prompt_once_and_every_choices_ids():
    """n choices read one prompt."""
    usage = account(done(3), done(5, choice=1), n=2).usage()
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 8, 15)


def test_cached_tokens_are_those_of_the_choice_that_read_the_prompt():
    """The others find all of it cached, which says nothing about earlier requests."""
    events = [ReplyEvent(1, Progress(7, 7)), done(choice=0, cached_tokens=7)]
    usage = account(*events, done(choice=1, cached_tokens=4), n=2).usage()
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_the_time_to_first_token_begins_with_the_wait():
    """It is what a client saw: the queue, the load of the model, the prompt."""
    started = Started("demo", 7, queue_wait_ms=1000.0, model_load_ms=900.0)
    assert timing(done(ttft_ms=20.0), started=started)["ttft_ms"] == 1020.0


def test_the_time_to_first_token_is_that_of_the_first_choice():
    """A later choice starts from a prompt that is read."""
    events = [text("a", 0, choice=1), done(choice=0, ttft_ms=1.0)]
    assert timing(*events, done(choice=1, ttft_ms=50.0), n=2)["ttft_ms"] == 52.5


def test_both_waits_are_the_workers():
    """Nothing queues before this door."""
    found = timing(done())
    assert (found["queue_wait_ms"], found["worker_queue_wait_ms"]) == (2.5, 2.5)


@pytest.mark.parametrize(("load_ms", "is_cold"), [(0.0, False), (1.0, True)])
def test_a_call_that_loaded_the_model_was_a_cold_start(load_ms: float, is_cold: bool):
    """The time and the word say the same."""
    found = timing(done(), started=Started("demo", 7, 2.0, load_ms))
    assert (found["model_load_ms"], found["cold_start"]) == (load_ms, is_cold)


@pytest.mark.parametrize(
    ("ends", "rate"),
    [
        ([(1, 0.0)], None),
        ([(0, 0.0)], None),
        ([(2, 0.0)], None),
        ([(2, 5e-324)], None),  # a time that no clock tells from 0: dividing by it has no result
        ([(2, 100.0)], 10.0),
        ([(11, 500.0)], 20.0),
        ([(11, 500.0), (1, 0.0)], 20.0),
        ([(11, 500.0), (6, 250.0)], 20.0),
        ([(1, 0.0), (1, 0.0)], None),
    ],
)
def test_speed_is_ids_after_the_first_by_decode_time(
    ends: list[tuple[int, float]], rate: float | None
):
    """Of several choices, all such ids by all that time; null where there are none."""
    events = [done(tokens, choice=choice, decode_ms=ms) for choice, (tokens, ms) in enumerate(ends)]
    assert timing(*events, n=len(ends))["tokens_per_second"] == rate


def test_acceptance_is_of_all_choices_together():
    """Accepted over drafted, not the mean of two rates."""
    events = [done(drafted=10, accepted=9), done(choice=1, drafted=30, accepted=3)]
    assert timing(*events, n=2)["draft_acceptance_rate"] == 12 / 40


def test_acceptance_is_absent_when_nothing_was_drafted():
    """Zero would mean that every draft was wrong."""
    assert "draft_acceptance_rate" not in timing(done())


def test_acceptance_of_wrong_drafts_is_zero():
    """Which is a measurement, and shown."""
    assert timing(done(drafted=4))["draft_acceptance_rate"] == 0.0


def test_a_notice_is_in_the_block():
    """What was asked for and can't be had."""
    started = Started("demo", 7, 2.5, notice=("speculation_unavailable", "it is off"))
    block = account(done(), started=started).pendra()
    assert block["notice"] == {"code": "speculation_unavailable", "message": "it is off"}


CUT = ("truncated_during_reasoning", "cut off")
CUT_LATER = ("truncated_during_structured_output", "cut off later")
OFF = ("speculation_unavailable", "it is off")


@pytest.mark.parametrize(
    ("at_start", "at_ends", "shown"),
    [
        (None, [None, None], None),
        (OFF, [None, None], OFF),
        (OFF, [None, CUT], CUT),
        (None, [CUT, None], CUT),
        (OFF, [CUT, CUT_LATER], CUT),
        (OFF, [CUT_LATER, CUT], CUT_LATER),
    ],
)
def test_one_notice_is_shown(at_start: Any, at_ends: list[Any], shown: Any):
    """That of the first choice which has one, whichever ended first; else that of the start."""
    ends = [done(choice=choice, notice=notice) for choice, notice in enumerate(at_ends)]
    block = account(*reversed(ends), started=replace(STARTED, notice=at_start), n=2).pendra()
    assert block.get("notice") == (shown and {"code": shown[0], "message": shown[1]})


def test_usage_counts_every_choices_thinking():
    """It is a part of what was written."""
    usage = account(done(3, reasoning_tokens=2), done(5, choice=1, reasoning_tokens=4), n=2).usage()
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert usage["completion_tokens"] == 8


def test_the_spans_of_server_timing_add_up():
    """Loading is a part of the wait, so it is taken out of it."""
    started = Started("demo", 7, queue_wait_ms=1000.0, model_load_ms=900.0)
    events = [done(ttft_ms=20.0, decode_ms=300.0), done(choice=1, ttft_ms=1.0, decode_ms=200.0)]
    header = account(*events, started=started, n=2).server_timing()
    assert header == "queue;dur=100.0, load;dur=900.0, prefill;dur=20.0, decode;dur=500.0"
