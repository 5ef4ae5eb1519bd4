"""Control tokens are found by their text, and followed id by id through a reply."""

import random
from functools import cache
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from transformers import PreTrainedTokenizerFast

from mlx_worker.engine.load import LoadedPair, load_pair
from mlx_worker.engine.markers import Follower, Markers, markers_of, opening, text_protocol
from mlx_worker.engine.text import ReplyText
from mlx_worker.records import Tools
from mlx_worker.wire.parser import reply_parser
from mlx_worker.wire.parts import Content
from tests.tiny import byte_core

MARKERS = Markers(
    {7: "<think>", 8: "</think>", 9: "<call>", 10: "</call>", 11: "<turn>"}, 7, 8, 9, 10
)


@pytest.fixture(scope="module")
def demo() -> LoadedPair:
    return load_pair("demo")


@cache
def marked_tokenizer(special: tuple[str, ...] = (), **markers: Any) -> TokenizerWrapper:
    """A byte-level tokenizer with control tokens of its own; markers: what mlx-lm found."""
    core = byte_core()
    core.add_special_tokens(["<eos>", *special])
    return TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>"), **markers
    )


def kinds(ids: list[int], is_thinking: bool = False) -> list[str]:
    follower = Follower(MARKERS, is_thinking)
    return [follower.kind(id) for id in ids]


def shown(tokenizer: TokenizerWrapper, text: str, *stops: str) -> tuple[str, list[str], bool]:
    """(text, what stands at its marks, whether a stop was hit), of ids pushed one by one."""
    markers = markers_of(text_protocol(tokenizer), tokenizer)
    reply = ReplyText(tokenizer, stops, markers)
    found, marked = "", []
    for id in tokenizer.encode(text, add_special_tokens=False):
        reply.push(id)
        piece, marks = reply.take()
        marked += [piece[at : at + 6] for at in marks]
        found += piece
        if reply.is_hit:
            break
    reply.finish()
    return found + reply.take()[0], marked, reply.is_hit


def test_gemma_is_known_by_its_tokens(demo: LoadedPair):
    """Not by a config's name: conversions have several."""
    protocol = demo.protocol
    assert (protocol.family, protocol.read_call) == ("gemma4", None)
    assert protocol.thinking == ("<|channel>", "<channel|>")
    assert {"<turn|>", "<|tool_response>", '<|"|>', "<bos>"} <= set(protocol.others)


def test_gemmas_markers_have_the_tokenizers_ids(demo: LoadedPair):
    """Whatever numbers these are."""
    markers = demo.markers
    assert (markers.think_open, markers.think_close) == (100, 101)
    assert (markers.call_open, markers.call_close) == (48, 49)
    assert markers.texts[106] == "<turn|>"


def test_another_family_is_marked_as_mlx_lm_says():
    """Its parser reads the calls."""
    tokenizer = marked_tokenizer(
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<other>"),
        tool_parser=json_tools.parse_tool_call,
        tool_call_start="<tool_call>",
        tool_call_end="</tool_call>",
    )
    protocol = text_protocol(tokenizer)
    assert (protocol.family, protocol.are_ids) == ("marked", True)
    assert protocol.thinking == ("<think>", "</think>")
    assert protocol.call == ("<tool_call>", "</tool_call>")
    assert protocol.others == ("<eos>", "<other>")
    assert protocol.read_call is json_tools.parse_tool_call


def test_markers_that_are_no_ids_are_looked_for_in_the_text():
    """A call that opens with plain letters."""
    tokenizer = marked_tokenizer(
        tool_parser=json_tools.parse_tool_call, tool_call_start="[CALLS]", tool_call_end=""
    )
    protocol = text_protocol(tokenizer)
    assert (protocol.call, protocol.are_ids) == (("[CALLS]", ""), False)
    assert markers_of(protocol, tokenizer) == Markers({})


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2], ["content", "content"]),
        ([7, 1, 8, 2], ["thinking", "thinking", "thinking", "content"]),
        ([1, 9, 2, 10, 3], ["content", "call", "call", "call", "content"]),
        ([9, 1, 9, 2, 10], ["call"] * 5),
        ([11, 1], ["control", "content"]),
        ([9, 11, 10], ["call", "call", "call"]),
        ([7, 11, 8, 1], ["thinking"] * 3 + ["content"]),
        ([7, 9, 11, 8], ["thinking", "call", "call", "call"]),
        ([8, 1], ["control", "content"]),
        ([9, 1, 7, 2, 8, 3], ["call"] * 6),
    ],
)
def test_every_id_is_part_of_something(ids: list[int], expected: list[str]):
    """Markers belong to what they mark."""
    assert kinds(ids) == expected


GEMMA = Markers({**MARKERS.texts, 12: "'", 13: "<r>"}, 7, 8, 9, 10, 12, 13, others_end_calls=True)


@pytest.mark.parametrize(
    ("ids", "expected", "n_calls"),
    [
        ([9, 1, 11, 2], ["call", "call", "control", "content"], 1),
        ([9, 1, 7, 2, 8, 3], ["call", "call", "thinking", "thinking", "thinking", "content"], 1),
        ([9, 12, 7, 11, 8, 12, 10, 1], ["call"] * 7 + ["content"], 1),
        ([9, 12, 1, 10, 2], ["call"] * 4 + ["content"], 1),
        ([9, 12, 1, 13, 2], ["call"] * 3 + ["control", "content"], 1),
        ([9, 1, 9, 2, 10], ["call"] * 5, 2),
    ],
)
def test_gemmas_calls_end_at_any_marker_but_in_their_strings(
    ids: list[int], expected: list[str], n_calls: int
):
    """As wire/gemma.py reads them: stops and counts must not differ from what a client sees."""
    follower = Follower(GEMMA)
    assert [follower.kind(id) for id in ids] == expected
    assert follower.n_calls == n_calls


def test_where_no_tool_was_offered_a_calls_marker_opens_nothing():
    """What follows it is content, and in thinking it is thinking."""
    follower = Follower(MARKERS.without_calls)
    ids = [9, 1, 10, 7, 9, 8, 2]
    expected = ["control", "content", "control", "thinking", "thinking", "thinking", "content"]
    assert [follower.kind(id) for id in ids] == expected


def test_a_reply_may_begin_inside_its_thinking():
    """Some templates open it."""
    assert kinds([1, 8, 2], is_thinking=True) == ["thinking", "thinking", "content"]


def test_thinking_and_calls_are_counted():
    """Markers included; a call counts once it is closed."""
    follower = Follower(MARKERS)
    for id in [7, 1, 2, 8, 9, 3, 10, 9, 4]:
        follower.kind(id)
    assert (follower.n_thinking, follower.n_calls) == (4, 1)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([11, 1, 2], ()),
        ([11, 7, 1, 2], (7, 1, 2)),
        ([11, 7, 1, 8], ()),
        ([7, 1, 8, 11, 7], (7,)),
        ([7, 1, 11, 2], ()),
        ([], ()),
    ],
)
def test_the_prompts_end_says_whether_thinking_is_open(
    prompt: list[int], expected: tuple[int, ...]
):
    """It counts only where no other control token follows."""
    assert opening(prompt, MARKERS) == expected


def test_control_tokens_are_marked_in_the_text(demo: LoadedPair):
    """And nowhere else."""
    text = "<|channel>thought\nhm<channel|>yes"
    assert shown(demo.tokenizer, text)[:2] == (text, ["<|chan", "<chann"])


def test_letters_that_spell_a_control_token_are_not_marked(demo: LoadedPair):
    """A document that is quoted can't open a call."""
    tokenizer = demo.tokenizer
    ids = [id for char in "<|tool_call>" for id in tokenizer.encode(char, add_special_tokens=False)]
    reply = ReplyText(tokenizer, (), demo.markers)
    for id in ids:
        reply.push(id)
    reply.finish()
    assert reply.take() == ("<|tool_call>", ())


def test_a_mark_counts_the_text_before_it(demo: LoadedPair):
    """Also where several ids are taken together."""
    reply = ReplyText(demo.tokenizer, (), demo.markers)
    for id in demo.tokenizer.encode("ab<turn|>c<|turn>", add_special_tokens=False):
        reply.push(id)
    assert reply.take() == ("ab<turn|>c<|turn>", (2, 10))


def test_bytes_that_are_no_character_stand_before_the_marker(demo: LoadedPair):
    """The half of one that a control token cut off."""
    half = demo.tokenizer.encode("é", add_special_tokens=False)[0]
    reply = ReplyText(demo.tokenizer, (), demo.markers)
    for id in (half, 106):
        reply.push(id)
    text, marks = reply.take()
    assert [text[at:] for at in marks] == ["<turn|>"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a STOP b", ("a ", [], True)),
        (
            "<|channel>a STOP<channel|>b",
            ("<|channel>a STOP<channel|>b", ["<|chan", "<chann"], False),
        ),
        (
            "<|tool_call>STOP<tool_call|>",
            ("<|tool_call>STOP<tool_call|>", ["<|tool", "<tool_"], False),
        ),
        (
            "<|channel>STOP<channel|>c STOP",
            ("<|channel>STOP<channel|>c ", ["<|chan", "<chann"], True),
        ),
        ("a ST<turn|>OP", ("a ST<turn|>OP", ["<turn|"], False)),
    ],
)
def test_a_stop_string_counts_in_the_content_alone(
    demo: LoadedPair, text: str, expected: tuple[str, list[str], bool]
):
    """Not in thinking, not in a call, not across a marker; what was held back is not lost."""
    assert shown(demo.tokenizer, text, "STOP") == expected


@pytest.mark.parametrize("seed", range(40))
def test_what_counts_as_content_is_what_a_client_sees(demo: LoadedPair, seed: int):
    """Random replies full of markers: the engine's ids and the wire's text tell the same."""
    chance = random.Random(seed)
    markers = demo.markers
    choices = [id for id in markers.texts if id not in (*demo.eos_ids, markers.response)]
    letter = demo.tokenizer.encode("x", add_special_tokens=False)
    head = demo.tokenizer.encode("call:f{a:", add_special_tokens=False)
    ids: list[int] = []
    for _ in range(60):
        ids += letter if chance.random() < 0.5 else [chance.choice(choices)]
        ids += head if ids[-1] == markers.call_open else []
    reply, follower = ReplyText(demo.tokenizer, (), markers), Follower(markers)
    tools = Tools(({"type": "function", "function": {"name": "f"}},))
    parser = reply_parser(demo.protocol, "", tools)
    parts, content = [], 0
    for id in ids:
        reply.push(id)
        content += follower.kind(id) == "content"
        parts += parser.push(*reply.take())
    parts += parser.finish()
    assert sum(len(part.text) for part in parts if isinstance(part, Content)) == content
