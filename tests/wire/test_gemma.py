"""Gemma 4's replies become content, thinking and calls, however they are cut."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from mlx_worker.records import Tools
from mlx_worker.wire.parser import reply_parser
from mlx_worker.wire.parts import CallArguments, CallOpened, Content, Reasoning
from tests.wire.gemma_replies import (
    GARBAGE,
    GEMMA,
    MARKERS,
    QUOTE,
    SPELLED,
    TOOLS,
    Read,
    Reply,
    marked_reply,
    parsed,
    read,
    spelled_reply,
    tools,
)

HELD_OUT = Path(__file__).parents[2] / "mlx_worker" / "demo" / "heldout.json"
LETTERS = 1_000_000


def call(inner: str) -> str:
    return f"<|tool_call>{inner}<tool_call|>"


def arguments(inner: str) -> str:
    """The JSON of one call's arguments."""
    found = parsed(call(f"call:f{{{inner}"))
    assert [name for name, _ in found.calls] == ["f"]
    return found.calls[0][1]


def quoted(text: str) -> str:
    return f"{QUOTE}{text}{QUOTE}"


# Thinking


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel>thought\n1 < 2.\n<channel|>2 is more.", "1 < 2.", "2 is more."),
        ("<|channel>thought\n<channel|>Yes.", "", "Yes."),
        ("<|channel>thought<channel|>Yes.", "", "Yes."),
        ("<|channel><channel|>Yes.", "", "Yes."),
        ("<|channel>thought\n\n<channel|>Yes.", "", "Yes."),
        ("<|channel>analysis\nHm.<channel|>Yes.", "Hm.", "Yes."),
        ("<|channel>Let me see.\nHm.<channel|>", "Let me see.\nHm.", ""),
        ("<|channel>Hm<channel|>", "Hm", ""),
        ("<|channel>thought\nHm.", "Hm.", ""),
        ("<|channel>thought\nHm <b", "Hm <b", ""),
        ("<|channel>tho", "", ""),
        ("<|channel>thought\n a\n\n b \n<channel|>", " a\n\n b ", ""),
        ("<|channel>thought\nHm.\n<channel|>\n\n  Yes.\n", "Hm.", "  Yes.\n"),
        ("a\n<|channel>thought\nb\n<channel|>\nc", "b", "a\nc"),
        ("<|channel>thought\na\n\n<channel|>b<|channel>thought\nc<channel|>d", "a\nc", "bd"),
        ("<|channel>thought\na<|channel>thought\nb<channel|>c", "a\nb", "c"),
        ("<|channel>thought\na<|think|>b<channel|>c", "ab", "c"),
        ("Yes.<channel|>\nNo.", "", "Yes.\nNo."),
        (f"<|channel>{'a' * 40}\nb<channel|>", "a" * 40 + "\nb", ""),
    ],
)
def test_a_channel_is_thinking(text: str, reasoning: str, content: str):
    """Without its header, and without the line ends around it."""
    assert parsed(text) == Read(content, reasoning)


@pytest.mark.parametrize(
    ("opening", "text", "reasoning", "content"),
    [
        ("<|channel>thought\n", "Hm.\n<channel|>\nYes.", "Hm.", "Yes."),
        ("<|channel>", "thought\nHm.\n<channel|>\nYes.", "Hm.", "Yes."),
        ("<|channel>thought", "\nHm.\n<channel|>\nYes.", "Hm.", "Yes."),
        ("<|channel>thought\nAs I said,\n", "hm.", "hm.", ""),
        ("<|channel>thought\n<channel|>", "\nYes.", "", "Yes."),
        ("So: \n", "yes.\n", "", "yes.\n"),
    ],
)
def test_the_prompt_may_open_a_channel(opening: str, text: str, reasoning: str, content: str):
    """Its own text is no part of the reply."""
    assert parsed(text, opening=opening) == Read(content, reasoning)


def test_a_call_ends_thinking():
    """The model forgot to close its channel."""
    text = "<|channel>thought\nI ask.\n" + call("call:f{}") + "Wait."
    assert parsed(text) == Read("Wait.", "I ask.", [("f", "{}")])


def test_line_ends_behind_a_call_are_not_those_behind_thinking():
    """They stay, before what is said then."""
    text = "<|channel>thought\na\n<channel|>" + call("call:f{}") + "\nb"
    assert parsed(text) == Read("\nb", "a", [("f", "{}")])


def test_thinking_comes_as_it_is_written():
    """Nothing waits for the channel's end."""
    parser = reply_parser(GEMMA, "<|channel>thought\n", TOOLS)
    assert parser.push("1 < 2") == [Reasoning("1 < 2")]


# Calls


HELD_OUT_CALLS = {
    "<|tool_call>call:start_timer{duration:25}<tool_call|><|tool_response>": (
        "start_timer",
        {"duration": 25},
    ),
    '<|tool_call>call:switch_on{name:<|"|>yellow cup<|"|>}<tool_call|><|tool_response>': (
        "switch_on",
        {"name": "yellow cup"},
    ),
    "<|tool_call>call:multiply{x:38,second:47}<tool_call|><|tool_response>": (
        "multiply",
        {"x": 38, "second": 47},
    ),
}


def held_out(skill: str) -> list[dict[str, Any]]:
    return json.loads(HELD_OUT.read_text(encoding="utf-8"))[skill]


def test_the_demo_models_calls_are_read():
    """Written out by hand: the first of the held-out ones."""
    texts = [entry["expected"] for entry in held_out("tool")[:3]]
    read = [parsed(text, offered=tools("other")).calls for text in texts]
    found = [[(name, json.loads(text)) for name, text in calls] for calls in read]
    assert dict(zip(texts, found, strict=True)) == {
        text: [call] for text, call in HELD_OUT_CALLS.items()
    }


@pytest.mark.parametrize("entry", held_out("tool"), ids=lambda entry: entry["expected"][11:40])
def test_a_held_out_call_is_of_an_offered_tool(entry: dict[str, Any]):
    """Nothing of it is content; its arguments are the tool's parameters."""
    found = parsed(entry["expected"], offered=Tools(tuple(entry["tools"])))
    ((name, text),) = found.calls
    parameters = {
        tool["function"]["name"]: tool["function"]["parameters"] for tool in entry["tools"]
    }
    assert (found.content, found.reasoning) == ("", "")
    assert set(json.loads(text)) <= set(parameters[name]["properties"])


@pytest.mark.parametrize("entry", held_out("think"), ids=lambda entry: entry["expected"][18:40])
def test_held_out_thinking_is_told_from_its_answer(entry: dict[str, Any]):
    """Joined with its markers, the parts are the reply again."""
    found = parsed(entry["expected"], offered=None)
    thinking = f"<|channel>thought\n{found.reasoning}\n<channel|>" if found.reasoning else ""
    assert bool(found.reasoning) == entry["enable_thinking"]
    assert thinking + found.content == entry["expected"]


def test_a_call_is_told_piece_by_piece():
    """Name and arguments come as they are written."""
    parser = reply_parser(GEMMA, "", TOOLS)
    texts = ["<|tool_call>", "call:f", "{", "a:", QUOTE, "x", '"}', QUOTE, "}", "<tool_call|>"]
    assert [parser.push(text, (0,) if text in MARKERS else ()) for text in texts] == [
        [],
        [],
        [CallOpened(0, "f"), CallArguments(0, "{")],
        [CallArguments(0, '"a":')],
        [CallArguments(0, '"')],
        [CallArguments(0, "x")],
        [CallArguments(0, '\\"}')],
        [CallArguments(0, '"')],
        [CallArguments(0, "}")],
        [],
    ]


@pytest.mark.parametrize(
    ("inner", "json_text"),
    [
        ("}", "{}"),
        ("a:1}", '{"a":1}'),
        (' a : 1 , "b" : 2\n}', '{"a":1,"b":2}'),
        (f"{quoted('a b')}:1}}", '{"a b":1}'),
        (f"a:{quoted('')}}}", '{"a":""}'),
        (f"a:{quoted('{x}],: call:f{')}}}", '{"a":"{x}],: call:f{"}'),
        (f"a:{quoted('1' + chr(10) + chr(34) + chr(92) + '🐋')}}}", '{"a":"1\\n\\"\\\\🐋"}'),
        (f"a:{quoted('<|channel>')}}}", '{"a":"<|channel>"}'),
        ('a:"x\\n\\u00e9\\"y"}', '{"a":"x\\n\\u00e9\\"y"}'),
        ('a:"x\ny\\q\\u12"}', '{"a":"x\\ny\\\\q\\\\u12"}'),
        (f'a:"{QUOTE}"}}', '{"a":"<|\\"|>"}'),
        (f'a:"x\\{QUOTE}"}}', '{"a":"x\\\\<|\\"|>"}'),
        ("deep:{a:[1,2,{b:true}]},none:null}", '{"deep":{"a":[1,2,{"b":true}]},"none":null}'),
        ("a:[],b:{},c:[[]]}", '{"a":[],"b":{},"c":[[]]}'),
        ("a:True,b:NONE,c:False}", '{"a":true,"b":null,"c":false}'),
        ("a:-1.5e3,b:0,c:-0,d:1E+2}", '{"a":-1.5e3,"b":0,"c":-0,"d":1E+2}'),
        ("a:.5,b:+3,c:1.,d:-.5}", '{"a":0.5,"b":3,"c":1,"d":-0.5}'),
        ("a:007,b:NaN,c:-,d:.,e:1_000,f:0x1}",
         '{"a":"007","b":"NaN","c":"-","d":".","e":"1_000","f":"0x1"}'),
        (f"a:{'9' * 5000}}}", f'{{"a":"{"9" * 5000}"}}'),
        ("a:New York ,b:http://x.y/?z=1}", '{"a":"New York","b":"http://x.y/?z=1"}'),
        ('a:it"s}', '{"a":"it\\"s"}'),
        ("a:1,a:2}", '{"a":1,"a":2}'),
    ],
)  # fmt: skip
def test_arguments_become_json(inner: str, json_text: str):
    """Strings keep every character; bare words become what they look like."""
    assert arguments(inner) == json_text


@pytest.mark.parametrize(
    ("inner", "json_text"),
    [
        ("", "{}"),
        ("a", '{"a":null}'),
        ("a:", '{"a":null}'),
        ("a:1", '{"a":1}'),
        (f"a:{QUOTE}x", '{"a":"x"}'),
        ('a:"x\\', '{"a":"x\\\\"}'),
        ("a:{b:[1,{c:", '{"a":{"b":[1,{"c":null}]}}'),
        ("a:{b:[1,2},c:3}", '{"a":{"b":[1,2]},"c":3}'),
        ("a:[{b:1],c:2}", '{"a":[{"b":1}],"c":2}'),
        ("a:1],b:2}", '{"a":1,"b":2}'),
        ("a,b:,c}", '{"a":null,"b":null,"c":null}'),
        (",,a:1,,b:2,}", '{"a":1,"b":2}'),
        ("a:[,1,,2,]}", '{"a":[1,2]}'),
        (f"a:{quoted('x')} b:1\nc:2}}", '{"a":"x","b":1,"c":2}'),
        (f"a {quoted('x')}}}", None),
        (f"a{quoted('x')}}}", '{"a":"x"}'),
        (f"a:x{quoted('y')}}}", '{"a":"x","y":null}'),
        ("a{b:1}}", '{"a":{"b":1}}'),
        ("a:[1{b:2}3]}", '{"a":[1,{"b":2},3]}'),
        (":1}", '{"1":null}'),
        ("{a:1}}", '{"":{"a":1}}'),
        ("a::1}", '{"a":1}'),
        (f"a:{quoted('x')}:}}", '{"a":"x"}'),
    ],
)
def test_arguments_with_a_fault_become_json_all_the_same(inner: str, json_text: str | None):
    """What is missing is added, what is too much is left out."""
    assert arguments(inner) == (json_text or '{"a":"x"}')


@pytest.mark.parametrize("bracket", ["[", "a:{", "{"])
def test_nesting_is_bounded(bracket: str):
    """A reader that recurses can still read it."""
    text = arguments("a:" + bracket * 5000)
    assert isinstance(json.loads(text), dict)
    assert max(text.count("["), text.count("{")) == 200 - (bracket == "[")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (call("call:f{}") + call("call:get{a:1}"), [("f", "{}"), ("get", '{"a":1}')]),
        (call("call:f{}call:get{a:1}"), [("f", "{}"), ("get", '{"a":1}')]),
        (call(" call:f{} ,\n call:get{a:1} "), [("f", "{}"), ("get", '{"a":1}')]),
        (call("call:f{}}"), [("f", "{}")]),
        (call("call:f"), [("f", "{}")]),
        (call("call: a.b/c:d-e \n"), [("a.b/c:d-e", "{}")]),
        (call("call:f {}"), [("f", "{}")]),
        (call("call:nobody{}"), [("nobody", "{}")]),
        ("<|tool_call>call:f{a:1" + call("call:get{}"), [("f", '{"a":1}'), ("get", "{}")]),
        (f"<|tool_call>call:f{{a:{QUOTE}x" + call("call:f"), [("f", '{"a":"x"}'), ("f", "{}")]),
        ("<|tool_call>call:f{a:[1<|tool_response>", [("f", '{"a":[1]}')]),
        (f"<|tool_call>call:f{{a:{QUOTE}x<|tool_response>", [("f", '{"a":"x"}')]),
        ("<|tool_call>call:f{a:[1<turn|>", [("f", '{"a":[1]}')]),
        ("<|tool_call>call:f{a:[1<|channel>thought\n<channel|>", [("f", '{"a":[1]}')]),
        (f"<|tool_call>{QUOTE}call:f{QUOTE}{{a:1}}", [("f", '{"a":1}')]),
    ],
)  # fmt: skip
def test_every_call_is_found(text: str, calls: list[tuple[str, str]]):
    """Several between two markers, several pairs, markers that are missing."""
    assert parsed(text) == Read(calls=calls)


@pytest.mark.parametrize(
    ("text", "json_text"),
    [
        ("{", "{"),
        ("{a:1", '{"a":'),
        ("{a:1,", '{"a":1'),
        (f"{{a:{QUOTE}x", '{"a":"x'),
        ("{a:{b:[tr", '{"a":{"b":['),
        ('{a:"x\\u12', '{"a":"x'),
    ],
)
def test_arguments_that_the_end_cuts_stay_cut(text: str, json_text: str):
    """Whoever reads them sees that they are not whole."""
    assert parsed("<|tool_call>call:f" + text).calls == [("f", json_text)]
    assert parsed("call:f" + text).calls == [("f", json_text)]


@pytest.mark.parametrize("begun", ["", "c", "call", "call:", "call:pay", "call: pay "])
def test_a_call_that_the_end_cuts_before_its_brace_is_nothing(begun: str):
    """Its name might have become another tool's, and its beginning is no content."""
    assert parsed("<|tool_call>" + begun) == Read("")


def test_what_is_no_call_is_content_at_the_end_too():
    """Only what could have become one is left out."""
    assert parsed("<|tool_call>cold") == Read("cold")


def test_a_bare_name_that_the_end_cuts_is_content():
    """Nothing says that it was to be a call."""
    assert parsed("call:pay") == Read("call:pay")


@pytest.mark.parametrize(
    ("inner", "content"),
    [
        ("what?", "what?"),
        (" what? ", " what?"),
        ("call f{}", "call f{}"),
        ("call:{}", "call:{}"),
        ("call: f g", "call: f g"),
        ("call:", "call:"),
        (f'{{"name":{QUOTE}f{QUOTE}}}', '{"name":f}'),
        ("call:" + "a" * 300 + "{}", "call:" + "a" * 300 + "{}"),
        ("", ""),
    ],
)
def test_what_is_no_call_is_content(inner: str, content: str):
    """But for its markers."""
    for cut in range(1, len(call(inner))):
        found = parsed(call(inner), cuts=(cut,))
        assert (found.content.rstrip(), found.calls) == (content, [])


def test_commas_are_skipped_behind_a_call_only():
    """In the next pair of markers they are content again."""
    assert parsed(call("call:f{},") + call(",a")) == Read(",a", calls=[("f", "{}")])


def test_content_goes_on_behind_a_call_whose_marker_is_missing():
    """What the model says next is not lost."""
    assert parsed("<|tool_call>call:f{}} Done.\n") == Read("Done.", calls=[("f", "{}")])


# Calls without markers


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("call:f{a:1}", "", [("f", '{"a":1}')]),
        ("\n call:f{a:{}}\n", "", [("f", '{"a":{}}')]),
        ("call:f{} call:get{}", "", [("f", "{}"), ("get", "{}")]),
        (call("call:f{}") + "\ncall:get{}", "", [("f", "{}"), ("get", "{}")]),
        ("So" + call("call:f{}") + "\ncall:get{}", "So", [("f", "{}"), ("get", "{}")]),
        ("<|channel>thought\na\n<channel|>\ncall:f{}", "", [("f", "{}")]),
        ("call:f{} Done.", " Done.", [("f", "{}")]),
        (f"call:f{{a:{quoted('}')}}}", "", [("f", '{"a":"}"}')]),
        ("call:f{}<tool_call|>", "", [("f", "{}")]),
        ("call:f{a:1<|tool_response>", "", [("f", '{"a":1}')]),
        ("call:get_time{}", "", [("get_time", "{}")]),
        ("call:g{}", "call:g{}", []),
        ("call:f", "call:f", []),
        ("call:f {}", "call:f {}", []),
        ("call: f{}", "call: f{}", []),
        ("Call:f{}", "Call:f{}", []),
        ("So call:f{}", "So call:f{}", []),
        ("call:g{} call:f{}", "call:g{} call:f{}", []),
        ("call:f{} So call:f{}", " So call:f{}", [("f", "{}")]),
        ("call:f<turn|>", "call:f", []),
        ("call:<|channel>thought\na<channel|>", "call:", []),
    ],
)
def test_a_call_without_markers(text: str, content: str, calls: list[tuple[str, str]]):
    """At the content's start or behind a call, of a tool that was offered; else it is content."""
    for cut in range(1, len(text)):
        found = parsed(text, cuts=(cut,))
        assert (found.content, found.calls) == (content, calls)


def test_no_more_is_held_back_than_may_become_a_call():
    """`call:gem` is no beginning of a call to any tool."""
    parser = reply_parser(GEMMA, "", tools("get"))
    pushed = [parser.push(text) for text in ("call:", "ge", "m", "ini")]
    assert pushed == [[], [], [Content("call:ge"), Content("m")], [Content("ini")]]


# Content


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", "a", " a \n", "a\n\n b\n", "<", "a <|tool", "a>b"]
)
@pytest.mark.parametrize("offered", [None, TOOLS])
def test_text_without_markers_is_all_content(text: str, offered: Tools | None):
    """To the last space."""
    assert parsed(text, offered=offered) == Read(text)


@pytest.mark.parametrize(
    ("before", "between", "after", "content"),
    [
        ("", "", "", ""),
        ("\n", "\n", "\n", ""),
        ("Wait.\n", "\n", "\n", "Wait."),
        ("Wait.\n", "\n", "\nDone.\n", "Wait.\n\nDone."),
        ("", "And ", " ", "And"),
        (" ", " and ", " so", " and  so"),
    ],
)
def test_white_space_around_calls_is_no_content(
    before: str, between: str, after: str, content: str
):
    """Unless something visible is on both sides of it."""
    text = before + call("call:f{}") + between + call("call:f{}") + after
    assert parsed(text) == Read(content, calls=[("f", "{}")] * 2)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("a<turn|>b", "ab"),
        ("a<|think|><|turn>b", "ab"),
        ("a<tool_call|>b<tool_response|>c<tool|>", "abc"),
        (f"a{QUOTE}b", "ab"),
        ("a<|tool_response>response:f{b:1}<tool_response|>c", "ac"),
        (f"a<|tool_response>response:f{{b:{quoted('x')}}}<tool_response|>c", "ac"),
        ("a<|tool_response>response:f{", "a"),
        ("<|channel>thought\nb<|tool_response>x<tool_response|>c", "c"),
        ("a<|tool_response>x<turn|>c", "ac"),
    ],
)
def test_control_tokens_are_not_shown(text: str, content: str):
    """Nor what the model writes in a tool's stead."""
    assert parsed(text).content == content


def test_a_call_goes_on_where_a_tool_would_answer():
    """The model did not wait."""
    text = call("call:f{}") + "<|tool_response>response:f{}" + call("call:get{}")
    assert parsed(text) == Read(calls=[("f", "{}"), ("get", "{}")])


def test_without_tools_nothing_is_a_call():
    """Its text is content, without markers."""
    text = "a " + call(f"call:f{{a:{quoted('x')}}}") + " call:f{}"
    assert parsed(text, offered=None) == Read("a call:f{a:x} call:f{}")


def test_without_tools_white_space_does_not_wait():
    """No call can follow it."""
    assert reply_parser(GEMMA, "", None).push("a \n") == [Content("a \n")]


# Control tokens that are ids


@pytest.mark.parametrize(
    "text", [call("call:f{}"), "<|channel>a<channel|>", "a<turn|>", f"{QUOTE}"]
)
def test_a_spelled_marker_is_text_where_markers_are_ids(text: str):
    """A document that is quoted calls nothing."""
    for cut in range(1, len(text)):
        assert parsed(text, cuts=(cut,), marks=()) == Read(text)


def test_a_spelled_quote_is_part_of_a_string_where_markers_are_ids():
    """Only the control token ends it."""
    begin, text = f"<|tool_call>call:f{{a:{QUOTE}", f"{QUOTE}}}<tool_call|>"
    marks = (0, begin.index(QUOTE), len(begin + text), len(begin + text) + len(QUOTE) + 1)
    found = parsed(begin + text + QUOTE + "}<tool_call|>", marks=marks)
    assert [(name, json.loads(text)) for name, text in found.calls] == [("f", {"a": text})]


def test_a_mark_on_what_is_no_marker_means_nothing():
    """A control token that the protocol doesn't list is text."""
    assert parsed("a<x>b", marks=(1,)) == Read("a<x>b")


def test_what_was_held_back_goes_before_marked_text():
    """A beginning that the opening or an unmarked piece left is text once marks are known."""
    parser = reply_parser(GEMMA, "", TOOLS)
    pushed = [parser.push("a<|tool"), parser.push("_call>call:f{}", ())]
    assert pushed == [[Content("a")], [Content("<|tool"), Content("_call>call:f{}")]]


# Random replies


def values(read: Read) -> list[tuple[str, Any]]:
    return [(name, json.loads(text)) for name, text in read.calls]


def check(reply: Reply, marks: list[int] | None, random: random.Random) -> None:
    """It means what it should, cut at every boundary and in 200 random ways."""
    whole = parsed(reply.text, marks=marks, opening=reply.opening)
    if reply.meaning is not None:
        assert (whole.content, whole.reasoning, values(whole)) == reply.meaning, reply
    for cut in reply.cuts:
        assert parsed(reply.text, cuts=(cut,), marks=marks, opening=reply.opening) == whole, reply
    for _ in range(200):
        density = random.random() ** 4
        cuts = [cut for cut in reply.cuts if random.random() < density]
        assert parsed(reply.text, cuts=cuts, marks=marks, opening=reply.opening) == whole, reply


def check_many(n: int, draw: Callable[[random.Random], Reply], uses_marks: bool) -> None:
    for seed in range(n):
        drawn = random.Random(seed)
        reply = draw(drawn)
        check(reply, reply.marks if uses_marks else None, drawn)


def test_spelled_replies_mean_the_same_however_they_are_cut():
    """Content, thinking, and the very values of every call."""
    check_many(150, spelled_reply, uses_marks=False)


def test_marked_replies_mean_the_same_however_they_are_cut():
    """With control tokens' letters all over their texts."""
    check_many(60, marked_reply, uses_marks=True)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_10_000_spelled_replies_mean_the_same_however_they_are_cut():
    """The same as above, in full."""
    check_many(10_000, spelled_reply, uses_marks=False)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_3_000_marked_replies_mean_the_same_however_they_are_cut():
    """The same as above, in full."""
    check_many(3_000, marked_reply, uses_marks=True)


def test_arguments_that_the_end_cuts_begin_those_of_the_call_once_closed():
    """Whatever came is the beginning of valid JSON."""
    for seed in range(300):
        drawn = random.Random(seed)
        text = spelled_reply(drawn).text[: drawn.randrange(1, 80)]
        cut, closed = parsed(text), parsed(text + "<tool_call|>")
        assert [name for name, _ in closed.calls][: len(cut.calls)] == [
            name for name, _ in cut.calls
        ]
        for (_, begun), (_, whole) in zip(cut.calls, closed.calls, strict=False):
            assert whole.startswith(begun)
            assert isinstance(json.loads(whole), dict)


TEXTS = st.lists(st.sampled_from((*GARBAGE, *'<|>{}[]":,\\ \nacefglthou')), max_size=25).map(
    "".join
)


@settings(max_examples=300, deadline=None)
@given(st.data(), TEXTS)
def test_any_text_is_read_the_same_however_it_is_cut(data: st.DataObject, text: str):
    """With markers spelled, with some of them ids, and with none."""
    spelled = [found.start() for found in SPELLED.finditer(text)]
    chosen = data.draw(st.sets(st.sampled_from(spelled)) if spelled else st.just(set[int]()))
    inside = {
        at for found in SPELLED.finditer(text) for at in range(found.start() + 1, found.end())
    }
    for marks in (None, sorted(chosen)):
        allowed = [at for at in range(1, len(text)) if marks is None or at not in inside]
        cuts = data.draw(st.sets(st.sampled_from(allowed)) if allowed else st.just(set[int]()))
        whole = parsed(text, marks=marks)
        assert parsed(text, marks=marks, cuts=sorted(cuts)) == whole


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_any_closed_calls_arguments_are_an_object(text: str):
    """Whatever the model writes between the markers."""
    found = parsed(text + "<tool_call|>")
    assert all(isinstance(json.loads(json_text), dict) for _, json_text in found.calls)
    found = parsed(call("call:f{" + text))
    assert all(isinstance(json.loads(json_text), dict) for _, json_text in found.calls)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.sampled_from([None, TOOLS]))
def test_content_never_has_a_marker(text: str, offered: Tools | None):
    """Unless dropping one brings the letters of another together, as in `<tur<turn|>n|>`."""
    parser = reply_parser(GEMMA, "", offered)
    for part in parser.push(text) + parser.finish():
        assert not isinstance(part, Content) or not SPELLED.search(part.text)


@pytest.mark.parametrize(
    ("begin", "text"),
    [
        ("", " "),
        ("", "<"),
        ("", "<turn|>a"),
        ("", "call:"),
        ("", "call:f{}"),
        ("call:", "a"),
        ("call:f{", "a:{"),
        ("<|channel>", "a"),
        ("<|channel>", "\n"),
        ("<|channel>", "<|channel>"),
        ("<|tool_call>", " "),
        ("<|tool_call>", "call:f{}"),
        ("<|tool_call>", "<|tool_call>"),
        ("<|tool_call>call:", "a"),
        ("<|tool_call>call:f{}", ","),
        ("<|tool_call>call:f{a:", "a "),
        ("<|tool_call>call:f{a:", "[{"),
        ("<|tool_call>call:f{a:", "]}"),
        ('<|tool_call>call:f{a:"', "\\"),
        (f"<|tool_call>call:f{{a:{QUOTE}", "<"),
    ],
)
def test_time_grows_with_the_text(text: str, begin: str):
    """Ten times the text takes about ten times the time, letter by letter and at once."""

    def seconds(n_letters: int, step: int) -> float:
        parser = reply_parser(GEMMA, "", TOOLS)
        whole = begin + text * (n_letters // len(text))
        start = time.process_time()
        for at in range(0, len(whole), step):
            parser.push(whole[at : at + step])
        parser.finish()
        return time.process_time() - start

    assert seconds(100_000, LETTERS) < 1.5
    assert seconds(40_000, 1) < 40 * seconds(4_000, 1) + 0.1


def test_a_million_letters_are_read_one_by_one_in_seconds():
    """3 µs each on one core of a small server; held back all the way."""
    parser = reply_parser(GEMMA, "", TOOLS)
    start = time.process_time()
    for letter in " " * LETTERS:
        parser.push(letter)
    assert parser.finish() == [Content(" " * LETTERS)]
    assert time.process_time() - start < 30


def test_a_call_that_the_reply_itself_ends_is_whole():
    """The model was done with it, and forgot a brace."""
    parser = reply_parser(GEMMA, "", TOOLS)
    parts = [*parser.push("<|tool_call>call:f{n:1"), *parser.finish(is_cut=False)]
    assert read(parts).calls == [("f", '{"n":1}')]


@pytest.mark.parametrize(
    "text",
    [
        "call:f{n:1} call:get{n:2}",
        "<|tool_call>call:f{n:1}call:get{n:2}<tool_call|>",
        "<|tool_call>call:f{n:1}<|tool_call>call:get{n:2}<tool_call|>",
        "<|tool_call>call:f{n:1}<|channel>x<channel|><|tool_call>call:get{n:2}<tool_call|>",
    ],
)
def test_where_calls_are_not_parallel_the_first_is_the_only_one(text: str):
    """However the others come."""
    tools = replace(TOOLS, is_parallel=False)
    parser = reply_parser(GEMMA, "", tools)
    assert read([*parser.push(text), *parser.finish()]).calls == [("f", '{"n":1}')]


def test_a_strict_tool_is_not_called_without_a_marker():
    """Nothing held such a call to its schema."""
    tools = Tools(({"type": "function", "function": {"name": "f", "strict": True}},))
    parser = reply_parser(GEMMA, "", tools)
    text = "call:f{n:1}"
    assert read([*parser.push(text), *parser.finish()]) == Read(text)
