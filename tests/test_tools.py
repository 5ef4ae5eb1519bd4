"""Tools, formats and thinking through a real worker, with the official client and its helpers."""

import json
from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.demo_prompts import TOOLS
from tests.workers import Worker, running

NUMBER = {"type": "integer"}
MULTIPLY: Any = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers",
        "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}},
    },
}
TIMER: Any = TOOLS["start_timer"]
SEEDED = {"temperature": 0.9, "seed": 11, "max_tokens": 40}


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int
    city: str


class Order(BaseModel):
    """What somebody wants."""

    class Item(BaseModel):
        """A kind of thing, and how many."""

        item: str
        count: int = Field(ge=1)

    customer: str
    items: list[Item]
    urgency: Literal["low", "high"]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with running(tmp_path_factory.mktemp("home")) as worker:
        yield worker


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def refused(worker: Worker, **options: Any) -> dict[str, Any]:
    with pytest.raises(openai.BadRequestError) as caught:
        worker.chat(**options)
    assert isinstance(caught.value.body, dict)
    return caught.value.body


def joined(stream: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """(content, thinking, calls, finish reason) of a stream's deltas."""
    content, thinking, calls, reason = "", "", list[list[str]](), ""
    for chunk in stream:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            content += choice.delta.content or ""
            thinking += (choice.delta.model_extra or {}).get("reasoning_content", "")
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments or ""
    return content, thinking, [(name, arguments) for name, arguments in calls], reason


def told(reply: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """The same of a whole reply."""
    (choice,) = reply.choices
    message = choice.message
    thinking = (message.model_extra or {}).get("reasoning_content", "")
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content or "", thinking, calls, choice.finish_reason


def notice_of(reply: Any) -> str | None:
    return reply.model_extra["pendra"].get("notice", {}).get("code")


@pytest.mark.parametrize("speculation", ["on", "off"])
def test_the_tool_loop_works(worker: Worker, speculation: str):
    """Call, result, answer; each message handed back as the client has it."""
    messages: list[Any] = said("Multiply 52 by 92.")
    options = {"tools": [MULTIPLY], "temperature": 0, "speculation": speculation}
    first = worker.chat(messages, **options).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content is None
    (call,) = first.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, arguments) == ("multiply", {"a": 52, "b": 92})
    result = json.dumps({"result": arguments["a"] * arguments["b"]})
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    second = worker.chat(messages, **options).choices[0]
    assert (second.message.content, second.finish_reason) == ("The result is 4784.", "stop")


def test_a_pydantic_model_is_filled(worker: Worker):
    """The client's own helper: a schema out, an object back."""
    reply = worker.client.chat.completions.parse(
        model="demo",
        messages=said("Write JSON for a person named Ada, age 36, city Paris."),
        response_format=Person,
        temperature=0,
    )
    assert reply.choices[0].message.parsed == Person(name="Ada", age=36, city="Paris")


def test_nested_models_and_references_are_filled(worker: Worker):
    """$defs, lists, an enum, a bound."""
    reply = worker.client.chat.completions.parse(
        model="demo",
        messages=said("Write JSON for an order by Omar: 12 apples, 7 figs and 30 cherries."),
        response_format=Order,
        temperature=0,
    )
    order = reply.choices[0].message.parsed
    assert order is not None
    assert (order.customer, order.urgency in ("low", "high")) == ("Omar", True)
    assert order.items[0] == Order.Item(item="apples", count=12)


def test_the_clients_stream_helper_gathers_a_model(worker: Worker):
    """It parses partial JSON as it comes."""
    with worker.client.chat.completions.stream(
        model="demo",
        messages=said("Write JSON for a person named Ada, age 36, city Paris."),
        response_format=Person,
        temperature=0,
    ) as stream:
        seen = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Person(name="Ada", age=36, city="Paris")
    assert seen.count("content.delta") > 2


def test_the_clients_stream_helper_gathers_a_call(worker: Worker):
    """Of a strict tool made of a model; its arguments come back as one."""

    class StartTimer(BaseModel):
        """Set a timer"""

        duration: int

    with worker.client.chat.completions.stream(
        model="demo",
        messages=said("Wake me in 25 minutes."),
        tools=[openai.pydantic_function_tool(StartTimer, name="start_timer")],
        temperature=0,
    ) as stream:
        for _ in stream:
            pass
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert call.function.parsed_arguments == StartTimer(duration=25)


ALL_WAYS = list(product(("on", "auto", "off"), (False, True)))  # speculation, whether it streams
FEW_WAYS = [("on", False), ("auto", True), ("off", True)]


@pytest.mark.parametrize(
    "ways", [FEW_WAYS, pytest.param(ALL_WAYS, marks=pytest.mark.long)], ids=["few", "all"]
)
@pytest.mark.parametrize("asked", ["schema", "required", "auto", "thinking", "thinking schema"])
def test_a_seed_gives_one_reply(worker: Worker, asked: str, ways: list[tuple[str, bool]]):
    """Drafted or not, streamed or not, cold or from the prefix cache."""
    options: dict[str, Any] = dict(SEEDED)
    text = "Wake me in 25 minutes."
    if "schema" in asked:
        options["response_format"] = {"type": "json_object"}
    if asked in ("required", "auto"):
        options |= {"tools": [TIMER, MULTIPLY], "tool_choice": asked}
    if "thinking" in asked:
        text = "What is 32 + 21?"
        options["reasoning_effort"] = "low"
    first = told(worker.chat(said(text), speculation="off", **options))
    for speculation, streams in ways:
        reply = worker.chat(said(text), speculation=speculation, stream=streams, **options)
        assert (joined if streams else told)(reply) == first


def test_thinking_is_apart_from_what_is_said(worker: Worker):
    """And counted."""
    reply = worker.chat(said("What is 32 + 21?"), reasoning_effort="low", temperature=0)
    content, thinking, calls, reason = told(reply)
    assert (content, thinking) == ("32 + 21 = 53.", "32 + 20 = 52. 52 + 1 = 53.")
    assert (calls, reason) == ([], "stop")
    assert 20 < reply.usage.completion_tokens_details.reasoning_tokens < 35


def test_thinking_that_ate_the_budget_says_so(worker: Worker):
    """Instead of an empty reply that nobody understands."""
    reply = worker.chat(
        said("What is 32 + 21?"), reasoning_effort="low", temperature=0, max_tokens=10
    )
    assert told(reply)[0] == ""
    assert notice_of(reply) == "truncated_during_reasoning"


def test_logprobs_are_of_what_is_said(worker: Worker):
    """Not of the thinking."""
    reply = worker.chat(
        said("What is 32 + 21?"), reasoning_effort="low", temperature=0, logprobs=True
    )
    tokens = [entry.token for entry in reply.choices[0].logprobs.content]
    assert "".join(tokens) == "32 + 21 = 53."


def test_a_document_that_was_cut_says_so(worker: Worker):
    """finish_reason length, and the notice."""
    reply = worker.chat(
        said("Write JSON for a person named Ada, age 36, city Paris."),
        response_format={"type": "json_object"},
        max_tokens=5,
    )
    assert reply.choices[0].finish_reason == "length"
    assert notice_of(reply) == "truncated_during_structured_output"


def test_a_tool_that_is_named_is_called(worker: Worker):
    """Whatever was said."""
    choice = {"type": "function", "function": {"name": "multiply"}}
    reply = worker.chat(
        said("Wake me in 25 minutes."), tools=[TIMER, MULTIPLY], tool_choice=choice, temperature=0
    )
    _, _, calls, reason = told(reply)
    assert {name for name, _ in calls} == {"multiply"}
    assert reason == "tool_calls"


def test_a_model_that_is_told_of_no_tool_calls_none(worker: Worker):
    """tool_choice none."""
    reply = worker.chat(said("Wake me in 25 minutes."), tools=[TIMER], tool_choice="none")
    assert told(reply)[2] == []


def test_calls_in_several_choices_have_ids_of_their_own(worker: Worker):
    """Clients look results up by them."""
    reply = worker.chat(said("Wake me in 25 minutes."), tools=[TIMER], n=3, tool_choice="required")
    ids = [call.id for choice in reply.choices for call in choice.message.tool_calls]
    assert len(ids) == len(set(ids)) >= 3


def test_forced_ids_are_in_no_acceptance_rate(worker: Worker):
    """A document that is all the schema's own has nothing a draft could be right about."""
    schema = {"type": "object", "properties": {"kind": {"const": "a rather long constant text"}},
              "required": ["kind"], "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "fixed", "schema": schema}}
    reply = worker.chat(said("Hello"), response_format=wanted, temperature=0, speculation="on")
    assert json.loads(told(reply)[0]) == {"kind": "a rather long constant text"}
    assert reply.model_extra["pendra"]["timing"].get("draft_acceptance_rate", 0.0) < 1.0


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "https://example.org/a"}}}, "$ref"),
        ({"type": "string", "pattern": "(x+x+)+y", "minLength": 5, "maxLength": 4}, ""),
        ({"type": "object", "required": ["a"], "properties": {"a": {"enum": []}}}, "enum"),
    ],
)
def test_a_schema_that_cannot_be_held_to_is_refused(
    worker: Worker, schema: dict[str, Any], part: str
):
    """400 before anything is written; the message names the place."""
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    error = refused(worker, response_format=wanted)
    assert error["param"] == "response_format.json_schema.schema"
    assert part in error["message"]
    assert "\n" not in error["message"]


def test_a_keyword_that_is_not_enforced_is_named(worker: Worker):
    """The reply comes, and says what it was not held to."""
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 3}
    wanted = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    messages = said("Count from 3 in steps of 4, 3 numbers.")
    reply = worker.chat(messages, response_format=wanted, temperature=0)
    assert notice_of(reply) == "strict_schema_not_enforced"
    assert "uniqueItems" in reply.model_extra["pendra"]["notice"]["message"]


def test_parameters_that_cannot_be_held_to_are_refused(worker: Worker):
    """Where the call has to come; the message names the tool's place in the list."""
    broken: Any = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "required": ["a"],
                                                 "properties": {"a": False}}},
    }  # fmt: skip
    error = refused(worker, tools=[TIMER, broken], tool_choice="required")
    assert error["param"] == "tools[1].function.parameters"


@pytest.mark.parametrize("text", ["Hello", "Thanks!", "Please add 35 and 67."])
def test_beside_a_form_a_reply_calls_or_has_it(worker: Worker, text: str):
    """It used to be neither now and then: a call without an end, or words behind its marker."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9999}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    options = {"tools": [MULTIPLY], "response_format": wanted, "max_tokens": 200}
    for seed in range(4):
        content, _, calls, reason = told(
            worker.chat(said(text), temperature=1.0, seed=seed, **options)
        )
        assert reason == ("tool_calls" if calls else "stop")
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        assert calls or set(json.loads(content)) == {"a"}


def test_a_call_that_was_cut_says_so(worker: Worker):
    """Its arguments may not parse; no grammar is needed to know."""
    reply = worker.chat(said("Multiply 52 by 92."), tools=[MULTIPLY], temperature=0, max_tokens=8)
    assert reply.choices[0].finish_reason == "length"
    assert notice_of(reply) == "truncated_during_structured_output"
