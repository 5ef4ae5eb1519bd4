"""Replies of the families whose calls mlx-lm reads → parts.

Owns where a call begins and ends, and what becomes of one that nobody can read: it is content. The
call itself is read by the protocol's read_call, once it is complete. Pure; any thread.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

from mlx_worker.records import TextProtocol, Tools
from mlx_worker.wire.channels import ChannelReader
from mlx_worker.wire.markers import Item


class MarkedReader(ChannelReader):
    """A ReplyParser for text in which markers of any spelling enclose thinking and calls."""

    def __init__(self, protocol: TextProtocol, tools: Tools | None) -> None:
        super().__init__(protocol, tools if protocol.read_call else None)
        self._read_one = protocol.read_call
        self._offered = list(tools.offered) if tools else []
        self._inner: list[Item] = []  # of the call that is being written

    def _read_marker(self, marker: str) -> None:
        """Inside a call, other markers are part of how the family writes it."""
        if self._mode == "call" and marker not in self._call:
            self._inner.append((True, marker))
        else:
            super()._read_marker(marker)

    def _read_call(self, text: str, at: int) -> int:
        self._inner.append((False, text[at:]))
        return len(text)

    def _leave(self) -> None:
        inner, self._inner = self._inner, []
        if not inner:
            return
        assert self._read_one is not None
        try:
            found = self._read_one("".join(text for _, text in inner), self._offered)
            calls = [name_and_arguments(call) for call in listed(found)]
        except Exception:  # whatever a parser makes of text that is no call of its family
            calls = []
        for name, arguments in calls:
            self._told.open_call(name)
            self._told.argue(arguments)
        if not calls:
            self._told.say("".join(text for is_marker, text in inner if not is_marker))


def listed(found: Any) -> list[Any]:
    return cast(list[Any], found) if isinstance(found, list) else [found]


def name_and_arguments(call: Mapping[str, Any]) -> tuple[str, str]:
    """The arguments as JSON text. Raises anything where it is no call."""
    name, arguments = call["name"], call.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError(f"a call's name is a text, not {name!r}")
    if isinstance(arguments, str):
        return name, whole_object(arguments)
    return name, whole_object(json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False))


def whole_object(text: str) -> str:
    """The text, if it is a JSON object."""
    if not isinstance(json.loads(text), dict):
        raise ValueError("a call's arguments are an object")
    return text
