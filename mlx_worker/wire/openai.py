"""Bodies of /v1/chat/completions and /v1/completions → what they ask for.

Owns the list of parameters, their limits, and that nothing which would change the text is ever
ignored: an unknown key or value is refused by its path. Leaves JSON to body.py, the kinds of value
to fields.py, what is said to messages.py, tools to tools.py, formats to structure.py, what goes
back to reply.py, and what depends on a model to the engine. Pure; any thread.

Accepted without effect: user, safety_identifier, metadata, service_tier auto or default,
store false.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from mlx_worker.errors import InvalidParameter, RequestError, shown
from mlx_worker.records import LOCAL, Call, Speculation
from mlx_worker.wire.body import read_json
from mlx_worker.wire.fields import (
    Reader,
    agreed,
    biases,
    flag,
    free_object,
    items,
    number,
    only,
    record,
    replaced,
    text,
    token_ids,
    whole,
    word,
)
from mlx_worker.wire.messages import NOT_YET, messages
from mlx_worker.wire.structure import response_format
from mlx_worker.wire.tools import chosen_tools, tool_choice, tools

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
THINKS = {"none": False, "minimal": False} | dict.fromkeys(
    ("low", "medium", "high", "xhigh", "max"), True
)


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
        structure=given.get("response_format"),
        tools=chosen_tools(given),
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
        max_tokens=agreed(given, "max_tokens", "max_completion_tokens"),
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
    repetition = agreed(given, "repetition_penalty", "repeat_penalty")
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
    """What the names of the one switch say, which must be the same."""
    effort = given.get("reasoning_effort")
    options = given.get("chat_template_kwargs", {})
    says = {
        "enable_thinking": given.get("enable_thinking"),
        "chat_template_kwargs.enable_thinking": options.get("enable_thinking"),
    }
    thinks, by = (None, "") if effort is None else (THINKS[effort], "reasoning_effort")
    for name, switch in says.items():
        if None not in (thinks, switch) and thinks != switch:
            limit = f"{str(thinks).lower()} beside {by} {shown(given[by])}"
            raise InvalidParameter(name, switch, limit, hint="send one of them")
        if switch is not None:
            thinks, by = switch, name
    return bool(thinks)


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
    "messages": messages,
    "logprobs": flag,
    "top_logprobs": whole(0, MAX_RIVALS),
    "response_format": response_format,
    "tools": tools,
    "tool_choice": tool_choice,
    "parallel_tool_calls": flag,
    "functions": replaced("tools"),
    "function_call": replaced("tool_choice"),
    "guided_json": replaced("response_format"),
    "structured_outputs": replaced("response_format"),
    "reasoning_effort": word(*THINKS),
    "enable_thinking": flag,
    "chat_template_kwargs": record({"enable_thinking": flag}),
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
