"""Which patterns of a plain schema would hold for one text together.

Owns that at most one does: llguidance intersects them, and none of its limits bounds that. Leaves
the keywords themselves to schema.py. Pure; any thread.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_STEPS = 50_000  # schemas looked at, each once for each group that it is met in

Plain = dict[str, Any]
Group = dict[int, Plain]  # the schemas that one value must satisfy, by identity
NO_UNIONS: frozenset[int] = frozenset()
LENGTHS = ("minLength", "maxLength")


class TooIntricate(Exception):
    """More groups of schemas than can be looked at."""


@dataclass
class Conjunctions:
    """Walks a plain schema by groups of schemas that hold together, through allOf and $ref.

    Each option of an anyOf makes a group of its own; where two anyOf stand in one group, the
    second's options count as if all of them held.

    defs  reference → plain schema
    drop  told each schema and the keyword of it that has to go
    fits  whether a pattern can be kept together with a minLength and a maxLength
    """

    defs: Mapping[str, Any]
    drop: Callable[[Plain, str], None]
    fits: Callable[..., bool]
    _asked: set[tuple[frozenset[int], frozenset[int]]] = field(default_factory=set[Any])
    _waiting: list[tuple[Group, frozenset[int]]] = field(default_factory=list[Any])
    _n_steps: int = 0

    def walk(self, schema: Plain) -> None:
        """Raises TooIntricate."""
        self._wait([schema])
        while self._waiting:
            self._look(*self._waiting.pop())

    def _step(self, n: int = 1) -> None:
        self._n_steps += n
        if self._n_steps > MAX_STEPS:
            raise TooIntricate

    def _wait(self, schemas: Iterable[Any], unions: frozenset[int] = NO_UNIONS) -> None:
        """Have a group looked at, once.

        unions  the schemas in it whose anyOf has been taken apart
        """
        said = [schema for schema in schemas if schema and isinstance(schema, dict)]
        key = (frozenset(map(id, said)), unions)
        if said and key not in self._asked:
            self._asked.add(key)
            self._waiting.append((self._closed(said), unions))

    def _closed(self, schemas: Sequence[Plain]) -> Group:
        """The schemas, and what their allOf and $ref say."""
        found: Group = {}
        waiting = list(reversed(schemas))
        while waiting:
            schema = waiting.pop()
            self._step()
            if id(schema) not in found:
                found[id(schema)] = schema
                parts = [*schema.get("allOf", ()), self.defs.get(schema.get("$ref", ""))]
                waiting += [part for part in reversed(parts) if isinstance(part, dict)]
        return found

    def _look(self, group: Group, done: frozenset[int]) -> None:
        schemas = list(group.values())
        self._keep_one(schemas)
        unions = [schema for schema in schemas if "anyOf" in schema and id(schema) not in done]
        if not unions:
            self._below_object(schemas)
            self._below_array(schemas)
            return
        first, *others = unions
        options = [option for union in others for option in union["anyOf"]]
        done |= set(map(id, unions))
        for option in first["anyOf"]:
            self._wait([*schemas, option, *options], done)

    def _keep_one(self, schemas: Sequence[Plain]) -> None:
        """One pattern, rather one that is referred to: it holds in other places too."""
        targets = set(map(id, self.defs.values()))
        found = [schema for schema in schemas if "pattern" in schema]
        found.sort(key=lambda schema: id(schema) not in targets)
        if not found:
            return
        pattern = found[0]["pattern"]
        for schema in found:
            if schema["pattern"] != pattern:
                self.drop(schema, "pattern")
        lengths: dict[str, int] = {}
        for keyword, closer in zip(LENGTHS, (max, min), strict=True):
            if bounds := [schema[keyword] for schema in schemas if keyword in schema]:
                lengths[keyword] = closer(bounds)
        if lengths and not self.fits(pattern, **lengths):
            for schema in schemas:
                for keyword in LENGTHS:
                    if keyword in schema:
                        self.drop(schema, keyword)

    def _below_object(self, schemas: Sequence[Plain]) -> None:
        named = [schema.get("properties", {}) for schema in schemas]
        free = [
            [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
            for schema in schemas
        ]
        names = {name for properties in named for name in properties}
        self._step(len(names) * len(schemas) // 8)
        for name in names:
            self._wait(
                item
                for schema, others in zip(schemas, free, strict=True)
                for item in _of_name(schema, name, others)
            )
        self._together(free)

    def _below_array(self, schemas: Sequence[Plain]) -> None:
        first = [schema.get("prefixItems", []) for schema in schemas]
        rest = [schema.get("items") for schema in schemas]
        for index in range(max(map(len, first))):
            self._wait(
                items[index] if index < len(items) else others
                for items, others in zip(first, rest, strict=True)
            )
        self._wait(rest)

    def _together(self, free: Sequence[Sequence[Any]]) -> None:
        """What free names may have: those of one schema apart from each other, others as one."""
        said = [[item for item in items if item and item is not True] for items in free]
        said = [items for items in said if items]
        if len(said) == 1:
            for item in said[0]:
                self._wait([item])
        else:
            self._wait(item for items in said for item in items)


_PREFIX = re.compile(r"\^([A-Za-z0-9_-]*)")  # of names: the usual patternProperties


def _of_name(schema: Plain, name: str, others: Sequence[Any]) -> Iterable[Any]:
    """What a schema says of one name: where it declares it, what its patterns may add to that."""
    declared = schema.get("properties", {})
    if name not in declared:
        return others
    patterns = schema.get("patternProperties", {})
    return [declared[name], *(item for key, item in patterns.items() if _may_match(key, name))]


def _may_match(pattern: str, name: str) -> bool:
    prefix = _PREFIX.fullmatch(pattern)
    return prefix is None or name.startswith(prefix[1])
