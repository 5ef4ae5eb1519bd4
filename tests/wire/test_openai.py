"""A body becomes a call with everything it asks for, or an error that names what is wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from mlx_worker.engine.validate import check_sampling, check_stops
from mlx_worker.errors import InvalidParameter, RequestError
from mlx_worker.records import Call, Sampling
from mlx_worker.wire import openai
from mlx_worker.wire.openai import Asked, parse_chat, parse_completion
from tests.wire.bodies import MESSAGES, chat, completion, content, messages, refused

CALL = Call("r1", messages=({"role": "user", "content": "hi"},), is_streamed=False)
PROMPT_CALL = Call("r1", prompt="hi", is_streamed=False)
VOCAB = 10**6


def test_the_least_chat_asks_for_nothing_else():
    """What a body leaves out is left to the model and the worker."""
    assert chat() == Asked(CALL)


def test_the_least_completion_asks_for_nothing_else():
    """The same for a prompt."""
    assert completion() == Asked(PROMPT_CALL)


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_the_scope_goes_with_the_call(parse: Callable[..., Asked]):
    """Whose prefix cache a call may use is the door's to say, not the body's."""
    body = {parse_chat: {"messages": MESSAGES}, parse_completion: {"prompt": "hi"}}[parse]
    assert parse(json.dumps(body).encode(), "r1", scope="abc").call.scope == "abc"


CALL_FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model": "demo"}, {"model": "demo"}),
    ({"max_tokens": 5}, {"max_tokens": 5}),
    ({"max_completion_tokens": 5}, {"max_tokens": 5}),
    ({"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 5}),
    ({"n": 8}, {"n": 8}),
    ({"stop": "a"}, {"stop": ("a",)}),
    ({"stop": ["a", "b", "c", "d"]}, {"stop": ("a", "b", "c", "d")}),
    ({"stop": []}, {"stop": ()}),
    ({"speculation": "auto"}, {"speculation": "auto"}),
    ({"speculation": "on"}, {"speculation": "on"}),
    ({"speculation": "off"}, {"speculation": "off"}),
]
SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 2.5}, {"temperature": 2.5}),
    ({"top_p": 0.9}, {"top_p": 0.9}),
    ({"top_k": 40}, {"top_k": 40}),
    ({"min_p": 0.05}, {"min_p": 0.05}),
    ({"frequency_penalty": -2}, {"frequency_penalty": -2.0}),
    ({"presence_penalty": 2}, {"presence_penalty": 2.0}),
    ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"repetition_penalty": 1.1, "repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"logit_bias": {"0": -100, "50256": 1.5}}, {"logit_bias": {0: -100.0, 50256: 1.5}}),
    ({"logit_bias": {}}, {"logit_bias": {}}),
    ({"seed": -(2**63)}, {"seed": -(2**63)}),
    ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
]
NO_EFFECT: list[dict[str, Any]] = [
    {"user": "u"},
    {"safety_identifier": "s"},
    {"metadata": {"any": {"thing": None}}},
    {"service_tier": "auto"},
    {"service_tier": "default"},
    {"store": False},
    {"stream_options": {}},
    {"stream_options": {"include_usage": None, "include_obfuscation": False}},
]
CHAT_NO_EFFECT: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}},
    {"tools": []},
    {"tool_choice": "none"},
    {"tool_choice": "auto"},
    {"parallel_tool_calls": True},
    {"parallel_tool_calls": False},
    {"logprobs": False},
    {"top_logprobs": 0},
    {"reasoning_effort": "none"},
    {"reasoning_effort": "minimal", "enable_thinking": False},
    {"enable_thinking": False},
    {"chat_template_kwargs": {}},
    {"chat_template_kwargs": {"enable_thinking": False}},
]


@pytest.mark.parametrize(("given", "expected"), CALL_FIELDS)
def test_a_parameter_of_the_call_is_read_from_both_bodies(
    given: dict[str, Any], expected: dict[str, Any]
):
    """Both endpoints share one list."""
    calls = [chat(**given).call, completion(**given).call]
    assert calls == [replace(CALL, **expected), replace(PROMPT_CALL, **expected)]


@pytest.mark.parametrize(("given", "expected"), SAMPLING)
def test_a_sampling_parameter_is_read_from_both_bodies(
    given: dict[str, Any], expected: dict[str, Any]
):
    """Only what was set is in the call, under the engine's own name."""
    assert [chat(**given).call.sampling, completion(**given).call.sampling] == [expected, expected]


@pytest.mark.parametrize("given", NO_EFFECT)
def test_what_has_no_effect_is_accepted_by_both(given: dict[str, Any]):
    """Clients send these by habit; they change no text."""
    assert [chat(**given), completion(**given)] == [Asked(CALL), Asked(PROMPT_CALL)]


@pytest.mark.parametrize("given", CHAT_NO_EFFECT)
def test_what_has_no_effect_in_a_chat_is_accepted(given: dict[str, Any]):
    """The value that means "as without it" is served."""
    assert chat(**given) == Asked(CALL)


@pytest.mark.parametrize("given", [{"echo": False}, {"suffix": ""}, {"best_of": 1}])
def test_a_completion_accepts_the_default_of_what_is_not_served(given: dict[str, Any]):
    """Older clients write every default."""
    assert completion(**given) == Asked(PROMPT_CALL)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"stream_options": {"include_usage": True}}, {"include_usage": True}),
        ({"prompt_cache_key": "talk-7"}, {"affinity": "talk-7"}),
    ],
)
def test_how_to_reply_is_read_from_both_bodies(given: dict[str, Any], expected: dict[str, Any]):
    """What only the writer or a router needs stays out of the call."""
    assert [chat(**given), completion(**given)] == [
        Asked(CALL, **expected),
        Asked(PROMPT_CALL, **expected),
    ]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_whether_to_stream_reaches_the_engine(is_streamed: bool):
    """It needn't hand over pieces that nobody sees yet."""
    calls = [chat(stream=is_streamed).call, completion(stream=is_streamed).call]
    assert [call.is_streamed for call in calls] == [is_streamed] * 2


@pytest.mark.parametrize("key", [*openai.CHAT_KEYS, "of_no_one"])
def test_null_is_the_same_as_absent(key: str):
    """Typed clients write null for what they don't set."""
    given = {"messages": MESSAGES, key: MESSAGES if key == "messages" else None}
    assert chat(**given) == Asked(CALL)


@pytest.mark.parametrize(
    ("given", "logprobs"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ],
)
def test_a_chat_asks_for_logprobs_and_rivals(given: dict[str, Any], logprobs: int | None):
    """logprobs alone is the chosen id; top_logprobs adds its rivals."""
    asked = chat(**given)
    assert (asked.call.sampling.get("logprobs"), asked.has_logprobs) == (
        logprobs,
        logprobs is not None,
    )


@pytest.mark.parametrize("n_rivals", [0, 5])
def test_a_completion_asks_for_logprobs_by_a_number(n_rivals: int):
    """In the older endpoint logprobs is the number of rivals."""
    assert completion(logprobs=n_rivals).call.sampling == {"logprobs": n_rivals}


@pytest.mark.parametrize(
    ("given", "thinks"),
    [
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "medium"}, True),
        ({"reasoning_effort": "high"}, True),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": True, "reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": True}, True),
    ],
)
def test_thinking_is_a_switch_with_three_names(given: dict[str, Any], thinks: bool):
    """Effort has two values here: off and on."""
    assert chat(**given).call.enable_thinking is thinks


@pytest.mark.parametrize(
    ("role", "becomes"),
    [("system", "system"), ("developer", "system"), ("user", "user"), ("assistant", "assistant")],
)
def test_developer_is_another_word_for_system(role: str, becomes: str):
    """Templates know no developer."""
    asked = chat(messages=[{"role": role, "content": "hi"}])
    assert asked.call.messages == ({"role": becomes, "content": "hi"},)


def test_text_parts_are_joined_as_they_are():
    """Nothing is put between two parts: every character is the client's."""
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert chat(**content(*parts)).call.messages == ({"role": "user", "content": "a b"},)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", "hi"),
        ("", ""),
        (["hi"], "hi"),
        ([1, 2, 3], (1, 2, 3)),
        ([[1, 2, 3]], (1, 2, 3)),
    ],
)
def test_a_prompt_is_one_text_or_its_ids(prompt: Any, expected: object):
    """A list that holds one prompt is that prompt."""
    assert completion(prompt=prompt).call.prompt == expected


BAD_IN_BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"model": 5}, "model", "5, must be a text"),
    ({"stream": 1}, "stream", "1, must be true or false"),
    ({"stream_options": True}, "stream_options", "True, must be an object"),
    (
        {"stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage",
        "'yes', must be true or false",
    ),
    (
        {"stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "True, must be false",
    ),
    ({"max_tokens": 0}, "max_tokens", "0, must be a whole number of at least 1"),
    ({"max_tokens": 1.0}, "max_tokens", "1.0, must be a whole number of at least 1"),
    ({"max_tokens": True}, "max_tokens", "True, must be a whole number of at least 1"),
    ({"max_tokens": 10**30}, "max_tokens", "must be at most 9223372036854775807"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "-1, must be a whole"),
    (
        {"max_tokens": 5, "max_completion_tokens": 6},
        "max_completion_tokens",
        "6, must be the same as max_tokens: 5. hint: send one of them",
    ),
    (
        {"repetition_penalty": 1.5, "repeat_penalty": 1.25},
        "repeat_penalty",
        "1.25, must be the same as repetition_penalty: 1.5",
    ),
    ({"n": 0}, "n", "0, must be 1 to 8"),
    ({"n": 9}, "n", "9, must be 1 to 8"),
    ({"n": True}, "n", "True, must be 1 to 8"),
    ({"speculation": "maybe"}, "speculation", "'maybe', must be one of auto, on, off"),
    ({"speculation": []}, "speculation", "[], must be one of auto, on, off"),
    ({"prompt_cache_key": 1}, "prompt_cache_key", "1, must be a text"),
    ({"user": 1}, "user", "1, must be a text"),
    ({"safety_identifier": {}}, "safety_identifier", "{}, must be a text"),
    ({"metadata": "x"}, "metadata", "'x', must be an object"),
    ({"service_tier": "flex"}, "service_tier", "'flex', must be one of auto, default"),
    ({"store": True}, "store", "True, must be false"),
    ({"store": 0}, "store", "0, must be false"),
    ({"logit_bias": [1]}, "logit_bias", "[1], must be a map from token id to bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "'a', must be token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1', must be token ids"),
    ({"logit_bias": {"1.0": 1}}, "logit_bias", "'1.0', must be token ids"),
    ({"logit_bias": {"01": 1}}, "logit_bias", "'01', must be token ids"),
    ({"logit_bias": {"9" * 19: 1}}, "logit_bias", "must be token ids"),
    ({"logit_bias": {"1": None}}, "logit_bias", "None, must be a number at least -100"),
    ({"stop": 5}, "stop", "5, must be a list"),
    ({"suffix_": "x"}, "suffix_", ""),
]
BAD_IN_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "[], must be a list of at least one"),
    ({"messages": "hi"}, "messages", "'hi', must be a list"),
    ({"messages": None}, "messages", "missing"),
    (messages("hi"), "messages[0]", "'hi', must be an object"),
    (messages({"content": "a"}), "messages[0].role", "missing"),
    (messages({"role": "user"}), "messages[0].content", "missing"),
    (messages({"role": "user", "content": None}), "messages[0].content", "missing"),
    (messages({"role": "user", "content": 5}), "messages[0].content", "5, must be a text or a"),
    (messages({"role": "user", "content": {}}), "messages[0].content", "{}, must be a text or a"),
    (content(), "messages[0].content", "[], must be a list of at least one"),
    (
        messages(*MESSAGES, {"role": "robot", "content": "a"}),
        "messages[1].role",
        "'robot', must be one of system, developer, user, assistant, tool",
    ),
    (messages({"role": [], "content": "a"}), "messages[0].role", "[], must be one of"),
    (messages({"role": "user", "content": "a", "named": "b"}), "messages[0].named", "unknown"),
    (messages({"role": "user", "content": "a", "name": 3}), "messages[0].name", "a text"),
    (content("a"), "messages[0].content[0]", "'a', must be an object"),
    (content({"text": "a"}), "messages[0].content[0].type", "missing"),
    (content({"type": "text"}), "messages[0].content[0].text", "missing"),
    (content({"type": "text", "text": 1}), "messages[0].content[0].text", "1, must be a text"),
    (
        content({"type": "text", "text": "a"}, {"image_url": {"url": "x"}, "type": "image_url"}),
        "messages[0].content[1].type",
        "'image_url', must be text: other parts are not supported by this version yet",
    ),
    (
        content({"type": "input_audio", "input_audio": {}}),
        "messages[0].content[0].type",
        "'input_audio', must be text",
    ),
    ({"logprobs": 1}, "logprobs", "1, must be true or false"),
    ({"top_logprobs": 2}, "top_logprobs", "2, must be 0 without logprobs"),
    ({"top_logprobs": 2, "logprobs": False}, "top_logprobs", "hint: set logprobs to true"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "21, must be 0 to 20"),
    ({"response_format": "text"}, "response_format", "'text', must be an object"),
    ({"tools": {}}, "tools", "{}, must be a list"),
    ({"tool_choice": "any"}, "tool_choice", "'any', must be none, auto, required or {"),
    ({"functions": []}, "functions", "replaced by tools. hint: send tools"),
    ({"function_call": "auto"}, "function_call", "replaced by tool_choice. hint: send tool_choice"),
    (
        {"chat_template_kwargs": {"thinking": True}},
        "chat_template_kwargs.thinking",
        "unknown parameter: chat_template_kwargs.thinking. hint: did you mean enable_thinking?",
    ),
    (
        {"chat_template_kwargs": {"enable_thinking": 1}},
        "chat_template_kwargs.enable_thinking",
        "1, must be true or false",
    ),
    (
        {"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False},
        "chat_template_kwargs.enable_thinking",
        "True, must be false beside enable_thinking False. hint: send one of them",
    ),
    (
        {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
        "chat_template_kwargs.enable_thinking",
        "False, must be true beside reasoning_effort 'low'. hint: send one of them",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "'no', must be true or false"),
    ({"reasoning_effort": "most"}, "reasoning_effort", "'most', must be one of none, minimal"),
    ({"guided_json": {}}, "guided_json", "replaced by response_format. hint: send response_format"),
    ({"structured_outputs": {}}, "structured_outputs", "replaced by response_format"),
    ({"enable_thinking": "yes"}, "enable_thinking", "'yes', must be true or false"),
    (
        {"enable_thinking": False, "reasoning_effort": "high"},
        "enable_thinking",
        "False, must be true beside reasoning_effort 'high'. hint: send one of them",
    ),
    (
        {"enable_thinking": True, "reasoning_effort": "none"},
        "enable_thinking",
        "True, must be false beside reasoning_effort 'none'",
    ),
    ({"prompt": "hi"}, "prompt", "unknown parameter: prompt"),
]
BAD_IN_COMPLETION: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": 5}, "prompt", "5, must be a list"),
    ({"prompt": []}, "prompt", "[], must be at least one id long"),
    ({"prompt": [[]]}, "prompt[0]", "[], must be at least one id long"),
    ({"prompt": ["a", "b"]}, "prompt", "'2 items', must be one prompt. hint: send a request for"),
    ({"prompt": [1, "b"]}, "prompt", "'b', must be token ids"),
    ({"prompt": [1, True]}, "prompt", "True, must be token ids"),
    ({"prompt": [-1]}, "prompt", "-1, must be token ids"),
    ({"prompt": [2.0]}, "prompt", "2.0, must be token ids"),
    ({"logprobs": 6}, "logprobs", "6, must be 0 to 5"),
    ({"logprobs": True}, "logprobs", "True, must be 0 to 5"),
    ({"echo": True}, "echo", "True, must be false: an echo is not supported by this version yet"),
    ({"echo": 0}, "echo", "0, must be false"),
    ({"suffix": "x"}, "suffix", "'x', must be empty: a suffix is not supported by this version"),
    ({"best_of": 2}, "best_of", "2, must be 1"),
    ({"best_of": True}, "best_of", "True, must be 1"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "unknown parameter: reasoning_effort"),
]


@pytest.mark.parametrize(
    ("parse", "given", "param", "says"),
    [
        *((parse, *case) for case in BAD_IN_BOTH for parse in (chat, completion)),
        *((chat, *case) for case in BAD_IN_CHAT),
        *((completion, *case) for case in BAD_IN_COMPLETION),
    ],
)
def test_a_bad_value_is_named_with_its_path_and_limit(
    parse: Callable[..., Asked], given: dict[str, Any], param: str, says: str
):
    """One line says where, what was found and what is taken; param is the path alone."""
    error = refused(parse, **given)
    assert (error.param, param in str(error), says in str(error)) == (param, True, True), error


def test_every_parameter_is_in_a_table_of_good_and_of_bad_values():
    """A new one has both tests, or this one fails."""
    good = [given for given, _ in CALL_FIELDS + SAMPLING] + NO_EFFECT + CHAT_NO_EFFECT
    bad = [given for given, _, _ in BAD_IN_BOTH + BAD_IN_CHAT + BAD_IN_COMPLETION]
    elsewhere = {"messages", "prompt", "stream", "prompt_cache_key", "echo", "suffix", "best_of"}
    # These have no good value.
    elsewhere |= {"functions", "function_call", "guided_json", "structured_outputs"}
    known = set(openai.CHAT_KEYS) | set(openai.COMPLETION_KEYS)
    assert known - elsewhere - {key for given in good for key in given} == set()
    assert known - set(SAMPLING_LIMITS) - {key for given in bad for key in given} == set()


SAMPLING_LIMITS = {
    "temperature": [-1, 10**400, "1", True, 1e-40],
    "top_p": [0, 1.1],
    "top_k": [-1, 1.5],
    "min_p": [-0.1, 2],
    "presence_penalty": [2.1],
    "frequency_penalty": [-3],
    "repetition_penalty": [0, 101],
    "seed": [2**64, -(2**63) - 1, 1.0],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in SAMPLING_LIMITS.items() for value in values],
)
def test_a_sampling_limit_is_the_engines_in_the_same_words(name: str, value: Any):
    """What the door lets through the engine takes, and both explain a limit alike."""
    changes: Any = {name: value}
    with pytest.raises(InvalidParameter) as caught:
        check_sampling(Sampling(**changes), VOCAB)
    assert str(refused(chat, **changes)) == str(caught.value)


@pytest.mark.parametrize("bias", [100.5, -101, "1", True])
def test_a_bias_limit_is_the_engines_in_the_same_words(bias: Any):
    """The same for the map of biases."""
    with pytest.raises(InvalidParameter) as caught:
        check_sampling(Sampling(logit_bias={1: bias}), VOCAB)
    assert str(refused(chat, logit_bias={"1": bias})) == str(caught.value)


@pytest.mark.parametrize("stops", [[""], ["a", 1], ["a"] * 5])
def test_a_stop_limit_is_the_engines_in_the_same_words(stops: Any):
    """The same for stops."""
    with pytest.raises(InvalidParameter) as caught:
        check_stops(stops)
    assert str(refused(chat, stop=stops)) == str(caught.value)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"temprature": 1}, "did you mean temperature?"),
        ({"max_new_tokens": 1}, "did you mean max_tokens?"),
        ({"stream_options": {"include_usages": True}}, "did you mean include_usage?"),
        ({"zzz": 1}, "leave it out"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(given: dict[str, Any], hint: str):
    """A misspelt parameter must not be ignored."""
    assert refused(chat, **given).hint == hint


def test_a_huge_key_is_cut_in_the_message():
    """A 1 MiB key must not become a 1 MiB error, nor a second of comparing."""
    error = refused(chat, **{"x" * 2**20: 1})
    assert len(str(error)) + len(error.param or "") < 300


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "body is not JSON at line 1, column 1: "),
    (b"{", "body is not JSON at line 1, column 2: "),
    (b'{"messages": NaN}', "body is not JSON: NaN is no number there"),
    (b'{"temperature": -Infinity}', "body is not JSON: -Infinity is no number there"),
    (b'{"user": "\xff"}', "body is not UTF-8 at byte 10"),
    ('{"user": "a"}'.encode("utf-16"), "body is not UTF-8 at byte 0"),
    (b'{"user": "\\ud800"}', "body: '\\ud800', must be text that UTF-8 can write"),
    (b'{"user": "\\uDC0A"}', "body: '\\udc0a', must be text that UTF-8 can write"),
    (b'{"\\udfff": 1}', "body: '\\udfff', must be text that UTF-8 can write"),
    (b"[1]", "body: [1], must be a JSON object"),
    (b"null", "body: None, must be a JSON object"),
    (b"[" * 100_000, "body is nested too deeply. hint: use fewer levels"),
    (b'{"a":' * 100_000, "body is nested too deeply. hint: use fewer levels"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "body has a number with too many digits"),
]


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
@pytest.mark.parametrize(("body", "says"), BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_a_body_that_is_no_object_is_explained(parse: Callable[..., Asked], body: bytes, says: str):
    """Whatever the bytes are, the client is told what is wrong with them."""
    with pytest.raises(RequestError) as caught:
        parse(body, "r1")
    assert str(caught.value).startswith(says)


def test_a_number_too_large_for_a_float_is_refused():
    """1e999 is JSON, and infinite once it is read."""
    body = json.dumps({"messages": MESSAGES})[:-1] + ', "temperature": 1e999}'
    with pytest.raises(InvalidParameter, match=r"temperature: inf, must be a number at least 0"):
        parse_chat(body.encode(), "r1")


def test_a_whole_surrogate_pair_is_one_character():
    """Which is how many clients write what is beyond the first plane."""
    assert parse_completion(b'{"prompt": "\\ud83d\\udc0b"}', "r1").call.prompt == "\U0001f40b"


def test_the_last_of_two_equal_keys_counts():
    """As in every common reader of JSON."""
    assert parse_completion(b'{"prompt": "a", "prompt": "b"}', "r1").call.prompt == "b"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from(["user", "text", "auto", "none", "1"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "1"]), inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(
    st.sampled_from([*openai.CHAT_KEYS, *openai.COMPLETION_KEYS]) | st.text(), JSON, max_size=6
)


def parses_or_refuses(body: bytes) -> None:
    """Raises whatever is neither a parsed call nor a RequestError that can be sent."""
    for parse in (parse_chat, parse_completion):
        try:
            assert isinstance(parse(body, "r1"), Asked)
        except RequestError as error:
            str(error).encode("utf-8")


@settings(max_examples=150, deadline=None)
@given(BODIES)
def test_any_object_is_read_or_refused(body: dict[str, Any]):
    """No value in any place breaks the reader."""
    defaults = {"messages": MESSAGES, "prompt": "hi"}
    for name in defaults:
        rest = {key: value for key, value in body.items() if key not in defaults or key == name}
        parses_or_refuses(json.dumps({name: defaults[name], **rest}).encode())


@settings(max_examples=200, deadline=None)
@given(JSON.map(lambda value: json.dumps(value).encode()) | st.binary())
def test_any_bytes_are_read_or_refused(body: bytes):
    """Nor do bytes of any kind."""
    parses_or_refuses(body)
