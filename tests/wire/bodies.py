"""Bodies of requests, and what reading them gives."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from mlx_worker.errors import RequestError
from mlx_worker.wire.openai import Asked, parse_chat, parse_completion

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**values: Any) -> Asked:
    return parse_chat(json.dumps({"messages": MESSAGES, **values}).encode(), "r1")


def completion(**values: Any) -> Asked:
    return parse_completion(json.dumps({"prompt": "hi", **values}).encode(), "r1")


def refused(parse: Callable[..., Asked], **values: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**values)
    return caught.value


def messages(*given: Any) -> Any:
    return {"messages": list(given)}


def content(*parts: Any) -> Any:
    return messages({"role": "user", "content": list(parts)})


def nested(levels: int) -> dict[str, Any]:
    """Objects in objects, `levels` of them."""
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value
