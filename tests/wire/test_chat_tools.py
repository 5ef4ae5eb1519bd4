"""Tools, their choice and formats become a call's, or an error that names what is wrong."""

import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from hypothesis import given, settings, strategies as st
from jsonschema import Draft202012Validator
from openai.lib._parsing import type_to_response_format_param

from mlx_worker.errors import RequestError
from mlx_worker.records import Structure, Tools
from mlx_worker.wire import structure
from mlx_worker.wire.openai import parse_chat
from tests.wire.bodies import MESSAGES, chat, completion, nested, refused
from tests.wire.test_chat_messages import ANYTHING

Json = dict[str, Any]

OBJECT: Json = {"type": "object", "properties": {"x": {"type": "number", "default": None}}}


def tool(name: str = "add", **more: Any) -> Json:
    return {"type": "function", "function": {"name": name, **more}}


def named(name: str = "add") -> Json:
    return {"type": "function", "function": {"name": name}}


def read(*offered: Json, **more: Any) -> Tools | None:
    return chat(tools=list(offered), **more).call.tools


def schema(value: Any, **more: Any) -> Json:
    named = {"name": "form", "schema": value, **more}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def test_tools_are_offered_as_they_were_written():
    """Nothing in a schema is touched: templates write it, the grammar follows it."""
    full = tool("add-2_B", description="Adds.", parameters=OBJECT, strict=True)
    assert read(full, tool("mul")) == Tools((full, tool("mul")))


def test_nulls_beside_a_schema_are_absent_and_those_in_it_stay():
    """A default of null is a default."""
    given = tool(description=None, parameters=OBJECT, strict=None)
    assert read(given) == Tools((tool(parameters=OBJECT),))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"tool_choice": "auto"}, {}),
        ({"tool_choice": "required"}, {"is_required": True}),
        ({"tool_choice": named("mul")}, {"is_required": True, "only": "mul"}),
        ({"parallel_tool_calls": True}, {}),
        ({"parallel_tool_calls": False}, {"is_parallel": False}),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"is_required": True, "is_parallel": False},
        ),
    ],
)
def test_a_choice_says_which_tool_must_be_called(given: Json, expected: Json):
    """Absent it is auto, and several calls are allowed."""
    offered = (tool("add"), tool("mul"))
    assert read(*offered, **given) == Tools(offered, **expected)


@pytest.mark.parametrize("given", [{}, {"tools": []}, {"tools": [tool()], "tool_choice": "none"}])
def test_without_a_tool_that_may_be_called_there_are_none(given: Json):
    """The model isn't told of tools that it must not call."""
    assert chat(**given).call.tools is None


def test_as_many_tools_as_may_be_are_offered():
    """The limits themselves are within them."""
    names = [f"{i:064}" for i in range(128)]
    found = read(*map(tool, names))
    assert found is not None
    assert [one["function"]["name"] for one in found.offered] == list(names)


F = "tools[0].function"
BAD_TOOLS: list[tuple[Json, str, str]] = [
    ({"tools": ["add"]}, "tools[0]", "'add', must be an object"),
    ({"tools": [{"function": {"name": "add"}}]}, "tools[0].type", "missing. hint: send type"),
    ({"tools": [{"type": "function"}]}, F, "missing. hint: send function"),
    (
        {"tools": [tool(), {"type": "custom", "custom": {"name": "a"}}]},
        "tools[1].type",
        "'custom', must be function: nothing else is supported by this version yet",
    ),
    ({"tools": [{**tool(), "name": "a"}]}, "tools[0].name", "unknown parameter: tools[0].name"),
    ({"tools": [{"type": "function", "function": {}}]}, f"{F}.name", "missing. hint: send name"),
    ({"tools": [tool("")]}, f"{F}.name", "'', must be 1 to 64 of A-Z, a-z, 0-9, _ and -"),
    ({"tools": [tool("a.b")]}, f"{F}.name", "'a.b', must be 1 to 64 of"),
    ({"tools": [tool("a\n")]}, f"{F}.name", "must be 1 to 64 of"),
    ({"tools": [tool("é")]}, f"{F}.name", "'é', must be 1 to 64 of"),
    ({"tools": [tool("a" * 65)]}, f"{F}.name", "must be 1 to 64 of"),
    (
        {"tools": [tool(), tool("mul"), tool()]},
        "tools[2].function.name",
        "'add', must be a name that no other tool has",
    ),
    ({"tools": [tool(description=1)]}, f"{F}.description", "1, must be a text"),
    ({"tools": [tool(strict="yes")]}, f"{F}.strict", "'yes', must be true or false"),
    ({"tools": [tool(params={})]}, f"{F}.params", "hint: did you mean parameters?"),
    ({"tools": [tool(parameters=[])]}, f"{F}.parameters", "[], must be an object"),
    (
        {"tools": [tool(parameters={"type": "object", "properties": ["a"]})]},
        f"{F}.parameters.properties",
        "must be an object",
    ),
    (
        {"tools": [tool(parameters={"type": "string"})]},
        f"{F}.parameters.type",
        "'string', must be 'object'",
    ),
    (
        {"tools": [tool(parameters={"type": ["object"]})]},
        f"{F}.parameters.type",
        "['object'], must be 'object'",
    ),
    (
        {"tools": [tool(parameters=OBJECT | {"a": nested(64)})]},
        f"{F}.parameters",
        "'65 levels', must be at most 64",
    ),
    ({"tools": [tool(str(i)) for i in range(129)]}, "tools", "'129 tools', must be at most 128"),
    (
        {"tools": [tool(description="é" * 2**18), tool("b", description="é" * 2**18)]},
        "tools",
        "'1,048,701 bytes', must be at most 1,048,576",
    ),
    (
        {"tool_choice": "required"},
        "tool_choice",
        "'required', must be none or auto without tools. hint: send tools",
    ),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "without tools. hint: send tools"),
    ({"tool_choice": named()}, "tool_choice", "must be none or auto without tools"),
    (
        {"tool_choice": named("div"), "tools": [tool(), tool("mul")]},
        "tool_choice.function.name",
        "'div', must be one of the tools: add, mul",
    ),
    (
        {"tool_choice": named("div"), "tools": [tool(str(i)) for i in range(128)]},
        "tool_choice.function.name",
        "must be one of the tools: 0, 1, 2, 3, 4, 5, 6, 7, …",
    ),
    ({"tool_choice": "add", "tools": [tool()]}, "tool_choice", "'add', must be none, auto, req"),
    ({"tool_choice": 1}, "tool_choice", "1, must be none, auto, required or"),
    ({"tool_choice": {}}, "tool_choice.type", "missing. hint: send type"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
    ({"tool_choice": {"type": "function", "name": "a"}}, "tool_choice.name", "unknown parameter"),
    (
        {"tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name",
        "missing. hint: send name",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice.type",
        "'allowed_tools', must be function: nothing else is supported by this version yet",
    ),
    ({"tool_choice": {"type": "custom"}}, "tool_choice.type", "'custom', must be function"),
]
J = "response_format.json_schema"
BAD_FORMATS: list[tuple[Json, str, str]] = [
    ({"response_format": {}}, "response_format.type", "missing. hint: send type"),
    (
        {"response_format": {"type": "xml"}},
        "response_format.type",
        "'xml', must be one of text, json_object, json_schema",
    ),
    ({"response_format": {"type": []}}, "response_format.type", "[], must be one of text"),
    (
        {"response_format": {"type": "json_object", "schema": {}}},
        "response_format.schema",
        "unknown parameter: response_format.schema",
    ),
    (
        {"response_format": {"type": "text", "json_schema": {}}},
        "response_format.json_schema",
        "unknown parameter",
    ),
    ({"response_format": {"type": "json_schema"}}, J, "missing. hint: send json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        f"{J}.name",
        "missing. hint: send name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        f"{J}.schema",
        "missing. hint: send schema",
    ),
    (schema({}, name="a b"), f"{J}.name", "'a b', must be 1 to 64 of A-Z, a-z, 0-9, _ and -"),
    (schema(True), f"{J}.schema", "True, must be an object"),
    (schema({}, strict=1), f"{J}.strict", "1, must be true or false"),
    (schema({}, description=1), f"{J}.description", "1, must be a text"),
    (schema({}, schemas={}), f"{J}.schemas", "hint: did you mean schema?"),
    (schema(nested(65)), f"{J}.schema", "'65 levels', must be at most 64"),
    (schema({"a": [[nested(62)]]}), f"{J}.schema", "'65 levels', must be at most 64"),
    (
        schema({"a": "é" * 2**17}),
        f"{J}.schema",
        "'262,152 bytes', must be at most 262,144",
    ),
]


@pytest.mark.parametrize(
    ("given", "param", "says"),
    BAD_TOOLS + BAD_FORMATS,
    ids=range(len(BAD_TOOLS + BAD_FORMATS)),
)
def test_what_is_wrong_is_named_with_its_path_and_limit(given: Json, param: str, says: str):
    """One line says where, what was found and what is taken; param is the path alone."""
    error = refused(chat, **given)
    assert (error.param, param in str(error), says in str(error)) == (param, True, True), error


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [tool(parameters={"type": "object", "maximum": "?"})]},
        schema({"type": "number", "anyOf": [{"maximum": "?"}]}),
    ],
)
def test_a_number_that_no_float_holds_is_refused_in_a_schema(body: Json):
    """It is read as infinite, which no grammar and no template could write."""
    text = json.dumps({"messages": MESSAGES, **body}).replace('"?"', "-1e999")
    with pytest.raises(RequestError, match=r"-inf, must be numbers that a float can hold"):
        parse_chat(text.encode(), "r1")


def test_json_object_is_any_object():
    """The older format is a schema too."""
    found = chat(response_format={"type": "json_object"}).call.structure
    assert found == Structure('{"type":"object"}')


@pytest.mark.parametrize("more", [{}, {"strict": False}, {"strict": True}, {"description": "A."}])
def test_a_schema_is_handed_on_in_the_clients_order(more: Json):
    """Models are asked for the fields in this order; strict or not, it is enforced."""
    given = {"type": "object", "properties": {"b": {"const": None}, "a": {"const": "é"}}}
    text = '{"type":"object","properties":{"b":{"const":null},"a":{"const":"é"}}}'
    assert chat(**schema(given, **more)).call.structure == Structure(text)


def test_a_schema_of_the_greatest_size_and_depth_is_taken():
    """The limits themselves are within them."""
    wide = {"a": "x" * (structure.MAX_SCHEMA_BYTES - 8)}
    for form in (wide, nested(64)):
        found = chat(**schema(form)).call.structure
        assert found is not None
        assert json.loads(found.schema) == form


def test_text_is_no_structure():
    """Which is what every reply is without a format."""
    assert chat(response_format={"type": "text"}).call.structure is None


def test_a_format_may_stand_beside_tools_that_need_not_be_called():
    """Either the reply calls, or its text has the form."""
    call = chat(tools=[tool()], **schema({"type": "object"})).call
    assert (call.tools, call.structure) == (
        Tools((tool(),)),
        Structure('{"type":"object"}'),
    )


def test_text_may_stand_beside_a_tool_that_must_be_called():
    """It asks for nothing."""
    given = {"tool_choice": "required", "response_format": {"type": "text"}}
    assert read(tool(), **given) == Tools((tool(),), is_required=True)


@pytest.mark.parametrize("key", ["tools", "response_format", "tool_choice", "functions"])
def test_a_completion_has_no_tools(key: str):
    """Its prompt has no template to tell of them."""
    assert refused(completion, **{key: []}).param == key


class Step(pydantic.BaseModel):
    """One step."""

    text: str
    kind: Literal["think", "act"]
    next: "Step | None" = None


class Plan(pydantic.BaseModel):
    """What to do."""

    steps: list[Step]
    confidence: float = pydantic.Field(ge=0, le=1)


def test_openais_own_tool_of_a_model_is_read():
    """The official client's helper writes it."""
    given: Any = openai.pydantic_function_tool(Plan, description="Plans.")
    found = read(given, tool_choice="required")
    assert found is not None
    assert found.offered == (json.loads(json.dumps(given)),)


def test_openais_own_format_of_a_model_is_read():
    """The official client's helper writes it, and what the model refuses its schema does."""
    given: Any = type_to_response_format_param(Plan)
    found = chat(response_format=given).call.structure
    assert found is not None
    validator = Draft202012Validator(json.loads(found.schema))
    step = {"text": "a", "kind": "act", "next": None}
    assert validator.is_valid({"steps": [step], "confidence": 0.5})
    assert not validator.is_valid({"steps": [step | {"kind": "sleep"}], "confidence": 0.5})


NAMES = st.sampled_from(["add", "mul", "a b"]) | ANYTHING
SCHEMAS = st.dictionaries(st.sampled_from(["type", "properties"]), st.just("object") | ANYTHING)
FUNCTIONS = st.fixed_dictionaries(
    {},
    optional={
        "name": NAMES,
        "description": ANYTHING,
        "parameters": SCHEMAS | ANYTHING,
        "strict": ANYTHING,
    },
)
TOOLS = st.fixed_dictionaries(
    {},
    optional={"type": st.just("function") | ANYTHING, "function": FUNCTIONS | ANYTHING},
)
CHOICES = st.sampled_from(["none", "auto", "required"]) | TOOLS | ANYTHING
FORMS = st.fixed_dictionaries({}, optional={"name": NAMES, "schema": ANYTHING, "strict": ANYTHING})
KINDS = st.sampled_from(["text", "json_object", "json_schema"]) | ANYTHING
FORMATS = st.fixed_dictionaries({}, optional={"type": KINDS, "json_schema": FORMS | ANYTHING})


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "tools": st.lists(TOOLS, max_size=3) | ANYTHING,
            "tool_choice": CHOICES,
            "parallel_tool_calls": ANYTHING,
            "response_format": FORMATS | ANYTHING,
        },
    )
)
def test_any_tools_and_formats_are_read_or_refused(given: Json):
    """Whatever they hold, nothing but a RequestError comes of it, and what is read can be sent."""
    try:
        call = chat(**given).call
    except RequestError as error:
        str(error).encode("utf-8")
    else:
        json.dumps(call.tools.offered if call.tools else (), allow_nan=False)
        json.loads(call.structure.schema if call.structure else "{}")


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, {"type": "object", "properties": {}}),
        ({"$ref": "#/$defs/a"}, {"type": "object", "$ref": "#/$defs/a"}),
        ({"type": "object", "properties": None}, {"type": "object"}),
        ({"type": None, "anyOf": []}, {"type": "object", "anyOf": []}),
    ],
)
def test_parameters_need_not_say_that_they_are_an_object(parameters: Json, expected: Json):
    """Generators of schemas leave it out; nothing at all is a function that takes nothing."""
    found = chat(tools=[tool(parameters=parameters)]).call.tools
    assert found is not None
    assert found.offered[0]["function"]["parameters"] == expected


def test_a_form_may_stand_beside_a_call_that_must_come():
    """Agents send both; the call is what comes, so the form has nothing to hold."""
    call = chat(tools=[tool()], tool_choice="required", **schema({"type": "object"})).call
    assert call.tools is not None
    assert call.tools.is_required
    assert call.structure is not None


@pytest.mark.parametrize("key", ["guided_json", "structured_outputs"])
def test_other_servers_names_of_the_form_lead_to_ours(key: str):
    """They would change the text, so they are not ignored."""
    error = refused(chat, **{key: {"type": "object"}})
    assert "response_format" in str(error)


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max"])
def test_every_effort_but_the_least_thinks(effort: str):
    """The client's own type has them all."""
    assert chat(reasoning_effort=effort).call.enable_thinking
