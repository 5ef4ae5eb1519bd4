"""tools, tool_choice and parallel_tool_calls → the tools of a call.

Owns how many there may be, how long, and that a choice names one of them. Leaves which schemas
can be enforced to the engine. Pure; any thread.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_worker.errors import InvalidParameter, shown
from mlx_worker.records import Tools
from mlx_worker.wire.document import document, written
from mlx_worker.wire.fields import (
    check_type,
    flag,
    items,
    listed,
    name,
    only,
    record,
    text,
    word,
)

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1024 * 1024
ONLY_FUNCTIONS = "nothing else is supported by this version yet"
CHOICES = 'none, auto, required or {"type": "function", "function": {"name": …}}'


def tools(path: str, value: Any) -> tuple[dict[str, Any], ...]:
    """As the client wrote them, less what is null. An empty list is none."""
    given = items(path, value)
    if len(given) > MAX_TOOLS:
        raise InvalidParameter(path, f"{len(given)} tools", f"at most {MAX_TOOLS}")
    offered = tuple(_tool(f"{path}[{i}]", tool) for i, tool in enumerate(given))
    _check_names(path, [_name(tool) for tool in offered])
    written(path, offered, MAX_TOOLS_BYTES)
    return offered


def tool_choice(path: str, value: Any) -> str | dict[str, Any]:
    """A word, or the function that is to be called."""
    if isinstance(value, dict):
        check_type(path, value, "function", ONLY_FUNCTIONS)
        return NAMED(path, value)
    if value not in ("none", "auto", "required"):
        raise InvalidParameter(path, value, CHOICES)
    return value


def chosen_tools(given: Mapping[str, Any]) -> Tools | None:
    """What the three parameters say together; None: nothing may be called."""
    offered = given.get("tools", ())
    choice = given.get("tool_choice", "auto")
    single = None if isinstance(choice, str) else _name(choice)
    if must_call(given):
        _check_offered(offered, choice, single)
    if not offered or choice == "none":
        return None
    return Tools(offered, must_call(given), single, given.get("parallel_tool_calls", True))


def must_call(given: Mapping[str, Any]) -> bool:
    """Whether the reply has to be a call, of any tool or of one."""
    return given.get("tool_choice", "auto") not in ("none", "auto")


def _check_offered(offered: Sequence[Any], choice: Any, single: str | None) -> None:
    if not offered:
        limit = "none or auto without tools"
        raise InvalidParameter("tool_choice", choice, limit, "send tools")
    names = [_name(tool) for tool in offered]
    if single is not None and single not in names:
        where = "tool_choice.function.name"
        raise InvalidParameter(where, single, f"one of the tools: {listed(names)}")


def _check_names(path: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for i, one in enumerate(names):
        if one in seen:
            where = f"{path}[{i}].function.name"
            raise InvalidParameter(where, one, "a name that no other tool has")
        seen.add(one)


def _name(tool: Mapping[str, Any]) -> str:
    return tool["function"]["name"]


def _tool(path: str, value: Any) -> dict[str, Any]:
    check_type(path, value, "function", ONLY_FUNCTIONS)
    return TOOL(path, value)


def _parameters(path: str, value: Any) -> dict[str, Any]:
    """A schema of the object that a call's arguments are; that it is one need not be said."""
    schema = document(path, value)
    if not schema:
        return {"type": "object", "properties": {}}
    properties = schema.get("properties")
    if properties is None:
        schema = {key: item for key, item in schema.items() if key != "properties"}
    elif not isinstance(properties, dict):  # chat templates look through them
        raise InvalidParameter(f"{path}.properties", properties, "an object")
    if schema.get("type") is None:
        return {"type": "object", **{key: item for key, item in schema.items() if key != "type"}}
    only("object", shown("object"))(f"{path}.type", schema["type"])
    return schema


FUNCTION = record(
    {"name": name, "description": text, "parameters": _parameters, "strict": flag},
    required=["name"],
)
TOOL = record({"type": word("function"), "function": FUNCTION}, required=["type", "function"])
NAMED = record(
    {"type": word("function"), "function": record({"name": name}, required=["name"])},
    required=["type", "function"],
)
