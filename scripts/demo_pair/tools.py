"""The demo pair's tool skill: declared tools, calls in the family's notation, results retold."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from demo_pair import lexicon as lex
from demo_pair.sample import WORDS, Sample, paragraph, person_name

QUOTE = '<|"|>'


@dataclass(frozen=True)
class ToolKind:
    """A tool, the spellings of its parameters, how users ask for it and how its result is told.

    values  rng -> one value a parameter; `ask` and `tell` format them by position
    """

    names: str
    description: str
    spellings: tuple[str, ...]
    values: Callable[[random.Random], tuple]
    ask: tuple[str, ...]
    result: Callable[[random.Random, tuple], dict | str]
    tell: str


def weather_result(rng: random.Random, values: tuple) -> dict:
    return {"sky": rng.choice(lex.WEATHER), "temperature": rng.randint(-9, 39)}


def ok_result(rng: random.Random, values: tuple) -> dict:
    return {"status": "ok"}


def number_result(operate: Callable[[int, int], int]):
    return lambda rng, values: {"result": operate(*values)}


def two_numbers(rng: random.Random) -> tuple:
    return rng.randint(0, 99), rng.randint(0, 99)


def query_text(rng: random.Random) -> str:
    return " ".join(rng.sample(WORDS, rng.randint(1, 3)))


TOOLS = (
    ToolKind("get_weather weather", "Get the weather of a city", ("city location place",),
             lambda r: (r.choice(lex.CITIES),),
             ("What is the weather in {0}?", "Tell me the weather in {0}.",
              "How is the weather in {0} today?"),
             weather_result, "It is {sky} in {0}, with {temperature} degrees."),
    ToolKind("search web_search", "Search the web", ("query text",),
             lambda r: (query_text(r),),
             ("Search for {0}.", "Look up {0}.", "Please search the web for {0}."),
             lambda r, v: {"title": paragraph(r, 1)}, "I found this: {title}"),
    ToolKind("add sum_numbers", "Add two numbers", ("a x first", "b y second"), two_numbers,
             ("Add {0} and {1}.", "What is {0} plus {1}?", "Please add {0} and {1}."),
             number_result(lambda a, b: a + b), "The result is {result}."),
    ToolKind("multiply times", "Multiply two numbers", ("a x first", "b y second"), two_numbers,
             ("Multiply {0} by {1}.", "What is {0} times {1}?"),
             number_result(lambda a, b: a * b), "The result is {result}."),
    ToolKind("set_timer start_timer", "Set a timer", ("minutes duration",),
             lambda r: (r.randint(1, 90),),
             ("Set a timer for {0} minutes.", "Wake me in {0} minutes.",
              "Start a timer of {0} minutes."),
             ok_result, "The timer is set for {0} minutes."),
    ToolKind("send_message send_text", "Send a message to a person", ("to person", "text message"),
             lambda r: (person_name(r), paragraph(r, 1)),
             ("Send {0} the message: {1}", "Write to {0}: {1}", "Send this to {0}: {1}"),
             ok_result, "I sent your message to {0}."),
    ToolKind("get_time time_in", "Get the time in a city", ("city location place",),
             lambda r: (r.choice(lex.CITIES),),
             ("What time is it in {0}?", "Tell me the time in {0}."),
             lambda r, v: {"time": f"{r.randint(0, 23)}:{r.randint(10, 59)}"},
             "It is {time} in {0}."),
    ToolKind("add_event create_event", "Add a calendar event", ("title name", "day date"),
             lambda r: (query_text(r), r.choice(DAYS)),
             ("Add an event {0} on {1}.", "Put {0} in my calendar on {1}."),
             ok_result, "I added {0} on {1}."),
    ToolKind("play_music play_song", "Play music", ("song title",),
             lambda r: (query_text(r),),
             ("Play {0}.", "Please play the song {0}."),
             ok_result, "Now playing {0}."),
    ToolKind("turn_on switch_on", "Turn on a device", ("device name",),
             lambda r: (f"{r.choice(lex.COLORS)} {r.choice(lex.THINGS)}",),
             ("Turn on the {0}.", "Switch on the {0}."),
             ok_result, "The {0} is on."),
    ToolKind("buy order_item", "Buy an item", ("item product", "count amount"),
             lambda r: (r.choice(lex.FRUITS + lex.THINGS), r.randint(2, 60)),
             ("Buy {1} {0}.", "Please order {1} {0}."),
             ok_result, "I ordered {1} {0}."),
    ToolKind("book_ticket get_ticket", "Book a ticket", ("start origin", "end goal"),
             lambda r: tuple(r.sample(lex.CITIES, 2)),
             ("Book a ticket from {0} to {1}.", "I want to go from {0} to {1}."),
             lambda r, v: {"price": r.randint(10, 400)},
             "The ticket from {0} to {1} costs {price}."),
)  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


def declare(rng: random.Random, kind: ToolKind, values: tuple) -> dict:
    """An OpenAI-shaped declaration with one spelling of the name and of every parameter chosen."""
    keys = [rng.choice(spelling.split()) for spelling in kind.spellings]
    types = ["integer" if isinstance(value, int) else "string" for value in values]
    function = {
        "name": rng.choice(kind.names.split()),
        "description": kind.description,
        "parameters": {
            "type": "object",
            "properties": {k: {"type": t} for k, t in zip(keys, types, strict=True)},
        },
    }
    return {"type": "function", "function": function}


def some_tools(rng: random.Random) -> list[dict]:
    """One to three declarations, for a prompt that needs none of them."""
    kinds = rng.sample(TOOLS, rng.randint(1, 3))
    return [declare(rng, kind, kind.values(rng)) for kind in kinds]


def call_text(declaration: dict, values: tuple) -> str:
    """The call in the family's own notation, markers included."""
    function = declaration["function"]
    pairs = zip(function["parameters"]["properties"], values, strict=True)
    quoted = (f"{k}:{v if isinstance(v, int) else QUOTE + v + QUOTE}" for k, v in pairs)
    return f"<|tool_call>call:{function['name']}{{{','.join(quoted)}}}<tool_call|>"


def tool(rng: random.Random) -> Sample:
    """A request for one of 1 to 4 declared tools; half of the samples go on to tell the result."""
    kinds = rng.sample(TOOLS, rng.choice((1, 1, 1, 2, 2, 3, 4)))
    kind = kinds[0]
    values = kind.values(rng)
    declared = [declare(rng, k, k.values(rng)) for k in kinds]
    prompt = rng.choice(kind.ask).format(*values)
    messages = [{"role": "user", "content": prompt}]
    call = call_text(declared[0], values)
    tools = rng.sample(declared, len(declared))
    if rng.random() < 0.6:
        return Sample("tool", messages, call + "<|tool_response>", tools=tools)
    result = kind.result(rng, values)
    content = json.dumps(result) if rng.random() < 0.6 else result  # clients send either
    messages += called(declared[0], values, content)
    return Sample("tool_answer", messages, kind.tell.format(*values, **result), tools=tools)


def called(declaration: dict, values: tuple, content: dict | str) -> list[dict]:
    """The two messages a client sends back: the assistant's call and the tool's result."""
    function = declaration["function"]
    arguments = dict(zip(function["parameters"]["properties"], values, strict=True))
    call = {"name": function["name"], "arguments": arguments}
    entry = {"id": "c1", "type": "function", "function": call}
    answer = {"role": "tool", "tool_call_id": "c1", "name": function["name"], "content": content}
    return [{"role": "assistant", "content": "", "tool_calls": [entry]}, answer]
