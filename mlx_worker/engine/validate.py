"""Whether a request's values are ones that can be served, before any work is done for it.

Owns the limits of every parameter, once for all doors, and how each is named in a message. Leaves
what depends on the loaded model's context to session.py. Pure arithmetic; any thread.
"""

import math
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any, TypeGuard, get_args

from mlx_worker.errors import InvalidParameter
from mlx_worker.records import MAX_DEPTH, Acceptance, GenerationRequest, Sampling, Speculation

LEAST_TEMPERATURE = 1e-6  # dividing by much less overflows float32
REPETITION = (0.01, 100.0)
MAX_LOGPROBS = 20
MAX_STOPS = 4
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
SEEDS = (-(1 << 63), (1 << 64) - 1)  # signed and unsigned 64-bit integers


def validate(request: GenerationRequest, vocab_size: int) -> None:
    """Raises InvalidParameter, naming the value and its limit, for the first that is out of it."""
    check_ids("prompt", request.prompt_ids, vocab_size)
    if not request.prompt_ids:
        raise InvalidParameter("prompt", [], "at least one id long")
    check_whole("max_tokens", request.max_tokens, 1)
    check_whole("choice", request.choice, 0)
    if request.depth is not None:
        check_whole("depth", request.depth, 0, MAX_DEPTH)
    check_word("speculation", request.speculation, get_args(Speculation))
    check_word("acceptance", request.acceptance, get_args(Acceptance))
    check_stops(request.stop)
    check_sampling(request.sampling, vocab_size)


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raises InvalidParameter for the first value that is no sampling parameter."""
    _check_number("temperature", sampling.temperature, 0.0)
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        limit = f"0 for greedy, or at least {LEAST_TEMPERATURE:g}"
        raise InvalidParameter("temperature", sampling.temperature, limit)
    _check_number("top_p", sampling.top_p, 0.0, 1.0, is_open=True)
    _check_number("min_p", sampling.min_p, 0.0, 1.0)
    check_whole("top_k", sampling.top_k, 0)
    _check_number("repetition_penalty", sampling.repetition_penalty, *REPETITION)
    _check_number("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_number("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    check_ids("suppress_tokens", sampling.suppress_ids, vocab_size)
    if not isinstance(sampling.logit_bias, Mapping):
        raise InvalidParameter("logit_bias", sampling.logit_bias, "a map from token id to bias")
    check_ids("logit_bias", sampling.logit_bias, vocab_size)
    for bias in sampling.logit_bias.values():
        _check_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    if sampling.seed is not None:
        check_whole("seed", sampling.seed, *SEEDS)
    if sampling.logprobs is not None:
        check_whole("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)


def check_stops(stops: Collection[str]) -> None:
    is_odd = any(not isinstance(stop, str) or not stop for stop in stops)
    if is_odd or isinstance(stops, str):
        raise InvalidParameter("stop", stops, "a list of texts, none of them empty")
    if len(stops) > MAX_STOPS:
        raise InvalidParameter("stop", f"{len(stops)} texts", f"at most {MAX_STOPS}")


def check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Raises InvalidParameter for the first that is no id of this vocabulary."""
    for id in ids:
        if not is_whole(id) or not 0 <= id < vocab_size:
            raise InvalidParameter(name, id, f"token ids, 0 to {vocab_size - 1}")


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    limit = f"a whole number of at least {least}" if most is None else f"{least} to {most}"
    if not is_whole(value) or value < least or (most is not None and value > most):
        raise InvalidParameter(name, value, limit)


def check_word(name: str, value: object, words: Collection[str]) -> None:
    if value not in words:
        raise InvalidParameter(name, value, f"one of {', '.join(words)}")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an integer; True and False are not."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _check_number(
    name: str, value: Any, least: float, most: float = math.inf, *, is_open: bool = False
) -> None:
    """Raises InvalidParameter unless least ≤ value ≤ most, finite; least excluded if is_open."""
    bound = f"above {least:g}" if is_open else f"at least {least:g}"
    limit = f"a number {bound}" + (f", at most {most:g}" if math.isfinite(most) else "")
    number = _as_float(value)
    if not least <= number <= most or not math.isfinite(number) or (is_open and number == least):
        raise InvalidParameter(name, value, limit)


def _as_float(value: Any) -> float:
    """NaN for what is no number; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
