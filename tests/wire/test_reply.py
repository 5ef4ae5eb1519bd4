"""Events become the objects that OpenAI's clients read, whole or in chunks."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given, settings, strategies as st
from openai.lib.streaming._deltas import accumulate_delta
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mlx_worker.errors import GenerationFailed
from mlx_worker.records import ReplyEvent, Text
from mlx_worker.wire.failure import error_body
from mlx_worker.wire.reply import (
    ChatReply,
    ChatStream,
    CompletionReply,
    CompletionStream,
    FullReply,
    ReplyStream,
)
from mlx_worker.wire.sse import DONE, json_bytes, sse_event
from tests.wire.events import CREATED, STARTED, WORKER, asked, calls, done, text
from tests.wire.written import Events, Json, MarkedReply, MarkedStream, chunks, client, full

EURO = [text("", 2), text("", 3), text("€", 4)]  # one character, whose bytes are three ids


def chat(*events: ReplyEvent, **wanted: Any) -> Json:
    return full(ChatReply, asked(**wanted), [STARTED, *events])


def chat_chunks(*events: ReplyEvent, **wanted: Any) -> list[Json]:
    return chunks(ChatStream, asked(**wanted), [STARTED, *events])


def completion(*events: ReplyEvent, **wanted: Any) -> Json:
    return full(CompletionReply, asked(**wanted), [STARTED, *events])


def completion_chunks(*events: ReplyEvent, **wanted: Any) -> list[Json]:
    return chunks(CompletionStream, asked(**wanted), [STARTED, *events])


USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 1,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
PENDRA = {
    "request_id": "r1",
    "worker": {"id": "w1", "name": "Mac of Olga", "version": "0.1.0"},
    "timing": {
        "ttft_ms": 22.5,
        "tokens_per_second": None,
        "queue_wait_ms": 2.5,
        "worker_queue_wait_ms": 2.5,
        "model_load_ms": 0.0,
        "cold_start": False,
    },
}
FIGURES = {"usage": USAGE, "pendra": PENDRA}


def chunk(choices: list[Json], **more: Any) -> Json:
    head = {"id": "chatcmpl-r1", "object": "chat.completion.chunk", "created": CREATED}
    return head | {"model": "demo", "choices": choices} | more


def delta(content: Json, reason: str | None = None, index: int = 0) -> Json:
    return {"index": index, "delta": content, "logprobs": None, "finish_reason": reason}


OPENING = {"role": "assistant", "content": ""}


def test_a_chat_reply_has_the_shape_of_openai():
    """Every key of the whole object, and the block beside it."""
    message = {"role": "assistant", "content": "a", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    assert chat(text("a", 0), done()) == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "created": CREATED,
        "model": "demo",
        "choices": [choice],
        **FIGURES,
    }


def test_a_completion_has_the_shape_of_openai():
    """The same for the older endpoint."""
    choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}
    assert completion(text("a", 0), done(reason="length")) == {
        "id": "cmpl-r1",
        "object": "text_completion",
        "created": CREATED,
        "model": "demo",
        "choices": [choice],
        **FIGURES,
    }


def test_a_chat_stream_is_role_then_text_then_finish_with_the_figures():
    """Usage and the block are on the chunk that carries finish_reason."""
    assert chat_chunks(text("a", 0), text("b", 0), done()) == [
        chunk([delta(OPENING)]),
        chunk([delta({"content": "a"})]),
        chunk([delta({"content": "b"})]),
        chunk([delta({}, "stop")], **FIGURES),
    ]


def test_a_stream_with_include_usage_ends_in_a_chunk_without_choices():
    """The figures are there and nowhere else; until then usage is null."""
    assert chat_chunks(text("a", 0), done(), include_usage=True) == [
        chunk([delta(OPENING)], usage=None),
        chunk([delta({"content": "a"})], usage=None),
        chunk([delta({}, "stop")], usage=None),
        chunk([], **FIGURES),
    ]


def test_a_completion_stream_is_text_then_finish_with_the_figures():
    """There is no role to open with."""
    assert [
        (one["object"], one["choices"][0]["text"], one["choices"][0]["finish_reason"])
        for one in completion_chunks(text("a", 0), done())
    ] == [("text_completion", "a", None), ("text_completion", "", "stop")]


def test_choices_of_a_stream_are_told_apart_by_index():
    """Each has its own role chunk and its own finish; the last to finish brings the figures."""
    events = [text("b", 0, choice=1), done(choice=1, reason="length"), text("a", 0), done()]
    found = chat_chunks(*events, n=2)
    assert [one["choices"][0] for one in found] == [
        delta(OPENING),
        delta(OPENING, index=1),
        delta({"content": "b"}, index=1),
        delta({}, "length", index=1),
        delta({"content": "a"}),
        delta({}, "stop"),
    ]
    assert ["usage" in one for one in found] == [False] * 5 + [True]


@pytest.mark.parametrize("kind", [ChatStream, CompletionStream])
def test_ids_without_text_give_no_chunk(kind: type[ReplyStream]):
    """A character that is not whole yet is not shown."""
    stream = kind(asked(), CREATED, WORKER)
    stream.feed(STARTED)
    assert [len(stream.feed(event)) for event in EURO] == [0, 0, 1]


def test_logprobs_of_ids_without_text_come_with_the_next_chunk():
    """Three ids of one character are three entries on the chunk that shows it."""
    found = chat_chunks(*EURO, done(3), logprobs=0)[1]["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in found] == [[0xE2], [0x82], [0xAC]]


def test_logprobs_of_the_last_ids_come_with_the_finish():
    """An end-of-turn id has no text, but it is counted and has its logprob."""
    found = chat_chunks(text("a", 0), text("", 6), done(2), logprobs=0)[-1]["choices"][0]
    assert (found["delta"], [one["token"] for one in found["logprobs"]["content"]]) == (
        {},
        ["<eos>"],
    )


def test_an_entry_of_a_chat_has_token_bytes_and_rivals():
    """Part of a character reads as U+FFFD; its bytes are exact."""
    found = chat(text("", 2, rivals=[0, 2]), done(), logprobs=2)["choices"][0]["logprobs"]
    part = {"token": "\ufffd", "logprob": -0.5, "bytes": [0xE2]}
    rivals = [{"token": "a", "logprob": 0.0, "bytes": [97]}, part]
    assert found == {"content": [part | {"top_logprobs": rivals}]}


def test_logprobs_of_a_completion_are_parallel_lists():
    """The chosen id is always among the rivals; an offset counts whole characters before it."""
    events = [text("é", 5, rivals=[0]), *EURO, text(" one", 1), done(5)]
    assert completion(*events, logprobs=1)["choices"][0]["logprobs"] == {
        "tokens": ["é", "\ufffd", "\ufffd", "\ufffd", " one"],
        "token_logprobs": [-1.25, -0.5, -0.75, -1.0, -0.25],
        "top_logprobs": [
            {"a": 0.0, "é": -1.25},
            {"\ufffd": -0.5},
            {"\ufffd": -0.75},
            {"\ufffd": -1.0},
            {" one": -0.25},
        ],
        "text_offset": [0, 1, 1, 1, 2],
    }


def test_of_rivals_that_read_alike_the_likelier_is_kept():
    """A map by text has room for one of them."""
    found = completion(text("", 4, rivals=[2, 3]), done(), logprobs=2)["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [{"\ufffd": -0.5}]


def test_offsets_go_on_from_chunk_to_chunk():
    """A stream's offsets are those of the whole text."""
    found = completion_chunks(text("a", 0), text(" one", 1), text("", 6), done(3), logprobs=0)
    assert [one["choices"][0]["logprobs"]["text_offset"] for one in found] == [[0], [1], [5]]


@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
def test_logprobs_are_absent_unless_asked_for(kind: type[FullReply]):
    """Whatever the engine sends along, with the bytes of ids or without."""
    events = [STARTED, replace(text("a", 0), tokens={}), done()]
    assert full(kind, asked(), events)["choices"][0]["logprobs"] is None


def test_asked_for_logprobs_of_an_empty_reply_are_an_empty_list():
    """There is nothing to say, but it was said."""
    assert chat(done(0), logprobs=0)["choices"][0]["logprobs"] == {"content": []}


def test_a_client_sees_text_not_ids():
    """Text that a stop cut off is not put together again from ids."""
    events = [STARTED, ReplyEvent(0, Text((0, 1), "a")), done(2)]
    assert full(ChatReply, asked(), events)["choices"][0]["message"]["content"] == "a"


def test_a_reply_that_has_not_ended_is_no_reply():
    """Finishing early is our mistake, not a short answer."""
    reply = ChatReply(asked(n=2), CREATED, WORKER)
    for event in [STARTED, done()]:
        reply.feed(event)
    with pytest.raises(AssertionError, match="a choice has no Done"):
        reply.finish()


def joined_choices(found: Sequence[Json], n: int) -> list[Json]:
    """What OpenAI's own client puts together from the chunks: message, logprobs and finish."""
    whole: list[Json] = [{"said": {}, "logprobs": {}, "reason": None} for _ in range(n)]
    for choice in (choice for one in found for choice in one["choices"]):
        mine = whole[choice["index"]]
        said = choice.get("delta", {"text": choice.get("text")})
        mine["said"] = accumulate_delta(mine["said"], copy.deepcopy(said))
        for name, entries in (choice["logprobs"] or {}).items():
            mine["logprobs"].setdefault(name, []).extend(entries)
        assert mine["reason"] is None, "a chunk after the finish"
        mine["reason"] = choice["finish_reason"]
    return whole


def choices_of(reply: Json) -> list[Json]:
    """The same of a full reply."""
    return [
        {
            "said": streamed_message(choice.get("message", {"text": choice.get("text")})),
            "logprobs": {name: all for name, all in (choice["logprobs"] or {}).items() if all},
            "reason": choice["finish_reason"],
        }
        for choice in reply["choices"]
    ]


def streamed_message(message: Json) -> Json:
    """A message as its stream adds up: calls are numbered, no content is an empty one."""
    said = {key: value for key, value in message.items() if key != "refusal"}
    if "content" in said:
        said["content"] = said["content"] or ""
    if "tool_calls" in said:
        said["tool_calls"] = [{"index": i, **call} for i, call in enumerate(said["tool_calls"])]
    return said


KINDS = pytest.mark.parametrize(
    ("whole", "stream"),
    [
        (ChatReply, ChatStream),
        (MarkedReply, MarkedStream),
        (CompletionReply, CompletionStream),
    ],
)


@KINDS
@settings(deadline=None)
@given(call=calls(), logprobs=st.none() | st.just(3), include_usage=st.booleans())
def test_a_stream_joined_is_the_full_reply(
    whole: type[FullReply],
    stream: type[ReplyStream],
    call: tuple[int, Events],
    logprobs: int | None,
    include_usage: bool,
):
    """Text, thinking, calls, logprobs, ends and figures don't depend on how they are sent."""
    n, events = call
    want = asked(n, logprobs, include_usage=include_usage)
    reply, found = full(whole, want, events), chunks(stream, want, events)
    assert joined_choices(found, n) == choices_of(reply)
    assert [one["pendra"] for one in found if "pendra" in one] == [reply["pendra"]]
    assert [one["usage"] for one in found if one.get("usage")] == [reply["usage"]]
    assert (found[-1]["usage"], found[-1]["pendra"]) == (reply["usage"], reply["pendra"])


@settings(deadline=None)
@given(call=calls(), logprobs=st.none() | st.just(3), include_usage=st.booleans())
def test_openais_own_types_accept_every_object(
    call: tuple[int, Events], logprobs: int | None, include_usage: bool
):
    """The official client's models are the judge of the shape."""
    n, events = call
    want = asked(n, logprobs, include_usage=include_usage)
    ChatCompletion.model_validate(full(MarkedReply, want, events), strict=True)
    Completion.model_validate(full(CompletionReply, want, events))
    for one in chunks(MarkedStream, want, events):
        ChatCompletionChunk.model_validate(one, strict=True)
    for one in chunks(CompletionStream, want, events):
        # The type wants a word although OpenAI itself streams null until the end.
        ended = [choice | {"finish_reason": "stop"} for choice in one["choices"]]
        Completion.model_validate(one | {"choices": ended})


def streamed(found: Sequence[Json]) -> Iterator[Any]:
    body = b"".join([*map(sse_event, found), DONE])
    with client(body, "text/event-stream") as reader:
        stream = reader.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        yield from stream


def test_the_official_client_reads_a_stream():
    """Framing included: line breaks and markers inside the text don't end an event."""
    pieces = ["a\n\n", "data: [DONE]\n\n", "é€\u2028"]
    found = chat_chunks(*(text(piece, 0) for piece in pieces), done(3), include_usage=True)
    read = list(streamed(found))
    said = [one.choices[0].delta.content or "" for one in read if one.choices]
    assert ("".join(said), read[-1].usage.completion_tokens) == ("".join(pieces), 3)


def test_the_official_client_reads_a_reply():
    """The block is there for who looks for it."""
    body = json_bytes(chat(text("é\n", 0), done()))
    with client(body, "application/json") as reader:
        read = reader.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "hi"}]
        )
    assert (read.choices[0].message.content, read.to_dict()["pendra"]) == ("é\n", PENDRA)


def test_the_official_client_raises_an_error_that_comes_in_a_stream():
    """Text that came before is kept; then the message is the exception's."""
    found = [*chat_chunks(text("a", 0)), error_body(GenerationFailed("logits are NaN"))]
    stream = streamed(found)
    assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "a"]
    with pytest.raises(openai.APIError, match="logits are NaN"):
        next(stream)
