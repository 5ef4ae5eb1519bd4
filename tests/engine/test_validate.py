"""Every parameter has its limits, in one place, and an error names the value and the limit."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlx_worker.engine.validate import validate
from mlx_worker.errors import InvalidParameter
from mlx_worker.records import GenerationRequest, Sampling

VOCAB = 100
REQUEST = GenerationRequest(prompt_ids=(1, 2, 3), max_tokens=5)


def changed(name: str, value: object) -> GenerationRequest:
    """A good request but for one value, of itself or of its sampling."""
    changes: Any = {name: value}
    if hasattr(REQUEST, name):
        return replace(REQUEST, **changes)
    return replace(REQUEST, sampling=replace(REQUEST.sampling, **changes))


def test_a_plain_request_passes():
    """The defaults are within the limits."""
    validate(REQUEST, VOCAB)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 1e-6),
        ("temperature", 1e30),
        ("temperature", np.float32(0.7)),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("min_p", 0),
        ("min_p", 1.0),
        ("top_k", 0),
        ("top_k", 10**12),
        ("top_k", np.int64(5)),
        ("repetition_penalty", 0.01),
        ("presence_penalty", -2),
        ("frequency_penalty", 2.0),
        ("logit_bias", {0: -100, 99: 100.0}),
        ("suppress_ids", tuple(range(VOCAB))),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
        ("logprobs", 0),
        ("logprobs", 20),
        ("max_tokens", 1),
        ("depth", 0),
        ("depth", 8),
        ("prompt_ids", (0, 99)),
        ("stop", ("a", "b", "c", "d")),
        ("speculation", "auto"),
        ("speculation", "off"),
        ("acceptance", "standard"),
        ("choice", 7),
    ],
)
def test_a_value_at_its_limit_passes(name: str, value: object):
    """The limits themselves are allowed; numpy's numbers are numbers."""
    validate(changed(name, value), VOCAB)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("temperature", -1, "a number at least 0"),
        ("temperature", math.nan, "a number at least 0"),
        ("temperature", math.inf, "a number at least 0"),
        ("temperature", 10**400, "a number at least 0"),
        ("temperature", "1", "a number at least 0"),
        ("temperature", True, "a number at least 0"),
        ("temperature", None, "a number at least 0"),
        ("temperature", 1e-40, "0 for greedy, or at least 1e-06"),
        ("top_p", 0, "a number above 0, at most 1"),
        ("top_p", 2, "a number above 0, at most 1"),
        ("top_p", math.nan, "a number above 0, at most 1"),
        ("min_p", -0.1, "a number at least 0, at most 1"),
        ("min_p", 2, "a number at least 0, at most 1"),
        ("top_k", -1, "a whole number of at least 0"),
        ("top_k", 1.5, "a whole number of at least 0"),
        ("top_k", math.nan, "a whole number of at least 0"),
        ("repetition_penalty", 0, "a number at least 0.01, at most 100"),
        ("repetition_penalty", math.inf, "a number at least 0.01, at most 100"),
        ("presence_penalty", 2.5, "a number at least -2, at most 2"),
        ("frequency_penalty", -3, "a number at least -2, at most 2"),
        ("seed", 2**64, "-9223372036854775808 to 18446744073709551615"),
        ("seed", 1.0, "-9223372036854775808 to 18446744073709551615"),
        ("logprobs", 100, "0 to 20"),
        ("logprobs", -1, "0 to 20"),
        ("logprobs", True, "0 to 20"),
        ("max_tokens", 0, "a whole number of at least 1"),
        ("max_tokens", 2.0, "a whole number of at least 1"),
        ("choice", -1, "a whole number of at least 0"),
        ("depth", 9, "0 to 8"),
        ("depth", -1, "0 to 8"),
        ("depth", "2", "0 to 8"),
        ("speculation", "maybe", "one of auto, on, off"),
        ("speculation", None, "one of auto, on, off"),
        ("acceptance", "x", "one of coupled, standard"),
    ],
)
def test_a_value_beyond_its_limit_is_refused_with_both(name: str, value: object, limit: str):
    """And with the parameter's name, for the client's `param`."""
    with pytest.raises(InvalidParameter) as raised:
        validate(changed(name, value), VOCAB)
    assert (raised.value.param, raised.value.value, raised.value.limit) == (name, value, limit)
    assert str(raised.value).startswith(f"{name}: ")
    assert str(raised.value).endswith(f", must be {limit}")


@pytest.mark.parametrize(
    ("name", "param", "value", "odd"),
    [
        ("prompt_ids", "prompt", (1, 100), 100),
        ("prompt_ids", "prompt", (-1,), -1),
        ("prompt_ids", "prompt", (1, "2"), "2"),
        ("prompt_ids", "prompt", (True,), True),
        ("prompt_ids", "prompt", (1.0,), 1.0),
        ("suppress_ids", "suppress_tokens", (100,), 100),
        ("logit_bias", "logit_bias", {100: 1.0}, 100),
        ("logit_bias", "logit_bias", {"5": 1.0}, "5"),
    ],
)
def test_an_id_outside_the_vocabulary_is_named(name: str, param: str, value: object, odd: object):
    """Under the name that clients use."""
    with pytest.raises(InvalidParameter) as raised:
        validate(changed(name, value), VOCAB)
    assert (raised.value.param, raised.value.value) == (param, odd)
    assert raised.value.limit == "token ids, 0 to 99"


@pytest.mark.parametrize("bias", [100.5, -101, math.nan, math.inf, -math.inf, "1", None])
def test_a_bias_beyond_its_limit_is_refused(bias: object):
    """To forbid an id, suppress it."""
    with pytest.raises(InvalidParameter, match=r"logit_bias: .*, must be a number at least -100"):
        validate(changed("logit_bias", {3: bias}), VOCAB)


def test_a_bias_that_is_no_map_is_refused():
    """A list of pairs, for instance."""
    with pytest.raises(InvalidParameter, match=r"logit_bias: .*, must be a map from token id"):
        validate(changed("logit_bias", [(3, 1.0)]), VOCAB)


def test_an_empty_prompt_is_refused():
    """There is nothing to go on from."""
    with pytest.raises(InvalidParameter, match=r"prompt: \[\], must be at least one id long"):
        validate(changed("prompt_ids", ()), VOCAB)


@pytest.mark.parametrize("stop", [("a", ""), ("a", 5), (None,), "text"])
def test_stops_are_texts_with_something_in_them(stop: object):
    """An empty one used to be dropped without a word."""
    with pytest.raises(InvalidParameter, match=r"stop: .*, must be a list of texts, none of them"):
        validate(changed("stop", stop), VOCAB)


def test_at_most_four_stops_are_taken():
    """As OpenAI's interface does."""
    with pytest.raises(InvalidParameter, match="stop: '5 texts', must be at most 4"):
        validate(changed("stop", tuple("abcde")), VOCAB)


def test_the_sampling_of_a_request_may_be_any_of_ours():
    """Every field set at once."""
    sampling = Sampling((1,), {2: 3.0}, 1.1, 0.5, -0.5, 0.7, 40, 0.9, 0.05, 7, 5)
    validate(replace(REQUEST, sampling=sampling), VOCAB)
