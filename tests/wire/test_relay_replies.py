"""Replies as a gateway writes them again: all that an honest worker says, nothing else."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from mlx_worker.wire.account import WorkerIdentity
from mlx_worker.wire.link import DoneFrame, ErrorFrame, TimingPart, UsagePart
from mlx_worker.wire.relay import (
    BrokenReply,
    Endpoint,
    Relay,
    Stamp,
    error_of,
    is_opening,
    server_timing,
)
from mlx_worker.wire.reply import CompletionReply, CompletionStream
from tests.wire.events import CREATED, STARTED, WORKER, asked, calls, done, text
from tests.wire.written import Events, MarkedReply, MarkedStream, chunks, full

SAME = Stamp("chat", "r1", "demo", WORKER, n=1, created=CREATED)
OTHER = Stamp("chat", "mine", "its-name", WorkerIdentity("w9", "Mac", "9"), 1, 5, wait_ms=100.0)
STREAMS = {"chat": MarkedStream, "completion": CompletionStream}
REPLIES = {"chat": MarkedReply, "completion": CompletionReply}
DRAFTED = [STARTED, text("hi", 0), done(3, drafted=4, accepted=3, decode_ms=100.0, ttft_ms=20.0)]
CHUNK: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": "a"}}]}


def through(value: Any) -> Any:
    """As it comes over a link."""
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("endpoint", STREAMS)
@given(calls(), st.none() | st.just(3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_chunk_of_an_honest_worker_loses_anything(
    endpoint: Endpoint, call: tuple[int, Events], logprobs: int | None, include_usage: bool
):
    """Thinking, calls, log-probabilities, usage, notices: each chunk is what it was."""
    n, events = call
    wanted = asked(n, logprobs, include_usage=include_usage)
    written = chunks(STREAMS[endpoint], wanted, events)
    relay = Relay(replace(SAME, endpoint=endpoint, n=n), is_streamed=True)
    assert relay.checked(through(written)) == written


@pytest.mark.parametrize("endpoint", REPLIES)
@given(calls(), st.none() | st.just(3))
@settings(max_examples=60, deadline=None)
def test_no_full_reply_of_an_honest_worker_loses_anything(
    endpoint: Endpoint, call: tuple[int, Events], logprobs: int | None
):
    """The one object is what it was."""
    n, events = call
    written = full(REPLIES[endpoint], asked(n, logprobs), events)
    relay = Relay(replace(SAME, endpoint=endpoint, n=n), is_streamed=False)
    assert relay.checked([through(written)]) == [written]


def test_who_answers_is_the_gateways_own_word():
    """Id, model, time, worker and request id are not the worker's to say."""
    reply = full(MarkedReply, asked(), DRAFTED)
    (found,) = Relay(OTHER, is_streamed=False).checked([through(reply)])
    assert (found["id"], found["model"], found["created"]) == ("chatcmpl-mine", "its-name", 5)
    assert found["pendra"]["request_id"] == "mine"
    assert found["pendra"]["worker"] == {"id": "w9", "name": "Mac", "version": "9"}


def test_the_wait_here_is_part_of_what_the_client_waited():
    """queue_wait_ms and ttft_ms have it in them; the worker's own wait stands beside."""
    reply = full(MarkedReply, asked(), DRAFTED)
    (found,) = Relay(OTHER, is_streamed=False).checked([through(reply)])
    timing = found["pendra"]["timing"]
    assert timing["queue_wait_ms"] == 102.5
    assert timing["worker_queue_wait_ms"] == 2.5
    assert timing["ttft_ms"] == 122.5
    assert timing["draft_acceptance_rate"] == 0.75


def test_a_rate_of_nothing_is_no_rate():
    """Null is written as an absent key: nothing was drafted."""
    reply = full(MarkedReply, asked(), DRAFTED)
    reply["pendra"]["timing"]["draft_acceptance_rate"] = None
    (found,) = Relay(OTHER, is_streamed=False).checked([through(reply)])
    assert "draft_acceptance_rate" not in found["pendra"]["timing"]


def test_what_is_not_known_is_dropped():
    """At every level."""
    lie = {"choices": [{"index": 0, "delta": {"content": "a", "x": 1}, "y": 1}], "z": "\n\ndata: a"}
    (found,) = Relay(SAME, is_streamed=True).checked([lie])
    assert found["choices"] == [{"index": 0, "delta": {"content": "a"}}]
    assert found.keys() == {"id", "object", "created", "model", "choices"}


LIES: dict[str, dict[str, Any]] = {
    "no choices": {},
    "choices that are none": {"choices": [1]},
    "a text that is a number": {"choices": [{"index": 0, "delta": {"content": 1}}]},
    "a choice that nobody asked for": {"choices": [{"index": 1, "delta": {}}]},
    "a choice below the first": {"choices": [{"index": -1, "delta": {}}]},
    "an index that is no number": {"choices": [{"index": True, "delta": {}}]},
    "an end that is none": {"choices": [{"index": 0, "delta": {}, "finish_reason": "hacked"}]},
    "a role that is not its own": {"choices": [{"index": 0, "delta": {"role": "system"}}]},
    "a count below zero": CHUNK
    | {"usage": {"prompt_tokens": -1, "completion_tokens": 1, "total_tokens": 0}},
    "a time that is no number": CHUNK | {"pendra": {"timing": {"ttft_ms": float("nan")}}},
    "an endless rate": CHUNK
    | {"pendra": {"timing": {"ttft_ms": 1.0, "tokens_per_second": float("inf")}}},
    "a share above one": CHUNK
    | {"pendra": {"timing": {"ttft_ms": 1.0, "draft_acceptance_rate": 2.0}}},
    "a log-probability that is none": {
        "choices": [
            {
                "index": 0,
                "delta": {},
                "logprobs": {"content": [{"token": "a", "logprob": float("-inf")}]},
            }
        ]
    },
    "a byte that is none": {
        "choices": [
            {
                "index": 0,
                "delta": {},
                "logprobs": {"content": [{"token": "a", "logprob": -1.0, "bytes": [256]}]},
            }
        ]
    },
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_chunk_that_is_none_is_refused(lie: dict[str, Any]):
    """The first thing wrong with it is said, and none of its text."""
    with pytest.raises(BrokenReply, match=r"^no reply: "):
        Relay(SAME, is_streamed=True).checked([lie])


@pytest.mark.parametrize("key", ["usage", "pendra", "choices"])
def test_a_full_reply_is_whole(key: str):
    """It has every choice, its usage and its timing."""
    reply = full(MarkedReply, asked(), DRAFTED)
    reply[key] = [] if key == "choices" else None
    with pytest.raises(BrokenReply):
        Relay(SAME, is_streamed=False).checked([through(reply)])


def test_what_opens_a_stream_says_nothing_yet():
    """Only the first chunks of a chat do so."""
    found = chunks(MarkedStream, asked(), DRAFTED)
    assert [is_opening(chunk) for chunk in found] == [True, False, False]


def test_spans_of_a_reply_add_up():
    """From the door of the gateway to the last token."""
    timing = TimingPart(
        ttft_ms=130, tokens_per_second=10, worker_queue_wait_ms=100, model_load_ms=80
    )
    frame = DoneFrame(
        id="0" * 32,
        seq=1,
        finish_reason="stop",
        usage=UsagePart(prompt_tokens=1, completion_tokens=11),
        timing=timing,
    )
    assert server_timing(frame, 5.0) == (
        "gateway;dur=5.0, queue;dur=20.0, load;dur=80.0, prefill;dur=30.0, decode;dur=1000.0"
    )


@pytest.mark.parametrize(
    ("status", "code", "message", "shown"),
    [
        (404, "model_not_found", "no such model", (404, "model_not_found", "no such model")),
        (401, "No Code!", "a\r\nb", (502, "worker_error", "a  b")),
        (599, "x" * 65, "", (502, "worker_error", "the worker could not answer")),
    ],
)
def test_an_error_of_a_worker_has_a_form_that_may_be_shown(
    status: int, code: str, message: str, shown: tuple[int, str, str]
):
    """What is not of it is replaced, so that no worker signs anyone out, or adds a line."""
    frame = ErrorFrame(id="0" * 32, seq=0, code=code, message=message, status=status)
    assert error_of(frame) == shown
