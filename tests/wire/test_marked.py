"""Replies of other families: thinking between markers, calls that mlx-lm's parsers read."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.tool_parsers import (
    function_gemma,
    glm47,
    json_tools,
    kimi_k2,
    mistral,
    pythonic,
    qwen3_coder,
)

from mlx_worker.records import TextProtocol, Tools
from mlx_worker.wire.parser import reply_parser
from mlx_worker.wire.parts import CallArguments, CallOpened, Content, Reasoning
from tests.wire.gemma_replies import Read, parsed

WEATHER = Tools(
    (
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                },
            },
        },
    )
)
PARIS = ("weather", {"city": "Paris", "days": 2})


def protocol(parser: Any, *others: str, **fields: Any) -> TextProtocol:
    return TextProtocol(
        family="marked",
        thinking=("<think>", "</think>"),
        call=(parser.tool_call_start, parser.tool_call_end),
        others=("<|im_end|>", *others),
        read_call=parser.parse_tool_call,
        **fields,
    )


QWEN = protocol(json_tools)


def read(text: str, **options: Any) -> Read:
    return parsed(text, **{"protocol": QWEN, "offered": WEATHER, **options})


def calls(text: str, **options: Any) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in read(text, **options).calls]


def qwen(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


def reading(read_call: Callable[[str, Any], Any]) -> TextProtocol:
    return TextProtocol(family="marked", call=("<c>", "</c>"), read_call=read_call)


FAMILIES = {
    "json_tools": (
        QWEN,
        qwen('{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'),
    ),
    "qwen3_coder": (
        protocol(qwen3_coder),
        qwen(
            "<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
            "<parameter=days>\n2\n</parameter>\n</function>"
        ),
    ),
    "glm47": (
        protocol(glm47, "<arg_key>"),
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
    ),
    "function_gemma": (
        protocol(function_gemma, "<escape>"),
        "<start_function_call>call:weather{city:<escape>Paris<escape>,days:2}<end_function_call>",
    ),
    "pythonic": (
        protocol(pythonic),
        '<|tool_call_start|>[weather(city="Paris", days=2)]<|tool_call_end|>',
    ),
    "kimi_k2": (
        protocol(kimi_k2, "<|tool_call_argument_begin|>", "<|tool_call_begin|>"),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
    ),
    "mistral": (
        protocol(mistral),
        '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}',
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_call_is_read_by_its_parser(family: str):
    """With what the model said and thought before it."""
    form, text = FAMILIES[family]
    text = "<think>\nHm.\n</think>\n\nWait.\n" + text
    found = read(text, protocol=form)
    assert (found.content, found.reasoning) == ("Wait.", "Hm.")
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [PARIS]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_is_read_the_same_however_it_is_cut(family: str):
    """At every boundary."""
    form, text = FAMILIES[family]
    text = "<think>\nHm.\n</think>\n\nWait.\n" + text
    whole = read(text, protocol=form)
    assert all(read(text, protocol=form, cuts=(cut,)) == whole for cut in range(1, len(text)))


@pytest.mark.parametrize(
    ("opening", "text", "reasoning", "content"),
    [
        ("", "<think>\nHm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
        ("<think>\n", "Hm.\n</think>\nYes.", "Hm.", "Yes."),
        ("<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
        ("", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("", "thought\n<think>thought\nHm.", "thought\nHm.", "thought\n"),
        ("", "Yes.</think> No.<|im_end|>", "", "Yes. No."),
        ("", "a <thin", "", "a <thin"),
    ],
)
def test_thinking_is_between_its_markers(opening: str, text: str, reasoning: str, content: str):
    """Without the line ends around it; there is no header."""
    assert read(text, opening=opening) == Read(content, reasoning)


def test_thinking_and_content_come_as_they_are_written():
    """Only a call waits for its end."""
    parser = reply_parser(QWEN, "<think>", WEATHER)
    assert parser.push("Hm") == [Reasoning("Hm")]
    assert parser.push("</think>Wait <") == [Content("Wait")]
    assert parser.push('tool_call>{"name": "weather"') == []
    assert parser.push("}</tool_call>") == [CallOpened(0, "weather"), CallArguments(0, "{}")]


def test_several_calls_in_a_row():
    """White space between them is no content."""
    text = (
        qwen('{"name": "weather"}') + "\n" + qwen('{"name": "f", "arguments": {"a": [1]}}') + "\n"
    )
    assert read(text) == Read(calls=[("weather", "{}"), ("f", '{"a": [1]}')])


def test_a_parser_may_find_several_calls():
    """As mistral's does, whose calls have no end but the reply's."""
    text = 'Wait.[TOOL_CALLS]f[ARGS]{"a": 1}g[ARGS]{}[TOOL_CALLS]h[ARGS]{}'
    assert calls(text, protocol=protocol(mistral)) == [("f", {"a": 1}), ("g", {}), ("h", {})]


@pytest.mark.parametrize("end", ["", "\n", "<tool_call>"])
def test_a_call_whose_marker_is_missing_is_read(end: str):
    """If it is whole."""
    assert calls('<tool_call>{"name": "weather"}' + end) == [("weather", {})]


@pytest.mark.parametrize(
    "inner",
    [
        "what?",
        '{"name": "weather", "argum',
        "5",
        "null",
        "[1]",
        '{"name": 5}',
        '{"name": ""}',
        '{"arguments": {}}',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "weather", "arguments": "{"}',
        '{"name": "weather", "arguments": "[1]"}',
        '{"name": "weather", "arguments": {"a": NaN}}',
        '[{"name": "weather"}, 5]',
        '{"name": "weather", "arguments": ' + "[" * 100_000,
    ],
    ids=lambda inner: inner[:40],
)
def test_what_cannot_be_read_is_content(inner: str):
    """Without its markers, closed or not."""
    assert read(f"<tool_call>{inner}</tool_call> So.") == Read(f"{inner} So.")
    assert read(f"<tool_call>{inner}") == Read(inner)


def test_markers_inside_a_call_are_its_parsers():
    """And if it can't read the call, they are not shown all the same."""
    form = protocol(function_gemma, "<escape>")
    text = "<start_function_call>call:f{a:<escape>x<|im_end|>y<escape>}<end_function_call>"
    assert calls(text, protocol=form) == [("f", {"a": "x<|im_end|>y"})]
    assert read(text.replace("call:", "cal:"), protocol=form) == Read("cal:f{a:xy}")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"a": "é"}, '{"a": "é"}'),
        ('{"a":1}', '{"a":1}'),
        (None, "{}"),
        ({}, "{}"),
    ],
)
def test_arguments_may_be_an_object_or_its_json(arguments: Any, text: str):
    """JSON text is left as it is."""
    form = reading(lambda inner, tools: {"name": inner, "arguments": arguments})
    assert read("<c>f</c>", protocol=form).calls == [("f", text)]


def test_the_parser_is_given_the_tools():
    """Their types tell what a value is."""
    form = reading(lambda inner, tools: {"name": tools[0]["function"]["name"]})
    assert read("<c>f</c>", protocol=form).calls == [("weather", "{}")]


@pytest.mark.parametrize("error", [ValueError, KeyError, RecursionError, AssertionError])
def test_whatever_a_parser_raises_makes_content(error: type[Exception]):
    """One model's bad call must not end its reply."""

    def fail(inner: str, tools: Any) -> Any:
        raise error

    assert read("<c>f</c>", protocol=reading(fail)) == Read("f")


@pytest.mark.parametrize(
    ("form", "offered"),
    [(QWEN, None), (TextProtocol(family="marked", call=("<tool_call>", "</tool_call>")), WEATHER)],
)
def test_without_tools_or_parser_nothing_is_a_call(form: TextProtocol, offered: Tools | None):
    """Its text is content, without markers."""
    found = read('<tool_call>{"name": "weather"}</tool_call>', protocol=form, offered=offered)
    assert found == Read('{"name": "weather"}')


def test_a_spelled_marker_is_text_where_markers_are_ids():
    """A document that is quoted calls nothing."""
    text = '<think>\n<tool_call>{"name": "weather"}</tool_call>'
    assert read(text, marks=()) == Read(text)
    assert read(text, marks=(0,)) == Read("", text.removeprefix("<think>\n"))


@pytest.mark.parametrize("text", ["", " a\n", "<think>a</think>", qwen('{"name": "weather"}')])
def test_plain_text_is_all_content(text: str):
    """A family without markers has none."""
    assert read(text, protocol=TextProtocol()) == Read(text)


NESTED = TextProtocol(
    family="marked",
    thinking=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    call=("<|open|>", "<|close|>"),
    others=("<|sep|>", "<|"),
    read_call=json_tools.parse_tool_call,
)
FRAGMENTS = ("<|", "open", "close", "|>", "think", "sep", "<|open|>", "<|sep|>", "<|close|>", "\n",
             " ", '{"name": "f"}', "<|open|>think<|sep|>", "<|close|>think<|sep|>")  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join))
def test_markers_that_begin_others_are_read_the_same_however_text_is_cut(
    data: st.DataObject, text: str
):
    """The longest counts, and waits until it is known."""
    cuts = data.draw(st.sets(st.integers(1, max(1, len(text) - 1))))
    assert read(text, protocol=NESTED, cuts=sorted(cuts)) == read(text, protocol=NESTED)


def test_a_marker_that_might_have_been_a_longer_one_is_one_at_the_end():
    """It is not shown."""
    assert read("a<|sep|>b<|", protocol=NESTED) == Read("ab")
    assert read("a<|open|>think", protocol=NESTED) == Read("athink")
