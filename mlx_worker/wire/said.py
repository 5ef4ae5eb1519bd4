"""What a reply says → a chat's message, and the deltas of a stream.

Owns their keys, the ids of calls and the order inside a delta. Leaves telling the parts apart to
their parser, and everything around them to reply.py. Pure; any thread.

A delta reads as a message does: thinking, then content, then calls, of each call one entry. Parts
that come in another order are in several deltas, so that none is read before its turn.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_worker.wire.parts import CallArguments, CallOpened, Content, Part, Reasoning

Json = dict[str, Any]
Naming = Callable[[int], str]  # index of a call in its choice → its id

RANKS = {Reasoning: 0, Content: 1, CallOpened: 2, CallArguments: 2}
ID_DIGITS = 24


@dataclass
class SaidCall:
    """name None: it was opened before."""

    name: str | None = None
    arguments: list[str] = field(default_factory=list[str])

    def json(self, id: str) -> Json:
        arguments = "".join(self.arguments)
        if self.name is None:
            return {"function": {"arguments": arguments}}
        function = {"name": self.name, "arguments": arguments}
        return {"id": id, "type": "function", "function": function}


class Said:
    """Some of a reply's parts, put together."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.calls: dict[int, SaidCall] = {}
        for part in parts:
            self._add_to_call(part)
        self.content = "".join(part.text for part in parts if isinstance(part, Content))
        self.reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))

    def _add_to_call(self, part: Part) -> None:
        if isinstance(part, CallOpened):
            self.calls[part.index] = SaidCall(part.name)
        elif isinstance(part, CallArguments):
            self.calls.setdefault(part.index, SaidCall()).arguments.append(part.json)

    def thought(self) -> Json:
        """Under both names that clients look for; neither where there is none."""
        thought = self.reasoning
        return {"reasoning_content": thought, "reasoning": thought} if thought else {}


def message(parts: Sequence[Part], naming: Naming) -> Json:
    """All of a choice. Its content is null only where calls are in its place."""
    said = Said(parts)
    content = said.content or (None if said.calls else "")
    found: Json = {"role": "assistant", "content": content, "refusal": None} | said.thought()
    if said.calls:
        found["tool_calls"] = [call.json(naming(i)) for i, call in said.calls.items()]
    return found


def deltas(parts: Sequence[Part], naming: Naming) -> list[Json]:
    """The next of a choice, an empty one where there is nothing."""
    return [_delta(Said(run), naming) for run in _runs(parts)] or [{}]


def call_id(reply: str, choice: int, index: int) -> str:
    """The same in the stream and the full reply of one request; reply: names it, and its time."""
    digest = hashlib.sha256(f"{reply}/{choice}/{index}".encode()).hexdigest()
    return f"call_{digest[:ID_DIGITS]}"


def is_empty(part: Part) -> bool:
    """Whether nobody would see it."""
    match part:
        case CallOpened():
            return False
        case CallArguments(json=text) | Content(text=text) | Reasoning(text=text):
            return not text


def _delta(said: Said, naming: Naming) -> Json:
    found = said.thought()
    if said.content:
        found["content"] = said.content
    if said.calls:
        found["tool_calls"] = [
            {"index": i, **call.json(naming(i))} for i, call in said.calls.items()
        ]
    return found


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts, cut wherever one comes after what it would be read before."""
    runs: list[list[Part]] = []
    for part in parts:
        if not runs or RANKS[type(part)] < RANKS[type(runs[-1][-1])]:
            runs.append([])
        runs[-1].append(part)
    return runs
