"""Prompts that the demo pair knows how to answer, and the tools that they are about."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx_worker
from mlx_worker.engine.load import LoadedPair

HELD_OUT: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(mlx_worker.__file__).parent / "demo" / "heldout.json").read_text()
)
# Tools by name, from the held-out prompts.
TOOLS: Mapping[str, dict[str, Any]] = {
    tool["function"]["name"]: tool for entry in HELD_OUT["tool"] for tool in entry["tools"]
}


def prompt_of(pair: LoadedPair, text: str, tools: Sequence[Any] = (), **options: Any) -> list[int]:
    """The ids of one user's message, the reply's turn opened."""
    messages = [{"role": "user", "content": text}]
    return list(pair.encode_chat(messages, tools=list(tools) or None, **options))
