"""The messages of a chat → as the model's template expects them.

Owns which role may say what, and that a tool's message answers a call that was made. Leaves how a
template writes them, and what they come to in tokens, to the engine. Pure; any thread.

Accepted without effect: a message's name; an assistant's refusal, annotations and audio where they
hold nothing; and what OpenAI's own clients add to a reply they hand back: parsed,
parsed_arguments, a call's index.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_worker.errors import InvalidParameter
from mlx_worker.wire.body import read_inner_json
from mlx_worker.wire.document import document
from mlx_worker.wire.fields import (
    Reader,
    agreed,
    anything,
    check_type,
    each,
    free_object,
    items,
    listed,
    missing,
    name,
    only,
    record,
    replaced,
    text,
    whole,
    word,
)

NOT_YET = "not supported by this version yet"
NO_CALLS = "empty: only an assistant calls tools"

Message = dict[str, Any]


def messages(path: str, value: Any) -> tuple[Message, ...]:
    found = each(_message)(path, value)
    called: dict[str, str] = {}  # id → name; of calls that share an id the last one counts
    for i, message in enumerate(found):
        called |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool":
            message["name"] = _answering(f"{path}[{i}]", message, called)
    return found


def _answering(path: str, answer: Message, called: dict[str, str]) -> str:
    """The name of the tool that answers."""
    id = answer["tool_call_id"]
    if id not in called:
        known = listed(reversed(called)) or "there is none"
        raise InvalidParameter(f"{path}.tool_call_id", id, f"the id of a call before it: {known}")
    said = answer.get("name", called[id])
    if said != called[id]:
        raise InvalidParameter(f"{path}.name", said, f"{called[id]}, which it answers")
    return called[id]


def _message(path: str, value: Any) -> Message:
    role = free_object(path, value).get("role")
    if role is None:
        raise missing(path, "role")
    hint = "send role tool" if role == "function" else None
    if role not in tuple(ROLES):
        raise InvalidParameter(f"{path}.role", role, f"one of {', '.join(ROLES)}", hint)
    return ROLES[role](path, value)


def _system(path: str, value: Any) -> Message:
    return {"role": "system", "content": SPOKEN(path, value)["content"]}


def _user(path: str, value: Any) -> Message:
    return {"role": "user", "content": SPOKEN(path, value)["content"]}


def _assistant(path: str, value: Any) -> Message:
    """Its text may be missing beside calls or thinking; the template gets an empty one."""
    given = ASSISTANT(path, value)
    calls = given.get("tool_calls", ())
    thought = agreed(given, "reasoning_content", "reasoning", path)
    if "content" not in given and not calls and not thought:
        raise missing(path, "content")
    message: Message = {"role": "assistant", "content": given.get("content", "")}
    if thought:  # templates know one name or the other
        message |= {"reasoning_content": thought, "reasoning": thought}
    return message | {"tool_calls": list(calls)} if calls else message


def _tool(path: str, value: Any) -> Message:
    """Its name is the call's, once that is known."""
    given = TOOL(path, value)
    return {key: given[key] for key in ("role", "tool_call_id", "name", "content") if key in given}


def _content(path: str, value: Any) -> str:
    """One text. Text parts are joined as they are, with nothing between them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidParameter(path, value, "a text or a list of text parts")
    return "".join(each(_part)(path, value))


def _part(path: str, value: Any) -> str:
    check_type(path, value, "text", f"other parts are {NOT_YET}", "send text parts only")
    return PART(path, value)["text"]


def _calls(path: str, value: Any) -> Sequence[Message]:
    calls = [_call(f"{path}[{i}]", call) for i, call in enumerate(items(path, value))]
    seen: set[str] = set()
    for i, call in enumerate(calls):
        if call["id"] in seen:
            raise InvalidParameter(f"{path}[{i}].id", call["id"], "an id that no other call has")
        seen.add(call["id"])
    return calls


def _call(path: str, value: Any) -> Message:
    check_type(path, value, "function", f"calls of other tools are {NOT_YET}")
    given = CALL(path, value)
    function = {key: given["function"][key] for key in ("name", "arguments")}
    return {"id": given["id"], "type": given["type"], "function": function}


def _id(path: str, value: Any) -> str:
    if not text(path, value):
        raise InvalidParameter(path, value, "a text that is not empty")
    return value


def _arguments(path: str, value: Any) -> dict[str, Any]:
    """JSON text of an object; no text at all is an empty one."""
    inner: Any = read_inner_json(path, value) if text(path, value).strip() else {}
    if not isinstance(inner, dict):
        raise InvalidParameter(path, value, "the JSON text of an object")
    return document(path, inner)


PART = record({"type": word("text"), "text": text}, required=["type", "text"])
CALL = record(
    {
        "id": _id,
        "type": word("function"),
        "function": record(
            {"name": name, "arguments": _arguments, "parsed_arguments": anything},
            required=["name", "arguments"],
        ),
        "index": whole(0),
    },
    required=["id", "type", "function"],
)
SAID: Mapping[str, Reader] = {"role": text, "content": _content, "name": text}
SPOKEN = record(
    {**SAID, "tool_calls": only([], NO_CALLS), "annotations": only([], "empty here")},
    required=["content"],
)
ASSISTANT = record(
    {
        **SAID,
        "tool_calls": _calls,
        "function_call": replaced("tool_calls"),
        "reasoning_content": text,
        "reasoning": text,
        "refusal": only("", f"null: refusals are {NOT_YET}"),
        "annotations": only([], f"empty: annotations are {NOT_YET}"),
        "audio": only({}, f"null: audio is {NOT_YET}"),
        "parsed": anything,
    }
)
TOOL = record({**SAID, "tool_call_id": _id}, required=["tool_call_id", "content"])
ROLES: Mapping[str, Reader] = {
    "system": _system,
    "developer": _system,
    "user": _user,
    "assistant": _assistant,
    "tool": _tool,
}
