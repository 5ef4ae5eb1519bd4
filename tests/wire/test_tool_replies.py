"""Thinking and tool calls in a chat's replies, whole and in chunks."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from mlx_worker.records import Call, FinishReason, ReplyEvent, Started, TextProtocol, Tools
from mlx_worker.wire import parser
from mlx_worker.wire.openai import Asked
from mlx_worker.wire.parts import CallArguments, CallOpened, Content, Part, Reasoning
from mlx_worker.wire.reply import CHAT, COMPLETION, ChatReply, CompletionReply, CompletionStream
from mlx_worker.wire.sse import DONE, json_bytes, sse_event
from tests.wire.bodies import MESSAGES, chat
from tests.wire.events import CREATED, STARTED, WORKER, Marked, asked, done, text
from tests.wire.written import Json, MarkedReply, MarkedStream, chunks, client, full

ADD = '‹add({"a":1}›'
ARGUMENTS = '{"a":1}'


def choice(*events: ReplyEvent, **wanted: Any) -> Json:
    return full(MarkedReply, asked(**wanted), [STARTED, *events])["choices"][0]


def message(*events: ReplyEvent, **wanted: Any) -> Json:
    return choice(*events, **wanted)["message"]


def stream(*events: ReplyEvent, **wanted: Any) -> list[Json]:
    """The chunks' choices, without the opening one."""
    found = chunks(MarkedStream, asked(**wanted), [STARTED, *events])
    return [one["choices"][0] for one in found][1:]


def streamed(*events: ReplyEvent) -> list[Json]:
    """The deltas, without the opening one and the finish."""
    return [one["delta"] for one in stream(*events, done())][:-1]


def id_of(index: int = 0, choice: int = 0, request: str = "r1") -> str:
    """Of a call, as a full reply has it."""
    want = replace(asked(), call=Call(request, n=choice + 1))
    events = [
        text("‹f(" * (index + 1), choice=choice),
        *(done(choice=i) for i in range(choice + 1)),
    ]
    found = full(MarkedReply, want, [STARTED, *events])["choices"][choice]["message"]
    return found["tool_calls"][index]["id"]


def call(index: int = 0, name: str = "add", arguments: str = ARGUMENTS) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": id_of(index), "type": "function", "function": function}


def test_calls_stand_in_the_place_of_content():
    """In order, each with its id, its name and the text of its arguments."""
    calls = [call(), call(1, "mul", "{}")]
    assert message(text(ADD), text("‹mul({}›"), done()) == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": calls,
    }


def test_content_beside_a_call_stays():
    """A model may say what it is about to do."""
    found = message(text("Let me see." + ADD), done())
    assert (found["content"], found["tool_calls"]) == ("Let me see.", [call()])


def test_thinking_is_there_under_both_names():
    """Clients look for one or the other; neither is part of the content."""
    assert message(text("⟨hm⟩yes"), done()) == {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "reasoning_content": "hm",
        "reasoning": "hm",
    }


@pytest.mark.parametrize(("said", "content"), [("", ""), ("⟨hm", "")])
def test_content_is_a_text_where_there_are_no_calls(said: str, content: str):
    """Null would mean that there is something else in its place."""
    assert message(text(said), done())["content"] == content


@pytest.mark.parametrize("said", ["yes", "yes" + ADD])
def test_without_thinking_there_is_no_key_for_it(said: str):
    """Not even an empty one: old clients show what they find."""
    assert not {"reasoning", "reasoning_content"} & message(text(said), done()).keys()


def test_without_calls_there_is_no_key_for_them():
    """OpenAI leaves it out, and clients ask whether it is there."""
    assert "tool_calls" not in message(text("⟨hm⟩yes"), done())


@pytest.mark.parametrize(
    ("said", "reason", "expected"),
    [
        (ADD, "stop", "tool_calls"),
        (ADD, "length", "length"),
        ("yes", "stop", "stop"),
        ("⟨hm⟩", "stop", "stop"),
        ("yes" + ADD + "yes", "stop", "tool_calls"),
    ],
)
def test_a_reply_that_called_has_ended_for_its_calls(
    said: str, reason: FinishReason, expected: str
):
    """Unless its length ended it: then the call may not be whole."""
    events = [text(said), done(reason=reason)]
    found = [choice(*events), stream(*events)[-1]]
    assert [one["finish_reason"] for one in found] == [expected, expected]


def test_each_choice_ends_for_its_own_reason():
    """One may call where the other answers."""
    events = [text(ADD), text("yes", choice=1), done(choice=1), done()]
    found = full(MarkedReply, asked(n=2), [STARTED, *events])["choices"]
    assert [one["finish_reason"] for one in found] == ["tool_calls", "stop"]
    assert [one["message"]["content"] for one in found] == [None, "yes"]


def test_a_stream_has_thinking_in_deltas_of_its_own():
    """As it comes, under both names."""
    assert streamed(text("⟨h"), text("m"), text("⟩"), text("yes")) == [
        {"reasoning_content": "h", "reasoning": "h"},
        {"reasoning_content": "m", "reasoning": "m"},
        {"content": "yes"},
    ]


def test_a_stream_opens_a_call_and_then_has_its_arguments():
    """The id, the type and the name come once."""
    opened = {"index": 0, **call(arguments="")}
    assert streamed(text("‹add("), text('{"a"'), text(":1}"), text("›")) == [
        {"tool_calls": [opened]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
    ]


def test_what_one_event_completes_in_the_order_of_a_message_is_one_chunk():
    """Thinking, content, calls: each call once, with what there is of its arguments."""
    said = "⟨hm⟩yes" + ADD + "‹mul({"
    assert streamed(text(said), text("}›")) == [
        {
            "reasoning_content": "hm",
            "reasoning": "hm",
            "content": "yes",
            "tool_calls": [{"index": 0, **call()}, {"index": 1, **call(1, "mul", "{")}],
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]},
    ]


def test_what_comes_in_another_order_is_in_chunks_of_its_own():
    """A delta has no order of its own, so the stream's has to tell."""
    opened = {"index": 0, **call()}
    thought = {"reasoning_content": "hm", "reasoning": "hm"}
    assert streamed(text("a⟨hm⟩b" + ADD + "c")) == [
        {"content": "a"},
        {**thought, "content": "b", "tool_calls": [opened]},
        {"content": "c"},
    ]


def test_chunks_of_one_event_have_its_logprobs_once_and_the_finish_last():
    """The first has the ones, the last the other."""
    found = stream(text(ADD + "a", 0), text("‹b", 1), done(2), logprobs=0)
    assert [(one["logprobs"] is not None, one["finish_reason"]) for one in found] == [
        (True, None),
        (False, None),
        (True, "tool_calls"),
    ]


def test_what_was_held_back_comes_with_the_finish():
    """A call that was never named is only text, which is known at the end."""
    events = [text("a"), text("‹add"), done()]
    found = stream(*events)
    assert [one["delta"] for one in found] == [{"content": "a"}, {"content": "add"}]
    assert [one["finish_reason"] for one in found] == [None, "stop"]
    assert message(*events)["content"] == "aadd"


def test_what_is_held_back_with_thinking_after_it_ends_in_two_chunks():
    """The finish is on the last of them alone, and so are the figures."""

    class Late(Marked):
        def finish(self, is_cut: bool = True) -> list[Part]:
            return [Content("a"), Reasoning("b")]

    class Stream(MarkedStream):
        shape = replace(CHAT, parser=lambda *_: Late())

    _, *found = chunks(Stream, asked(), [STARTED, done()])
    assert [(one["choices"][0]["finish_reason"], "usage" in one) for one in found] == [
        (None, False),
        ("stop", True),
    ]


def test_a_marker_alone_gives_no_chunk():
    """Nobody would see anything of it."""
    assert streamed(text("⟨"), text("⟩"), text("‹")) == []


def test_a_call_without_arguments_yet_gives_a_chunk():
    """Clients show which tool is being called."""
    assert len(streamed(text("‹add("))) == 1


def test_empty_parts_give_no_chunk():
    """Whatever a parser says."""

    class Empty(Marked):
        def push(self, text: str, marks: Sequence[int] | None = None) -> list[Part]:
            return [Content(""), Reasoning(""), CallArguments(0, "")]

    class Stream(MarkedStream):
        shape = replace(CHAT, parser=lambda *_: Empty())

    assert len(chunks(Stream, asked(), [STARTED, text("a")])) == 1


def test_the_id_of_a_call_is_its_own():
    """Of request, choice and place; 24 digits."""
    ids = [id_of(), id_of(1), id_of(choice=1), id_of(request="r2"), id_of(11, 1), id_of(1, 11)]
    assert len(set(ids)) == len(ids)
    assert [id for id in ids if not re.fullmatch("call_[0-9a-f]{24}", id)] == []


class Told(Marked):
    """Notes what it is made of, and the marks it is told."""

    def __init__(self, protocol: TextProtocol, opening: str, tools: Tools | None) -> None:
        super().__init__()
        self.made_of = protocol, opening, tools
        self.marks: list[Sequence[int] | None] = []

    def push(self, text: str, marks: Sequence[int] | None = None) -> list[Part]:
        self.marks.append(marks)
        return super().push(text, marks)


def told(
    started: Started, *events: ReplyEvent, tools: Tools | None = None, n: int = 1
) -> list[Told]:
    made: list[Told] = []

    def make(*of: Any) -> Told:
        made.append(Told(*of))
        return made[-1]

    class Reply(ChatReply):
        shape = replace(CHAT, parser=make)

    reply = Reply(Asked(Call("r1", n=n, tools=tools)), CREATED, WORKER)
    for event in (started, *events):
        reply.feed(event)
    return made


def test_a_parser_knows_the_protocol_the_prompts_end_and_the_tools():
    """Each choice has one of its own."""
    protocol = TextProtocol("gemma4", ("⟨", "⟩"), ("‹", "›"))
    tools = Tools(({"type": "function", "function": {"name": "add"}},))
    made = told(Started("demo", 7, 2.5, protocol=protocol, opening="⟨"), tools=tools, n=2)
    assert [one.made_of for one in made] == [(protocol, "⟨", tools)] * 2


@pytest.mark.parametrize(("are_ids", "marks"), [(True, [(), (1,)]), (False, [None, None])])
def test_a_parser_is_told_the_marks_where_markers_are_ids(are_ids: bool, marks: list[Any]):
    """Elsewhere a marker is wherever it is spelled."""
    started = replace(STARTED, protocol=TextProtocol(are_ids=are_ids))
    made = told(started, text("a⟨", marks=[]), text("a⟨", marks=[1]))
    assert made[0].marks == marks


def test_a_marker_that_is_only_spelled_stays_text():
    """No mark is at its place."""
    assert message(text("⟨hm⟩", marks=[]), done())["content"] == "⟨hm⟩"


def test_chats_are_read_by_the_models_own_parser():
    """And completions by none."""
    assert (CHAT.parser, COMPLETION.parser) == (parser.reply_parser, None)


RAW = "⟨hm⟩a" + ADD


def test_a_completion_is_never_parsed():
    """Its client asked for the text as the model writes it."""
    events = [STARTED, text(RAW, 0, 1), done(2)]
    reply = full(CompletionReply, asked(), events)["choices"][0]
    found = chunks(CompletionStream, asked(), events)
    assert (reply["text"], reply["finish_reason"]) == (RAW, "stop")
    assert [one["choices"][0]["text"] for one in found] == [RAW, ""]


def test_logprobs_of_a_chat_are_those_of_its_content():
    """Thinking and calls have none, as in OpenAI's replies."""
    events = [
        text("⟨hm⟩", 1, is_content=False),
        text("a", 0),
        text("", 6, is_content=False),
        done(3),
    ]
    want = [choice(*events, logprobs=0), *stream(*events, logprobs=0)]
    found = [
        one["logprobs"] and [entry["token"] for entry in one["logprobs"]["content"]] for one in want
    ]
    assert found == [["a"], None, ["a"], None]


def test_logprobs_of_a_completion_are_those_of_all_its_text():
    """It has all of it, so its offsets count all of it."""
    events = [STARTED, text(" one", 1, is_content=False), text("a", 0), done(2)]
    found = full(CompletionReply, asked(logprobs=0), events)["choices"][0]["logprobs"]
    assert (found["tokens"], found["text_offset"]) == ([" one", "a"], [0, 4])


def parts_of(delta: Json) -> list[Part]:
    """A delta, read in the order in which it is to be read."""
    found: list[Part] = []
    if "reasoning" in delta:
        found.append(Reasoning(delta["reasoning"]))
    if "content" in delta:
        found.append(Content(delta["content"]))
    for one in delta.get("tool_calls", ()):
        if "id" in one:
            found.append(CallOpened(one["index"], one["function"]["name"]))
        found.append(CallArguments(one["index"], one["function"]["arguments"]))
    return found


def merged(parts: Sequence[Part]) -> list[Part]:
    """Neighbours of a kind in one, empty ones left out."""
    found: list[Part] = []
    for part in parts:
        match found[-1:], part:
            case [Content(text=before)], Content(text=after):
                found[-1] = Content(before + after)
            case [Reasoning(text=before)], Reasoning(text=after):
                found[-1] = Reasoning(before + after)
            case [CallArguments(json=before)], CallArguments(index=index, json=after):
                found[-1] = CallArguments(index, before + after)
            case _, CallArguments(json="") | Content(text="") | Reasoning(text=""):
                pass
            case _:
                found.append(part)
    return found


@settings(deadline=None)
@given(st.lists(st.text("ab(⟨⟩‹›", max_size=8), max_size=6))
def test_a_stream_says_everything_in_the_order_in_which_it_came(pieces: list[str]):
    """However the text was cut."""
    reader = Marked()
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    found = stream(*map(text, pieces), done())
    assert merged([part for one in found for part in parts_of(one["delta"])]) == merged(parts)


SAID = [text("⟨hm"), text("⟩yes‹ad"), text("d("), text(ARGUMENTS), text("›" + ADD), done(5)]


def handed_back(reply: Any) -> Json:
    """What the official client sends when its user appends a reply's message to the messages."""
    answers = [
        {"role": "tool", "tool_call_id": call.id, "content": "2"} for call in reply.tool_calls
    ]
    sent: list[bytes] = []
    body = json_bytes(full(MarkedReply, asked(), [STARTED, done()]))
    with client(body, "application/json", sent.append) as reader:
        reader.chat.completions.create(model="demo", messages=[*MESSAGES, reply, *answers])  # type: ignore[list-item]
    return json.loads(sent[0])


EXPECTED = (
    *MESSAGES,
    {
        "role": "assistant",
        "content": "yes",
        "reasoning_content": "hm",
        "reasoning": "hm",
        "tool_calls": [
            {"id": id_of(i), "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
            for i in range(2)
        ],
    },
    *({"role": "tool", "tool_call_id": id_of(i), "name": "add", "content": "2"} for i in range(2)),
)


def test_a_reply_that_the_official_client_hands_back_is_read():
    """The next turn of a conversation with tools, thinking included."""
    body = json_bytes(full(MarkedReply, asked(), [STARTED, *SAID]))
    with client(body, "application/json") as reader:
        reply = reader.chat.completions.create(model="demo", messages=MESSAGES)  # type: ignore[arg-type]
    assert reply.choices[0].finish_reason == "tool_calls"
    assert chat(**handed_back(reply.choices[0].message)).call.messages == EXPECTED


def test_a_stream_that_the_official_client_gathered_is_read():
    """Its own helper puts the chunks together, and adds what it read from them."""
    body = b"".join([*map(sse_event, chunks(MarkedStream, asked(), [STARTED, *SAID])), DONE])
    with (
        client(body, "text/event-stream") as reader,
        reader.chat.completions.stream(model="demo", messages=MESSAGES) as events,  # type: ignore[arg-type]
    ):
        reply = events.get_final_completion()
    assert reply.choices[0].finish_reason == "tool_calls"
    assert chat(**handed_back(reply.choices[0].message)).call.messages == EXPECTED


def test_a_later_reply_to_the_same_request_id_has_ids_of_its_own():
    """A client may give every turn one id, and hands all calls back in one conversation."""
    ids = set[str]()
    for created in (CREATED, CREATED + 1):
        reply = MarkedReply(asked(), created, WORKER)
        for event in (STARTED, text(ADD), done()):
            reply.feed(event)
        (made,) = reply.finish()["choices"][0]["message"]["tool_calls"]
        ids.add(made["id"])
    assert len(ids) == 2
