"""Bodies of /v1/chat/completions and /v1/completions → what they ask for.

Owns the list of parameters, their limits, and that nothing which would change the text is ever
ignored: an unknown key or value is refused by its path. Leaves JSON to body.py, the kinds of value
to fields.py, what goes back to reply.py, and what depends on a model to the engine. Pure; any
thread.

Accepted without effect: user, safety_identifier, metadata, service_tier auto or default,
store false, parallel_tool_calls (there are no tools yet), a message's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from mlx_worker.errors import InvalidParameter, RequestError, shown
from mlx_worker.records import LOCAL, Call, Speculation
from mlx_worker.wire.body import read_json
from mlx_worker.wire.fields import (
    Reader,
    biases,
    each,
    flag,
    free_object,
    items,
    number,
    only,
    record,
    text,
    token_ids,
    whole,
    word,
)

# The engine's limits, which a test compares. Temperatures above OpenAI's 2 are served.
LEAST_TEMPERATURE = 1e-6
REPETITION = (0.01, 100.0)
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
SEEDS = (-(1 << 63), (1 << 64) - 1)
MAX_STOPS = 4
MAX_RIVALS = 20  # of each id of a chat
MAX_COMPLETION_RIVALS = 5  # the same in the older endpoint
MAX_CHOICES = 8

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
)
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
THINKS = {"none": False, "minimal": False, "low": True, "medium": True, "high": True}
NOT_YET = "not supported by this version yet"
NO_TOOLS = f"tools are {NOT_YET}"


@dataclass(frozen=True)
class Asked:
    """What one body asks for.

    call           the engine's part
    include_usage  a stream's usage in a last chunk of its own
    affinity       names the conversation for whoever chooses a worker: prompt_cache_key
    """

    call: Call
    include_usage: bool = False
    affinity: str | None = None

    @property
    def has_logprobs(self) -> bool:
        return self.call.sampling.get("logprobs") is not None


def parse_chat(body: bytes, id: str, scope: str = LOCAL) -> Asked:
    """Read the body of POST /v1/chat/completions.

    id     of the request, as X-Request-Id will say it
    scope  whose prefix cache it may use

    Raises RequestError: no JSON object, or InvalidParameter where a value is outside its limit.
    """
    given = read_body(body, CHAT)
    return _asked(
        given,
        id=id,
        scope=scope,
        messages=given["messages"],
        logprobs=_chat_logprobs(given),
        enable_thinking=_thinks(given),
    )


def parse_completion(body: bytes, id: str, scope: str = LOCAL) -> Asked:
    """Read the body of POST /v1/completions; arguments and errors as for parse_chat."""
    given = read_body(body, COMPLETION)
    return _asked(given, id=id, scope=scope, prompt=given["prompt"], logprobs=given.get("logprobs"))


def _asked(given: Mapping[str, Any], *, logprobs: int | None, **fields: Any) -> Asked:
    call = Call(
        model=given.get("model"),
        sampling=_sampling(given, logprobs),
        n=given.get("n", 1),
        max_tokens=_agreed(given, "max_tokens", "max_completion_tokens"),
        stop=given.get("stop", ()),
        speculation=given.get("speculation", "auto"),
        is_streamed=given.get("stream", False),
        **fields,
    )
    return Asked(
        call,
        include_usage=given.get("stream_options", {}).get("include_usage", False),
        affinity=given.get("prompt_cache_key"),
    )


def _sampling(given: Mapping[str, Any], logprobs: int | None) -> dict[str, Any]:
    """The fields of Sampling that the body sets."""
    sampling = {name: given[name] for name in SAMPLING if name in given}
    repetition = _agreed(given, "repetition_penalty", "repeat_penalty")
    derived = {"repetition_penalty": repetition, "logprobs": logprobs}
    return sampling | {name: value for name, value in derived.items() if value is not None}


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    """How many rivals are wanted beside each id; None: no logprobs."""
    n_rivals = given.get("top_logprobs", 0)
    if given.get("logprobs", False):
        return n_rivals
    if n_rivals:
        limit = "0 without logprobs"
        raise InvalidParameter("top_logprobs", n_rivals, limit, hint="set logprobs to true")
    return None


def _thinks(given: Mapping[str, Any]) -> bool:
    effort, switch = given.get("reasoning_effort"), given.get("enable_thinking")
    if effort is None:
        return bool(switch)
    if switch is not None and switch != THINKS[effort]:
        limit = f"{str(not switch).lower()} beside reasoning_effort {shown(effort)}"
        raise InvalidParameter("enable_thinking", switch, limit, hint="send one of them")
    return THINKS[effort]


def _agreed(given: Mapping[str, Any], name: str, alias: str) -> Any:
    """The value of a parameter with two names; None: neither was given."""
    value, other = given.get(name), given.get(alias)
    if value is None or other is None:
        return other if value is None else value
    if value != other:
        raise InvalidParameter(alias, other, f"the same as {name}: {value}", "send one of them")
    return value


def read_body(body: bytes, reader: Reader) -> dict[str, Any]:
    """The body as an object that `reader` accepts."""
    value = read_json(body)
    if not isinstance(value, dict):
        raise RequestError(f"body: {shown(value)}, must be a JSON object")
    return reader("", value)


def _temperature(path: str, value: Any) -> float:
    temperature = number(0.0)(path, value)
    if 0 < temperature < LEAST_TEMPERATURE:
        limit = f"0 for greedy, or at least {LEAST_TEMPERATURE:g}"
        raise InvalidParameter(path, value, limit)
    return temperature


def _stops(path: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else items(path, value)
    if any(not isinstance(stop, str) or not stop for stop in stops):
        raise InvalidParameter(path, stops, "a list of texts, none of them empty")
    if len(stops) > MAX_STOPS:
        raise InvalidParameter(path, f"{len(stops)} texts", f"at most {MAX_STOPS}")
    return tuple(stops)


def _prompt(path: str, value: Any) -> str | tuple[int, ...]:
    """A text, a list of ids, or a list with one of either."""
    if isinstance(value, str):
        return value
    prompts = items(path, value)
    if not prompts or not isinstance(prompts[0], str | list):
        return token_ids(path, prompts)
    if len(prompts) > 1:
        limit = "one prompt"
        raise InvalidParameter(path, f"{len(prompts)} items", limit, "send a request for each")
    return prompts[0] if isinstance(prompts[0], str) else token_ids(f"{path}[0]", prompts[0])


def _role(path: str, value: Any) -> str:
    if value in ("tool", "function"):
        raise InvalidParameter(path, value, f"one of {', '.join(ROLES)}: {NO_TOOLS}")
    return ROLES[word(*ROLES)(path, value)]


def _content(path: str, value: Any) -> str:
    """One text. Text parts are joined as they are, with nothing between them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidParameter(path, value, "a text or a list of text parts")
    return "".join(each(_part)(path, value))


def _part(path: str, value: Any) -> str:
    kind = free_object(path, value).get("type")
    if kind is not None and kind != "text":
        limit = f"text: other parts are {NOT_YET}"
        raise InvalidParameter(f"{path}.type", kind, limit, "send text parts only")
    return PART(path, value)["text"]


def _message(path: str, value: Any) -> dict[str, Any]:
    message = MESSAGE(path, value)
    return {"role": message["role"], "content": message["content"]}


def _response_format(path: str, value: Any) -> dict[str, Any]:
    kind = free_object(path, value).get("type")
    if kind in ("json_object", "json_schema"):
        limit = f"text: structured output is {NOT_YET}"
        raise InvalidParameter(f"{path}.type", kind, limit, "ask for the format in a message")
    return RESPONSE_FORMAT(path, value)


def _tool_choice(path: str, value: Any) -> str:
    if value not in ("none", "auto"):
        raise InvalidParameter(path, value, f"none or auto: {NO_TOOLS}")
    return value


PART = record({"type": word("text"), "text": text}, required=["type", "text"])
MESSAGE = record(
    {
        "role": _role,
        "content": _content,
        "name": text,
        "tool_calls": only([], f"empty: {NO_TOOLS}"),
        "annotations": only([], f"empty: annotations are {NOT_YET}"),
    },
    required=["role", "content"],
)
RESPONSE_FORMAT = record({"type": word("text")}, required=["type"])
COMMON: Mapping[str, Reader] = {
    "model": text,
    "stream": flag,
    "stream_options": record(
        {"include_usage": flag, "include_obfuscation": only(False, f"false: padding is {NOT_YET}")}
    ),
    "max_tokens": whole(1),
    "max_completion_tokens": whole(1),
    "temperature": _temperature,
    "top_p": number(0.0, 1.0, is_open=True),
    "top_k": whole(0),
    "min_p": number(0.0, 1.0),
    "frequency_penalty": number(-MAX_PENALTY, MAX_PENALTY),
    "presence_penalty": number(-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": number(*REPETITION),
    "repeat_penalty": number(*REPETITION),
    "logit_bias": biases(-MAX_BIAS, MAX_BIAS),
    "seed": whole(*SEEDS),
    "stop": _stops,
    "n": whole(1, MAX_CHOICES),
    "speculation": word(*get_args(Speculation)),
    "prompt_cache_key": text,
    "user": text,
    "safety_identifier": text,
    "metadata": free_object,
    "service_tier": word("auto", "default"),
    "store": only(False, "false: nothing is kept here"),
}
CHAT_KEYS: Mapping[str, Reader] = {
    **COMMON,
    "messages": each(_message),
    "logprobs": flag,
    "top_logprobs": whole(0, MAX_RIVALS),
    "response_format": _response_format,
    "tools": only([], f"empty: {NO_TOOLS}"),
    "tool_choice": _tool_choice,
    "parallel_tool_calls": flag,
    "reasoning_effort": word(*THINKS),
    "enable_thinking": flag,
}
COMPLETION_KEYS: Mapping[str, Reader] = {
    **COMMON,
    "prompt": _prompt,
    "logprobs": whole(0, MAX_COMPLETION_RIVALS),
    "echo": only(False, f"false: an echo is {NOT_YET}"),
    "suffix": only("", f"empty: a suffix is {NOT_YET}"),
    "best_of": only(1, f"1: a choice among several is {NOT_YET}"),
}
CHAT = record(CHAT_KEYS, required=["messages"])
COMPLETION = record(COMPLETION_KEYS, required=["prompt"])
