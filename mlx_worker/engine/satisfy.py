"""What can be said of JSON Schemas without a value: whether two are apart, whether one can end.

Owns two questions that schema.py asks. Both answers may err to the cautious side only: "not apart"
costs a notice, "can end" costs a reply that runs to its max_tokens. Pure; any thread.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Marks = Mapping[str, frozenset[str]]
MAX_OPTIONS = 200  # above, a oneOf counts as overlapping: each pair is looked at


def are_apart(options: Sequence[Any]) -> bool:
    """Whether no value satisfies two of the schemas, by type, value or a required property's.

    options  with their own references resolved
    """
    if len(options) > MAX_OPTIONS:
        return False
    marks = [_marks(option) for option in options]
    return all(
        _differ(marks[i], marks[j]) for i in range(len(marks)) for j in range(i + 1, len(marks))
    )


def _differ(one: Marks, other: Marks) -> bool:
    return any(not one[mark] & other[mark] for mark in one.keys() & other.keys())


def _marks(option: Any) -> Marks:
    """type: the types it names; value: its only values; /name: those of a required property."""
    if not isinstance(option, dict):
        return {}
    marks: dict[str, frozenset[str]] = {}
    if (values := _listed(option)) is not None:
        marks["value"] = values
    if types := _types(option):
        marks["type"] = types
    if types == {"object"}:
        marks |= _property_marks(option.get("properties"), option.get("required"))
    return marks


def _property_marks(properties: Any, required: Any) -> Marks:
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    names = [name for name in required if isinstance(name, str)]
    listed = {f"/{name}": _listed(properties.get(name)) for name in names}
    return {mark: values for mark, values in listed.items() if values is not None}


def _listed(schema: Any) -> frozenset[str] | None:
    """The only values that a schema's const or enum allows, as JSON text; 1 and 1.0 are one."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    texts = json.loads(json.dumps(values), parse_int=float)
    return frozenset(json.dumps(value, sort_keys=True) for value in texts)


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema names, the two of numbers as one."""
    named = schema.get("type", [])
    named = named if isinstance(named, list) else [named]
    return frozenset("number" if name == "integer" else str(name) for name in named)


def can_end(whole: Mapping[str, Any]) -> bool:
    """Whether some document satisfies a plain schema and is finite: nothing required needs itself.

    whole  with its $defs
    """
    ends: set[str] = set()
    waiting = dict(reversed(whole.get("$defs", {}).items()))
    while True:
        before = len(ends)
        for name, schema in list(waiting.items()):
            if _ends(schema, ends):
                ends.add(f"#/$defs/{name}")
                del waiting[name]
        if len(ends) == before:
            return _ends(whole, ends)


def _ends(schema: Any, ends: set[str]) -> bool:
    """The same of one schema in it; ends: the references that are known to."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"] not in ends:
        return False
    if not all(_ends(part, ends) for part in schema.get("allOf", [])):
        return False
    if "anyOf" in schema and not any(_ends(part, ends) for part in schema["anyOf"]):
        return False
    if schema.get("type") == "object" and "patternProperties" not in schema:
        others, properties = schema.get("additionalProperties", True), schema.get("properties", {})
        return all(_ends(properties.get(name, others), ends) for name in schema.get("required", []))
    if schema.get("type") == "array":
        return _array_ends(schema, ends)
    return True


def _array_ends(schema: Mapping[str, Any], ends: set[str]) -> bool:
    first, n_items = schema.get("prefixItems", []), schema.get("minItems", 0)
    if n_items > len(first) and not _ends(schema.get("items", True), ends):
        return False
    return all(_ends(item, ends) for item in first[:n_items])
