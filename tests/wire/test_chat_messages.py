"""Messages of a chat become what chat templates expect, or an error that names what is wrong."""

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from mlx_worker.wire import body
from tests.wire.bodies import MESSAGES, chat, nested, refused

Json = dict[str, Any]


def call(id: str = "a", name: str = "add", arguments: Any = '{"x": 1}', **more: Any) -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}} | more


def calling(*calls: Any, **more: Any) -> Json:
    return {"role": "assistant", "tool_calls": list(calls)} | more


def answer(id: str = "a", content: Any = "2", **more: Any) -> Json:
    return {"role": "tool", "tool_call_id": id, "content": content} | more


def said(**more: Any) -> Json:
    return {"role": "assistant", "content": "hi"} | more


def read(*given: Any) -> tuple[Any, ...]:
    found = chat(messages=list(given)).call.messages
    assert found is not None
    return found


ADD = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}


def test_a_call_reaches_the_template_with_its_arguments_as_an_object():
    """Templates write arguments themselves, each family in its own way."""
    expected = {"role": "assistant", "content": "", "tool_calls": [ADD]}
    assert read(calling(call())) == (expected,)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_the_content_beside_a_call_may_be_missing(content: Json):
    """Templates get an empty text, never null."""
    assert read(calling(call(), **content))[0]["content"] == ""


def test_content_beside_a_call_is_kept():
    """A model may say something before it calls."""
    assert read(calling(call(), content="Let me see."))[0]["content"] == "Let me see."


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        (" \n", {}),
        ("{}", {}),
        ('{"b": [1, {"a": null}], "a": "\u00e9"}', {"b": [1, {"a": None}], "a": "é"}),
    ],
)
def test_arguments_are_the_json_of_an_object(text: str, arguments: Json):
    """No text at all is an empty object, which some servers write that way."""
    found = read(calling(call(arguments=text)))[0]["tool_calls"][0]["function"]["arguments"]
    assert (found, list(found)) == (arguments, list(arguments))


@pytest.mark.parametrize(
    "content", ["2 é", [{"type": "text", "text": "2 "}, {"type": "text", "text": "é"}]]
)
def test_a_tools_answer_is_named_after_its_call(content: Any):
    """Templates write the name, clients send the id."""
    answered = read(calling(call("a"), call("b", "mul")), answer("b", content))[1]
    assert answered == {"role": "tool", "tool_call_id": "b", "name": "mul", "content": "2 é"}


def test_a_later_call_with_the_same_id_is_the_one_that_is_answered():
    """Some servers number the calls of each reply anew."""
    turns = [calling(call("0", "add")), answer("0"), calling(call("0", "mul")), answer("0")]
    assert [read(*turns)[i]["name"] for i in (1, 3)] == ["add", "mul"]


def test_an_answer_may_repeat_the_name_of_its_tool():
    """Older clients send both."""
    assert read(calling(call()), answer(name="add"))[1]["name"] == "add"


@pytest.mark.parametrize(
    "thought",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning_content": "hm", "reasoning": "hm"},
    ],
)
def test_what_was_thought_is_passed_on_under_both_names(thought: Json):
    """Templates know one or the other."""
    both = {"reasoning_content": "hm", "reasoning": "hm"}
    assert read(said(**thought)) == ({"role": "assistant", "content": "hi", **both},)


@pytest.mark.parametrize("thought", [{"reasoning": ""}, {"reasoning_content": None}])
def test_no_thought_is_no_key(thought: Json):
    """An empty one would be written into the prompt by some templates."""
    assert read(said(**thought)) == (said(),)


def test_a_message_may_be_all_thought():
    """A reply that was cut off while it was thinking, handed back."""
    assert read({"role": "assistant", "content": None, "reasoning": "hm"})[0]["content"] == ""


@pytest.mark.parametrize(
    "more",
    [
        {"tool_calls": [], "annotations": []},
        {"refusal": None, "audio": None, "function_call": None},
        {"refusal": "", "audio": {}, "name": "Olga"},
        {"parsed": {"any": "thing"}},
    ],
)
def test_what_holds_nothing_beside_a_text_is_accepted(more: Json):
    """A reply that a client's library wrote out again."""
    assert read(said(**more)) == (said(),)


def test_what_a_client_adds_to_a_call_is_left_out():
    """Its place in the stream, and what the client read from its arguments."""
    function = {"name": "add", "arguments": '{"x": 1}', "parsed_arguments": {"x": 1}}
    assert read(calling(call(index=0, function=function)))[0]["tool_calls"] == [ADD]


@pytest.mark.parametrize("role", ["user", "system"])
def test_other_roles_may_have_empty_lists(role: str):
    """Clients with one class for all messages write every field."""
    given = {"role": role, "content": "hi", "tool_calls": [], "annotations": []}
    assert read(given) == ({"role": role, "content": "hi"},)


CALL = "messages[0].tool_calls[0]"
ARGUMENTS = f"{CALL}.function.arguments"
BAD: list[tuple[list[Any], str, str]] = [
    ([{"content": "hi"}], "messages[0].role", "missing. hint: send role"),
    (
        [{"role": "function", "content": "a", "name": "f"}],
        "messages[0].role",
        "'function', must be one of system, developer, user, assistant, tool. hint: send role tool",
    ),
    ([{"role": "assistant"}], "messages[0].content", "missing. hint: send content"),
    ([said(content=None, tool_calls=[])], "messages[0].content", "missing"),
    ([said(content=None, reasoning="")], "messages[0].content", "missing"),
    ([said(tool_calls={})], "messages[0].tool_calls", "{}, must be a list"),
    (
        [{"role": "user", "content": "a", "tool_calls": [call()]}],
        "messages[0].tool_calls",
        "must be empty: only an assistant calls tools",
    ),
    (
        [{"role": "user", "content": "a", "reasoning": "b"}],
        "messages[0].reasoning",
        "unknown parameter: messages[0].reasoning",
    ),
    ([calling("a")], CALL, "'a', must be an object"),
    ([calling({**call(), "id": None})], f"{CALL}.id", "missing. hint: send id"),
    ([calling(call(id=""))], f"{CALL}.id", "'', must be a text that is not empty"),
    ([calling({**call(), "id": 5})], f"{CALL}.id", "5, must be a text"),
    ([calling({**call(), "type": None})], f"{CALL}.type", "missing. hint: send type"),
    (
        [calling({"id": "a", "type": "custom", "custom": {}})],
        f"{CALL}.type",
        "'custom', must be function: calls of other tools are not supported by this version yet",
    ),
    ([calling({**call(), "function": None})], f"{CALL}.function", "missing"),
    ([calling(call(index=-1))], f"{CALL}.index", "-1, must be a whole number of at least 0"),
    ([calling(call(name="a b"))], f"{CALL}.function.name", "'a b', must be 1 to 64 of A-Z, a-z"),
    ([calling(call(arguments=None))], ARGUMENTS, "missing. hint: send arguments"),
    ([calling(call(arguments={}))], ARGUMENTS, "{}, must be a text"),
    ([calling(call(arguments="[1]"))], ARGUMENTS, "'[1]', must be the JSON text of an object"),
    ([calling(call(arguments="null"))], ARGUMENTS, "'null', must be the JSON text of an object"),
    (
        [calling(call(arguments='{"a": }'))],
        ARGUMENTS,
        f"{ARGUMENTS} is not JSON at line 1, column 7: Expecting value",
    ),
    ([calling(call(arguments='{"a": NaN}'))], ARGUMENTS, "is not JSON: NaN is no number there"),
    ([calling(call(arguments='{"a": 1e999}'))], ARGUMENTS, "inf, must be numbers that a float"),
    (
        [calling(call(arguments='{"\\ud800": 1}'))],
        ARGUMENTS,
        f"{ARGUMENTS}: '\\ud800', must be text that UTF-8 can write",
    ),
    ([calling(call(arguments='{"a":' * 100_000))], ARGUMENTS, "is nested too deeply. hint: use"),
    ([calling(call(arguments=f'{{"a": {"9" * 5000}}}'))], ARGUMENTS, "has a number with too many"),
    (
        [calling(call(arguments=json.dumps(nested(65))))],
        ARGUMENTS,
        "'65 levels', must be at most 64",
    ),
    (
        [calling(call("a"), call("b"), call("a"))],
        "messages[0].tool_calls[2].id",
        "'a', must be an id that no other call has",
    ),
    (
        [said(function_call={"name": "f", "arguments": "{}"})],
        "messages[0].function_call",
        "replaced by tool_calls. hint: send tool_calls",
    ),
    (
        [*MESSAGES, said(reasoning_content="a", reasoning="b")],
        "messages[1].reasoning",
        "'b', must be the same as reasoning_content: 'a'. hint: send one of them",
    ),
    ([said(reasoning=5)], "messages[0].reasoning", "5, must be a text"),
    ([said(reasoning_content=[])], "messages[0].reasoning_content", "[], must be a text"),
    ([said(refusal="no")], "messages[0].refusal", "'no', must be null: refusals are not supported"),
    (
        [said(audio={"id": "a"})],
        "messages[0].audio",
        "must be null: audio is not supported by this",
    ),
    ([said(annotations=[{}])], "messages[0].annotations", "must be empty: annotations are not"),
    (
        [said(content=[{"type": "refusal", "refusal": "no"}])],
        "messages[0].content[0].type",
        "'refusal', must be text: other parts are not supported by this version yet",
    ),
    ([answer()], "messages[0].tool_call_id", "'a', must be the id of a call before it: there is"),
    (
        [calling(call("b"), call("c")), answer("a")],
        "messages[1].tool_call_id",
        "'a', must be the id of a call before it: c, b",
    ),
    (
        [answer("b"), calling(call("b"))],
        "messages[0].tool_call_id",
        "'b', must be the id of a call before it: there is none",
    ),
    (
        [calling(*(call(str(i)) for i in range(9))), answer("a")],
        "messages[1].tool_call_id",
        "a call before it: 8, 7, 6, 5, 4, 3, 2, 1, …",
    ),
    ([{"role": "tool", "content": "2"}], "messages[0].tool_call_id", "missing"),
    ([calling(call()), answer(content=None)], "messages[1].content", "missing. hint: send content"),
    ([calling(call()), answer(content={})], "messages[1].content", "{}, must be a text or a list"),
    (
        [calling(call()), answer(content=[{"type": "image_url", "image_url": {}}])],
        "messages[1].content[0].type",
        "'image_url', must be text",
    ),
    (
        [calling(call()), answer(name="mul")],
        "messages[1].name",
        "'mul', must be add, which it answers",
    ),
    ([calling(call()), answer(is_error=True)], "messages[1].is_error", "unknown parameter"),
]


@pytest.mark.parametrize(("turns", "param", "says"), BAD, ids=range(len(BAD)))
def test_a_message_at_fault_is_named_with_its_path_and_limit(
    turns: list[Any], param: str, says: str
):
    """One line says where, what was found and what is taken; param is the path alone."""
    error = refused(chat, messages=turns)
    assert (error.param, param in str(error), says in str(error)) == (param, True, True), error


def test_arguments_of_the_deepest_kind_are_taken():
    """The limit itself is within it."""
    assert read(calling(call(arguments=json.dumps(nested(64)))))


def test_a_huge_id_is_cut_in_the_message():
    """It is shown twice, and was a megabyte."""
    error = refused(chat, messages=[calling(call("x" * 2**20)), answer("y" * 2**20)])
    assert len(str(error)) < 400


@pytest.mark.parametrize("mark", ["\\u002c", "\\u002C", "\\u005b", "\\u005B", "\\u007b"])
def test_values_that_are_hidden_in_arguments_are_counted(
    mark: str, monkeypatch: pytest.MonkeyPatch
):
    """Written as escapes they would pass the body's limit, and be read all the same."""
    monkeypatch.setattr(body, "MAX_VALUES", 99)
    with pytest.raises(body.RequestError, match="body has 100 commas and brackets, 99 are"):
        body.read_json(f'"{mark * 100}"'.encode())


LEAVES = st.sampled_from([None, True, 0, -1, 2**70, 0.5, "", "a", "\U0001f40b"])
ANYTHING = LEAVES | st.sampled_from([[], {}, [None], [{}], {"": []}, {"type": None}, {"a": {}}])
ODD = st.sampled_from(['{"a": NaN}', '{"a": 1e999}', '{"\\ud800": 1}', "{", "[" * 2000, " "])
IDS = st.sampled_from(["a", "b", ""]) | ANYTHING
FUNCTIONS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["add", "a b"]) | ANYTHING,
        "arguments": ANYTHING.map(json.dumps) | ODD | ANYTHING,
    },
)
CALLS = st.fixed_dictionaries(
    {},
    optional={"id": IDS, "type": st.just("function") | ANYTHING, "function": FUNCTIONS | ANYTHING},
)
PARTS = st.lists(st.just({"type": "text", "text": "a"}) | ANYTHING, max_size=2)
CONTENTS = PARTS | ANYTHING
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | ANYTHING},
    optional={
        "content": CONTENTS,
        "tool_calls": st.lists(CALLS, max_size=3) | ANYTHING,
        "tool_call_id": IDS,
        "name": st.sampled_from(["add"]) | ANYTHING,
        "reasoning": ANYTHING,
        "reasoning_content": ANYTHING,
        "refusal": ANYTHING,
    },
)


@settings(max_examples=200, deadline=None)
@given(st.lists(TURNS | ANYTHING, max_size=4) | ANYTHING)
def test_any_messages_are_read_or_refused(turns: Any):
    """Whatever they hold, nothing but a RequestError comes of it, and what is read can be sent."""
    try:
        found = chat(messages=turns).call.messages
    except body.RequestError as error:
        str(error).encode("utf-8")
    else:
        json.dumps(found, allow_nan=False).encode("utf-8")
