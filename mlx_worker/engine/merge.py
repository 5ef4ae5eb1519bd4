"""Two plain schemas as the one that says both.

Owns allOf, and anyOf or $ref beside other keywords, for grammars that have no "and". Leaves the
keywords themselves to schema.py. Pure; any thread.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_HOPS = 60  # references and allOf followed for one schema

Plain = dict[str, Any]


class Conflict(Exception):
    """Two schemas that can't be said as one: a short sentence."""


class TooLarge(Exception):
    """A grammar that would cost more than it may."""


@dataclass
class Budget:
    """What is left to spend on one grammar, of all its tools together.

    steps  schemas looked at, larger ones counted more: two references in each of 20 are a million
    """

    steps: int = 10_000
    expressions: int = 8_000
    chars: int = 300_000

    def spend(self, *, steps: int = 0, expressions: int = 0, chars: int = 0) -> None:
        self.steps -= steps
        self.expressions -= expressions
        self.chars -= chars
        if min(self.steps, self.expressions, self.chars) < 0:
            raise TooLarge


class Merger:
    """Merges schemas that refer to each other."""

    def __init__(self, defs: Mapping[str, Any], budget: Budget) -> None:
        """
        defs  reference → plain schema
        """
        self._defs = defs
        self._budget = budget

    def merged(self, schema: Any, hops: int = 0) -> Plain:
        """The same without allOf, and with anyOf or $ref only where nothing stands beside it.

        const becomes an enum of one. The options of an anyOf are left as they are. Raises
        Conflict and TooLarge.
        """
        self._budget.spend(steps=1)
        if hops > MAX_HOPS:
            raise Conflict("its references lead too far, or in circles")
        if schema is False:
            raise Conflict("nothing satisfies false")
        found = {} if schema is True else dict(schema)
        parts = self._parts(found)
        for part in parts:
            found = self._joined(found, self.merged(part, hops + 1), hops)
        if "anyOf" in found and len(found) > 1:
            options = found.pop("anyOf")
            found = {"anyOf": [{"allOf": [found, option]} for option in options]}
        return _narrowed(found) if "enum" in found else found

    def _parts(self, found: Plain) -> list[Any]:
        """What must hold beside `found`, taken out of it."""
        parts = [{"enum": [found.pop("const")]}] if "const" in found else []
        parts += found.pop("allOf", [])
        if "$ref" in found and (len(found) > 1 or parts):
            parts.insert(0, self._defs[found.pop("$ref")])
        return parts

    def _joined(self, one: Plain, other: Plain, hops: int) -> Plain:
        """Both, each with what it refers to where the other says something."""
        if one and "$ref" in other:
            other = self.merged(self._defs[other["$ref"]], hops + 1)
        if other and "$ref" in one:
            one = self.merged(self._defs[one["$ref"]], hops + 1)
        sizes = [
            len(side.get(keyword, ()))
            for side in (one, other)
            for keyword in ("enum", "properties")
        ]
        self._budget.spend(steps=sum(sizes) // 32)
        return _both(one, other)


def _both(one: Plain, other: Plain) -> Plain:
    found = dict(one)
    if "properties" in one or "properties" in other:
        found["properties"] = _properties(one, other)
    for keyword, value in other.items():
        if keyword == "properties":
            continue
        if keyword not in found:
            found[keyword] = value
        elif found[keyword] != value:
            if keyword not in _TOGETHER:
                raise Conflict(f"two different {keyword} in allOf")
            found[keyword] = _TOGETHER[keyword](found[keyword], value)
    return found


def _properties(one: Plain, other: Plain) -> Plain:
    """Properties of both; one that only one declares must also be what the other has for others."""
    mine, its = one.get("properties", {}), other.get("properties", {})
    found: Plain = {}
    for name in [*mine, *(name for name in its if name not in mine)]:
        parts = [
            side.get("properties", {}).get(name, side.get("additionalProperties", True))
            for side in (one, other)
        ]
        said = [part for part in parts if part is not True and part != {}]
        found[name] = said[0] if len(said) == 1 else {"allOf": said} if said else {}
    return found


def _types(one: Any, other: Any) -> Any:
    mine, its = (
        {name: None for name in (side if isinstance(side, list) else [side])}
        for side in (one, other)
    )
    found = [name for name in mine if name in its or (name == "integer" and "number" in its)]
    found += [name for name in its if name == "integer" and "number" in mine and name not in found]
    if not found:
        raise Conflict("its types exclude each other")
    return found[0] if len(found) == 1 else found


def _values(one: list[Any], other: list[Any]) -> list[Any]:
    texts = {json.dumps(value, sort_keys=True) for value in other}
    return [value for value in one if json.dumps(value, sort_keys=True) in texts]


def _schemas(one: Any, other: Any) -> Any:
    return False if False in (one, other) else {"allOf": [_object(one), _object(other)]}


def _object(schema: Any) -> Plain:
    return {} if schema is True else schema


_TOGETHER: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "enum": _values,
    "required": lambda one, other: list(dict.fromkeys([*one, *other])),
    "items": _schemas,
    "additionalProperties": _schemas,
    "anyOf": lambda one, other: [{"allOf": [option, {"anyOf": other}]} for option in one],
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}

_NAMES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: type(value) is int,
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _narrowed(schema: Plain) -> Plain:
    """An enum of the values that have one of the types named beside it."""
    types = schema.get("type", list(_NAMES))
    names = types if isinstance(types, list) else [types]
    values = [value for value in schema["enum"] if any(_NAMES[name](value) for name in names)]
    if not values:
        raise Conflict("its enum allows nothing")
    return {**schema, "enum": values}
