"""A reader of Gemma's tool calls for tests: strict, and of its own making."""

import json
import re
from typing import Any

QUOTE = '<|"|>'
SCALAR = re.compile(r"[^,\]}]+")
KEY = re.compile(r"[^:{}\[\],]+:")


def read_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of each call in a text that is nothing else. ValueError: it is not."""
    found: list[tuple[str, dict[str, Any]]] = []
    while text:
        head = re.match(r"<\|tool_call>call:([^{]+)", text)
        if not head:
            raise ValueError(f"no call: {text[:60]!r}")
        arguments, rest = _value(text[head.end() :])
        if not isinstance(arguments, dict):
            raise ValueError("arguments are an object")
        text = _after(rest, "<tool_call|>")
        found.append((head[1], arguments))
    return found


def _after(text: str, sign: str) -> str:
    if not text.startswith(sign):
        raise ValueError(f"{sign!r} expected: {text[:60]!r}")
    return text[len(sign) :]


def _value(text: str) -> tuple[Any, str]:
    if text.startswith(QUOTE):
        content, sign, rest = text[len(QUOTE) :].partition(QUOTE)
        if not sign:
            raise ValueError("no end of a text")
        return content, rest
    if text.startswith("{"):
        return _object(text[1:])
    if text.startswith("["):
        return _list(text[1:])
    scalar = SCALAR.match(text)
    if not scalar:
        raise ValueError(f"no value: {text[:60]!r}")
    return json.loads(scalar[0]), text[scalar.end() :]


def _object(text: str) -> tuple[dict[str, Any], str]:
    found: dict[str, Any] = {}
    while not text.startswith("}"):
        text = _after(text, ",") if found else text
        key = KEY.match(text)
        if not key:
            raise ValueError(f"no key: {text[:60]!r}")
        found[key[0][:-1]], text = _value(text[key.end() :])
    return found, text[1:]


def _list(text: str) -> tuple[list[Any], str]:
    found: list[Any] = []
    while not text.startswith("]"):
        text = _after(text, ",") if found else text
        item, text = _value(text)
        found.append(item)
    return found, text[1:]
