"""What a call becomes with the model that answers it, and what can't be had of it."""

import json
from typing import Any

import pytest
from mlx_lm.tool_parsers import json_tools, qwen3_coder

from mlx_worker.calls import check_form, has_form, opening_of, request_of
from mlx_worker.config import Config
from mlx_worker.engine.load import load_pair
from mlx_worker.engine.prefix import PrefixCache
from mlx_worker.errors import RequestError
from mlx_worker.loaded_model import Decider, LoadedModel
from mlx_worker.records import Call, GenerationRequest, Notice, Structure, TextProtocol, Tools
from tests.tiny import tiny_pair

SAID = ({"role": "user", "content": "Wake me in 25 minutes."},)
NUMBER = Structure('{"type":"integer"}')


def tool(**more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"minutes": {"type": "integer"}}}
    return {"type": "function", "function": {"name": "wake", "parameters": parameters, **more}}


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return LoadedModel(load_pair("demo"), PrefixCache(), Decider())


def asked(model: LoadedModel, **call: Any) -> tuple[GenerationRequest, Notice | None]:
    return request_of(model, Call("r1", **{"messages": SAID, **call}), Config(), why_off=None)


def marked(model: LoadedModel, read_call: Any) -> LoadedModel:
    """The same with the calls of another family."""
    protocol = TextProtocol("marked", call=("<|tool_call>", "<tool_call|>"), read_call=read_call)
    pair = load_pair("demo")
    pair.__dict__["protocol"] = protocol
    return LoadedModel(pair, PrefixCache(), model.decider)


def test_a_chat_is_read_by_its_markers_and_a_completion_is_not(demo: LoadedModel):
    """The older endpoint gives the text as it is."""
    assert asked(demo)[0].reads_markers
    assert not asked(demo, messages=None, prompt="Once")[0].reads_markers


def test_only_a_chat_is_told_how_to_be_read(demo: LoadedModel):
    """And what its prompt leaves open."""
    assert opening_of(demo, asked(demo)[0]) == {"protocol": demo.pair.protocol, "opening": ""}
    assert opening_of(demo, asked(demo, messages=None, prompt="Once")[0]) == {}


def test_the_model_is_told_of_its_tools(demo: LoadedModel):
    """In the prompt."""
    request, _ = asked(demo, tools=Tools((tool(),)))
    assert "declaration:wake{" in demo.pair.tokenizer.decode(list(request.prompt_ids))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({}, (None, None)),
        ({"tools": Tools((tool(),))}, (None, None)),
        ({"structure": NUMBER}, (False, False)),
        ({"tools": Tools((tool(),), is_required=True)}, (True, False)),
        ({"tools": Tools((tool(strict=True),))}, (True, True)),
        ({"tools": Tools((tool(),)), "structure": NUMBER}, (False, False)),
    ],
)
def test_a_grammar_is_there_where_something_must_hold(
    demo: LoadedModel, call: dict[str, Any], expected: tuple[bool | None, bool | None]
):
    """(it writes calls, it may never begin) of the grammar; None: there is none."""
    grammar = asked(demo, **call)[0].grammar
    assert expected == (grammar and grammar.is_call, grammar and grammar.is_optional)


@pytest.mark.parametrize(("is_parallel", "max_calls"), [(True, None), (False, 1)])
def test_one_call_ends_a_reply_that_may_have_only_one(
    demo: LoadedModel, is_parallel: bool, max_calls: int | None
):
    """parallel_tool_calls, also where no grammar sees to it."""
    request, _ = asked(demo, tools=Tools((tool(),), is_parallel=is_parallel))
    assert request.max_calls == max_calls


@pytest.mark.parametrize("is_asked", [True, False])
def test_thinking_comes_before_a_form_where_it_is_asked_for(demo: LoadedModel, is_asked: bool):
    """Else the grammar holds from the first id."""
    request, _ = asked(demo, structure=NUMBER, enable_thinking=is_asked)
    assert request.may_think is is_asked


def test_tools_need_a_model_that_can_call():
    """Else they would be ignored."""
    model = LoadedModel(tiny_pair(), PrefixCache(), Decider())
    with pytest.raises(RequestError, match="tiny has no tool calls") as caught:
        asked(model, messages=None, prompt=(3, 4), tools=Tools((tool(),)))
    assert caught.value.param == "tools"


def test_calls_beside_a_form_are_held_too(demo: LoadedModel):
    """A reply is either in the form or a call that can be made."""
    request, notice = asked(demo, tools=Tools((tool(),)), structure=NUMBER)
    assert request.grammar is not None
    assert request.grammar.calls is not None
    assert notice is None


def test_a_call_that_must_come_goes_before_a_form(demo: LoadedModel):
    """There is no content for it."""
    tools = Tools((tool(),), is_required=True)
    assert asked(demo, tools=tools, structure=NUMBER) == asked(demo, tools=tools)


def test_calls_beside_a_form_are_free_where_they_cannot_be_held(demo: LoadedModel):
    """A strict tool's notice says so."""
    model = marked(demo, qwen3_coder.parse_tool_call)
    request, notice = asked(model, tools=Tools((tool(strict=True),)), structure=NUMBER)
    assert request.grammar is not None
    assert (request.grammar.may_call, request.grammar.calls) == (True, None)
    assert notice is not None


def test_strict_tools_of_a_family_that_cannot_be_held_are_told_of(demo: LoadedModel):
    """The request is served all the same."""
    model = marked(demo, qwen3_coder.parse_tool_call)
    request, notice = asked(model, tools=Tools((tool(strict=True),)))
    assert request.grammar is None
    assert notice is not None
    assert notice[0] == "strict_schema_not_enforced"


def test_strict_tools_of_a_family_that_calls_in_json_are_held(demo: LoadedModel):
    """Its own syntax between its own markers."""
    request, notice = asked(
        marked(demo, json_tools.parse_tool_call), tools=Tools((tool(strict=True),))
    )
    assert request.grammar is not None
    assert notice is None


def test_a_call_that_must_be_made_needs_a_family_that_can_be_held(demo: LoadedModel):
    """Hoping for it is not enough."""
    model = marked(demo, qwen3_coder.parse_tool_call)
    with pytest.raises(RequestError, match="can't be enforced") as caught:
        asked(model, tools=Tools((tool(),), is_required=True))
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("call", "expected"),
    [({}, False), ({"structure": NUMBER}, True), ({"tools": Tools((tool(),))}, True)],
)
def test_what_has_schemas_is_looked_at_first(call: dict[str, Any], expected: bool):
    """Before it may wait in line."""
    assert has_form(Call("r1", **call)) is expected


@pytest.mark.parametrize(
    ("tools", "is_refused"),
    [
        (Tools((tool(parameters={"type": "object", "required": 5}),), is_required=True), True),
        (Tools((tool(parameters={"type": "object", "required": 5}, strict=True),)), True),
        (Tools((tool(parameters={"type": "object", "required": 5}),)), False),
        (
            Tools(
                (
                    tool(name="a", parameters={"type": "object", "required": 5}),
                    tool(name="b", strict=True),
                )
            ),
            False,
        ),
    ],
)
def test_parameters_matter_where_calls_are_held_to_them(tools: Tools, is_refused: bool):
    """Elsewhere they are the model's to read."""
    call = Call("r1", tools=tools)
    if not is_refused:
        check_form(call)
        return
    with pytest.raises(RequestError) as caught:
        check_form(call)
    assert caught.value.param == "tools[0].function.parameters"


def test_what_a_schema_is_not_held_to_is_said(demo: LoadedModel):
    """Before whatever else there is to say."""
    schema = Structure(json.dumps({"type": "array", "uniqueItems": True}))
    _, notice = asked(demo, structure=schema, speculation="on")
    assert notice is not None
    assert "uniqueItems" in notice[1]
