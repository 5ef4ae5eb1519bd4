"""A client's JSON Schema → the plain one that grammars are made of.

Owns which keywords hold for a reply, which are left out with a notice, and which schemas are
refused because they are wrong or too large. Leaves the writing of grammars to structure.py and
calls.py, regular expressions to patterns.py. Pure; any thread.

A plain schema has keywords of ENFORCED only, `$ref` only to `#/$defs/…`, no `oneOf` (its options
are an `anyOf`), no `format` (it is a `pattern`), and `items` is one schema.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any, NoReturn
from urllib.parse import unquote

from mlx_worker.engine.conjunct import Conjunctions, TooIntricate
from mlx_worker.engine.patterns import (
    FORMATS,
    MAX_REPEATED_CHARS,
    fits,
    repeated_chars,
    spelled,
    verdict,
)
from mlx_worker.engine.satisfy import are_apart, can_end
from mlx_worker.errors import RequestError, shown

MAX_CHARS = 200_000  # of a schema's text
MAX_SCHEMAS = 3_000  # schemas in a schema, each counted once however often it is referred to
MAX_DEFS = 300  # of those, how many are referred to
MAX_PROPERTIES = 500  # of one object: one with 2,000 optional ones runs into llguidance's limits
MAX_DEPTH = 32  # schemas within each other; llguidance reads JSON to a depth of 128
MAX_VALUES = 1_000  # in all enums together; 2,400 beside a pattern took 1 s
MAX_TEXT = 5_000  # characters of a name or of a value in an enum; one of 150,000 took 4 s
MAX_FREE_PATTERNS = 50  # of patternProperties: each two are compared, 300 took 13 s
MAX_PATTERNS = 100  # different ones; 800 in an anyOf passed their trial and failed the reply
MAX_LEAST = 10_000  # minLength, minItems: no reply is longer
MOST_COUNTED = 1_000_000  # a maximum above it binds no reply
MAX_LEFT_OUT = 1_000
MOST_NUMBER = 10**18  # llguidance keeps bounds as a double and makes digits of an int64
EXACT_NUMBER = 2**53  # every integer below is a double
# An automaton of that many states: 9,973 took 0.1 s, 999,983 ten seconds (2-core EPYC).
MAX_MULTIPLE = 20_000

ENFORCED = frozenset(
    "$ref type enum const anyOf allOf oneOf properties required additionalProperties"
    " patternProperties minProperties maxProperties items prefixItems additionalItems minItems"
    " maxItems minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum"
    " multipleOf".split()
)
ANNOTATIONS = frozenset(
    "$schema $id id $anchor $defs definitions $comment $vocabulary $dynamicAnchor title description"
    " default examples example deprecated readOnly writeOnly contentMediaType contentEncoding"
    " contentSchema externalDocs xml discriminator".split()
)
# Known and not enforced. A keyword in none of the three is treated like these, but for x-….
UNENFORCED = frozenset(
    "not if then else uniqueItems contains minContains maxContains propertyNames dependentRequired"
    " dependentSchemas dependencies unevaluatedProperties unevaluatedItems $dynamicRef"
    " $recursiveRef $recursiveAnchor nullable".split()
)
SAYS_NOTHING: dict[str, Any] = {
    "uniqueItems": False,
    "nullable": False,
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
    "not": False,
    "propertyNames": True,
    "$recursiveAnchor": False,
}  # the values with which an unenforced keyword allows everything

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
SIMPLER = "simplify the schema"
TOO_COSTLY = "too large or too intricate to be enforced"
Plain = dict[str, Any]


@dataclass(frozen=True)
class PlainSchema:
    """What is enforced of a client's schema.

    schema    the plain one, its $defs included
    left_out  "keyword at place", for each that is not enforced
    weight    of what costs more than it is long: 60,000 take 0.2 s at most (2-core EPYC)
    """

    schema: Plain
    left_out: tuple[str, ...] = ()
    weight: int = 0


def parsed(text: str, param: str) -> Any:
    """A schema's JSON text as values. Raises RequestError where it is none, or too long."""
    if len(text) > MAX_CHARS:
        raise refusal(param, f"a schema of {len(text):,} characters; at most {MAX_CHARS:,}")
    try:
        values = json.loads(text, parse_constant=_no_number)
        json.dumps(values, ensure_ascii=False).encode()  # a lone surrogate can't be written
    except (ValueError, RecursionError) as error:
        what = str(error)[:80] or "nested too deep"
        raise refusal(param, f"not JSON that can be read: {what}", None) from error
    return values


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def refusal(param: str, what: str, hint: str | None = SIMPLER) -> RequestError:
    return RequestError(f"{param}: {what}", param=param, hint=hint)


def read(schema: Any, param: str, names: str = "d") -> PlainSchema:
    """The plain form of a client's schema.

    schema  JSON values
    param   the request's key that it came in, for messages
    names   what the names of its $defs begin with

    Raises RequestError naming the place and what is wrong there.
    """
    return _Reader(schema, param, names).plain()


@dataclass(frozen=True)
class _At:
    """One keyword of a client's schema, and where that schema stands."""

    node: Mapping[str, Any]
    keyword: str
    value: Any
    place: str
    depth: int

    @property
    def here(self) -> str:
        return f"{self.place}/{self.keyword}"


@dataclass
class _Reader:
    root: Any
    param: str
    names: str
    left_out: dict[str, None] = field(default_factory=dict[str, None])
    n_schemas: int = 0
    n_values: int = 0
    n_free_patterns: int = 0
    multiple: int = 1  # of all multipleOf: where two meet, the automaton has that many states
    patterns: dict[str, int] = field(
        default_factory=dict[str, int]
    )  # the client's → repeated_chars
    _places: dict[int, str] = field(default_factory=dict[int, str])  # of plain schemas, by identity
    _keep: list[Plain] = field(default_factory=list[Plain])  # so that an identity is one's own
    _said: dict[int, str] = field(default_factory=dict[int, str])  # what their patterns were
    _named: dict[str, str] = field(default_factory=dict[str, str])  # reference → name in $defs
    _waiting: list[tuple[str, str, Any]] = field(default_factory=list[tuple[str, str, Any]])

    def plain(self) -> PlainSchema:
        schema = self.schema(self.root, "", 0)
        defs: Plain = {}
        while self._waiting:
            name, place, target = self._waiting.pop()
            defs[name] = self.schema(target, place, 1)
        if schema is False:
            self.refuse("", "no value satisfies the schema false")
        self._part(schema, defs)
        whole: Plain = {**({"$defs": defs} if defs else {}), **schema}
        if not can_end(whole):
            self.refuse(
                "", "no document satisfies it: something required needs itself, or is false"
            )
        return PlainSchema(whole, tuple(self.left_out), self._weight())

    def _weight(self) -> int:
        per_value = 60 if self.patterns else 10  # beside a pattern, each is matched
        values = per_value * self.n_values + 500 * self.n_free_patterns
        return values + 3 * self.multiple + sum(self.patterns.values())

    def _part(self, schema: Plain, defs: Plain) -> None:
        """Leave out patterns that hold together with another, and lengths that one can't be with.

        llguidance would intersect them, in time and memory without bound.
        """

        def drop(part: Plain, keyword: str) -> None:
            del part[keyword]
            what = self._said[id(part)] if keyword == "pattern" else keyword
            self.leave_out(self._places[id(part)], what)

        if not self._said:
            return
        referred = {f"#/$defs/{name}": target for name, target in defs.items()}
        try:
            Conjunctions(referred, drop, fits).walk(schema)
        except TooIntricate:
            self.refuse("", TOO_COSTLY, SIMPLER)

    def refuse(self, place: str, what: str, hint: str | None = None) -> NoReturn:
        where = f"at {place[:160]}: " if place else ""
        raise refusal(self.param, where + what, hint)

    def refuse_value(self, at: _At, limit: str, hint: str | None = None) -> NoReturn:
        self.refuse(at.here, f"{shown(at.value)}, must be {limit}", hint)

    def leave_out(self, place: str, what: str) -> None:
        if len(self.left_out) < MAX_LEFT_OUT:
            self.left_out[f"{what} at {place[:80]}" if place else what] = None

    def schema(self, node: Any, place: str, depth: int) -> Any:
        """A plain schema, or False."""
        self.n_schemas += 1
        if self.n_schemas > MAX_SCHEMAS:
            self.refuse("", f"more than {MAX_SCHEMAS:,} schemas in it", SIMPLER)
        if depth > MAX_DEPTH:
            self.refuse(place, f"schemas nested deeper than {MAX_DEPTH}", SIMPLER)
        if isinstance(node, bool):
            return {} if node else False
        if not isinstance(node, dict):
            self.refuse(place, f"{shown(node)}, must be an object, true or false")
        found: Plain = {}
        self._keep.append(found)
        self._places[id(found)] = place
        for keyword, value in node.items():
            self._take(found, _At(node, keyword, value, place, depth))
        return found

    def below(self, node: Any, here: str, depth: int) -> Any:
        """The plain form of a schema within one."""
        return self.schema(node, here, depth + 1)

    def _take(self, found: Plain, at: _At) -> None:
        """Put into `found` what is enforced of one keyword."""
        if at.keyword in ENFORCED:
            _HANDLERS[at.keyword](self, found, at)
        elif at.keyword == "$id" and at.place:
            self.refuse(at.here, "a schema with an $id of its own inside", "remove the inner $id")
        elif at.keyword not in ANNOTATIONS and not at.keyword.startswith("x-"):
            if at.keyword not in SAYS_NOTHING or at.value != SAYS_NOTHING[at.keyword]:
                self.leave_out(at.place, at.keyword[:40])

    def name_of(self, at: _At) -> str:
        """Where in $defs the plain form of what a $ref leads to will be."""
        place, target = self.target(at.value, at.here)
        if place not in self._named:
            if len(self._named) >= MAX_DEFS:
                self.refuse("", f"$ref to more than {MAX_DEFS} schemas", SIMPLER)
            self._named[place] = f"{self.names}{len(self._named)}"
            self._waiting.append((self._named[place], place, target))
        return f"#/$defs/{self._named[place]}"

    def target(self, ref: Any, here: str) -> tuple[str, Any]:
        """The place that a reference names in this document, and what is there."""
        root_id = self.root.get("$id") if isinstance(self.root, dict) else None
        if isinstance(ref, str) and isinstance(root_id, str) and root_id.strip("#"):
            ref = ref.removeprefix(root_id.rstrip("#")) or "#"
        if not isinstance(ref, str) or not ref.startswith("#"):
            hint = "write what it refers to into $defs"
            self.refuse(here, f"{shown(ref)}, must lead into this schema", hint)
        try:
            if ref[1:] and not ref.startswith("#/"):
                return ref, self._anchors[ref[1:]]
            return ref[1:], _followed(self.root, ref[2:].split("/") if ref[1:] else [])
        except (KeyError, IndexError, ValueError, TypeError):
            self.refuse(here, f"{shown(ref)} is nowhere in the schema")

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            if isinstance(node, dict) and isinstance(node.get("$anchor"), str):
                found[node["$anchor"]] = node
            if isinstance(node, (dict, list)):
                waiting.extend(node.values() if isinstance(node, dict) else node)
        return found

    def resolved(self, option: Any, here: str) -> Any:
        """A client's schema, or the one that it only refers to."""
        for _ in range(MAX_DEPTH):
            if not isinstance(option, dict) or "$ref" not in option:
                break
            option = self.target(option["$ref"], here)[1]
        return option

    def is_enforced(self, pattern: str, at: _At) -> bool:
        """Whether a pattern is one that llguidance can follow; left out where only others can."""
        if pattern not in self.patterns:
            self.patterns[pattern] = repeated_chars(pattern) if len(pattern) <= MAX_TEXT else 0
            if len(self.patterns) > MAX_PATTERNS:
                self.refuse(at.here, f"more than {MAX_PATTERNS} patterns in the schema", SIMPLER)
        match verdict(pattern):
            case "enforced":
                if sum(self.patterns.values()) > MAX_REPEATED_CHARS:
                    self.refuse(at.here, "the schema's patterns are too large together", SIMPLER)
                return True
            case "beyond":
                self.leave_out(at.place, f"pattern {shown(pattern)}")
            case "invalid":
                self.refuse(at.here, f"{shown(pattern)} is no regular expression")
            case "too large":
                self.refuse(at.here, f"{shown(pattern)} is too large", SIMPLER)
        return False

    def hold(self, found: Plain, pattern: str, said: str, at: _At) -> None:
        """Put in a pattern, the first of its schema: a second one is left out."""
        if "pattern" in found:
            self.leave_out(at.place, said)
        else:
            found["pattern"] = pattern
            self._said[id(found)] = said

    def written(self, value: Any, at: _At, depth: int = 0) -> Any:
        """A value of enum or const, as it can be written."""
        self.n_values += 1
        if depth > MAX_DEPTH or self.n_values > MAX_VALUES:
            limit = f"at most {MAX_VALUES:,} values, nested no deeper than {MAX_DEPTH}"
            self.refuse(at.here, f"too large; {limit} in all enums together", SIMPLER)
        if isinstance(value, dict):
            return {key: self.written(item, at, depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [self.written(item, at, depth + 1) for item in value]
        if isinstance(value, str) and len(value) > MAX_TEXT:
            self.refuse(at.here, f"a text of more than {MAX_TEXT:,} characters", SIMPLER)
        if isinstance(value, str) and any(_is_control(char) for char in value):
            self.refuse(at.here, f"{shown(value)} has a control character", "remove it")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if abs(value) > MOST_NUMBER or int(float(value)) != int(value):
                limit = "a number of at most 18 digits that a double holds"
                self.refuse(at.here, f"{shown(value)}, must be {limit}")
            return int(value) if value == int(value) else value
        return value


def _followed(root: Any, parts: Sequence[str]) -> Any:
    """What a JSON pointer leads to; KeyError, IndexError, ValueError or TypeError: nothing."""
    for part in parts:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        root = root[int(name)] if isinstance(root, list) else root[name]
    return root


def _is_control(char: str) -> bool:
    """Characters that JSON would have to write as \\u…, which a reply never does."""
    return (char < " " and char not in "\n\r\t\b\f") or char == "\x7f"


def _put(found: Plain, keyword: str, value: Any) -> None:
    """Set a keyword; beside another of its name if there is one, because both must hold."""
    if keyword not in found:
        found[keyword] = value
    elif keyword == "allOf":
        found["allOf"] = [*found["allOf"], *value]
    else:
        found["allOf"] = [*found.get("allOf", []), {keyword: value}]


# The keywords: each puts what is enforced of it into `found`.


def _ref(reader: _Reader, found: Plain, at: _At) -> None:
    _put(found, "$ref", reader.name_of(at))


def _type(reader: _Reader, found: Plain, at: _At) -> None:
    names = at.value if isinstance(at.value, list) else [at.value]
    if not names or not all(isinstance(name, str) and name in TYPES for name in names):
        reader.refuse_value(at, f"one or several of {', '.join(TYPES)}")
    unique = list(dict.fromkeys(names))
    if "number" in unique:
        unique = [name for name in unique if name != "integer"]
    found["type"] = unique[0] if len(unique) == 1 else unique


def _enum(reader: _Reader, found: Plain, at: _At) -> None:
    if not isinstance(at.value, list) or not at.value:
        reader.refuse_value(at, "a list of at least one value")
    _put(found, "enum", [reader.written(value, at) for value in at.value])


def _const(reader: _Reader, found: Plain, at: _At) -> None:
    _put(found, "const", reader.written(at.value, at))


def _options(reader: _Reader, found: Plain, at: _At) -> None:
    """anyOf, allOf, oneOf."""
    if not isinstance(at.value, list) or not at.value:
        reader.refuse_value(at, "a list of at least one schema")
    options = [
        reader.below(item, f"{at.here}/{index}", at.depth) for index, item in enumerate(at.value)
    ]
    if at.keyword == "oneOf" and not are_apart(
        [reader.resolved(item, at.here) for item in at.value]
    ):
        reader.leave_out(at.place, "oneOf (as anyOf)")
    _put(found, "allOf" if at.keyword == "allOf" else "anyOf", options)


def _properties(reader: _Reader, found: Plain, at: _At) -> None:
    """properties, patternProperties."""
    if not isinstance(at.value, dict):
        reader.refuse_value(at, "an object of schemas")
    is_named = at.keyword == "properties"
    reader.n_free_patterns += 0 if is_named else len(at.value)
    if len(at.value) > MAX_PROPERTIES or reader.n_free_patterns > MAX_FREE_PATTERNS:
        most = MAX_PROPERTIES if is_named else MAX_FREE_PATTERNS
        reader.refuse(at.here, f"{len(at.value):,} of them; at most {most}", SIMPLER)
    if any(len(name) > MAX_TEXT for name in at.value):
        reader.refuse(at.here, f"a name of more than {MAX_TEXT:,} characters", SIMPLER)
    found[at.keyword] = {
        name if is_named else spelled(name): reader.below(item, f"{at.here}/{name}", at.depth)
        for name, item in at.value.items()
        if is_named or reader.is_enforced(name, at)
    }


def _others(reader: _Reader, found: Plain, at: _At) -> None:
    """additionalProperties."""
    found["additionalProperties"] = reader.below(at.value, at.here, at.depth)


def _required(reader: _Reader, found: Plain, at: _At) -> None:
    names = at.value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        reader.refuse_value(at, "a list of names")
    if len(names) > MAX_PROPERTIES:
        reader.refuse(at.here, f"{len(names):,} of them; at most {MAX_PROPERTIES}", SIMPLER)
    found["required"] = list(dict.fromkeys(names))


def _items(reader: _Reader, found: Plain, at: _At) -> None:
    """items, prefixItems, additionalItems: in older drafts the first may be a list."""
    if at.keyword == "additionalItems":
        if isinstance(at.node.get("items"), list):
            found["items"] = reader.below(at.value, at.here, at.depth)
    elif isinstance(at.value, list):
        found["prefixItems"] = [
            reader.below(item, f"{at.here}/{index}", at.depth)
            for index, item in enumerate(at.value)
        ]
    elif at.keyword == "prefixItems":
        reader.refuse_value(at, "a list of schemas")
    else:
        found["items"] = reader.below(at.value, at.here, at.depth)


def _count(reader: _Reader, found: Plain, at: _At) -> None:
    """minItems, maxItems, minLength, maxLength, minProperties, maxProperties."""
    value = at.value
    is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    if not is_whole or value < 0:
        reader.refuse_value(at, "a whole number of at least 0")
    if at.keyword.startswith("min") and value > MAX_LEAST:
        reader.refuse_value(at, f"at most {MAX_LEAST:,}", "no reply is that long")
    if at.keyword.endswith("Properties"):
        _count_properties(reader, found, at, int(value))
    elif value <= MOST_COUNTED:
        found[at.keyword] = int(value)


def _count_properties(reader: _Reader, found: Plain, at: _At, count: int) -> None:
    """Only where the count can't go wrong: a free name may be written twice, and is one then."""
    node = at.node
    names, required = _list(node.get("properties")), _list(node.get("required"))
    if at.keyword == "minProperties":
        is_needless, is_simple = count <= len(required), count == 1
    else:
        is_closed = node.get("additionalProperties") is False and "patternProperties" not in node
        is_needless = is_closed and count >= len(names)
        is_simple = count == 0 or all(name in required for name in names)
    if is_simple and not is_needless and not {"allOf", "anyOf", "oneOf", "$ref"} & set(node):
        found[at.keyword] = count
    elif not is_needless:
        reader.leave_out(at.place, at.keyword)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, dict)) else []


def _pattern(reader: _Reader, found: Plain, at: _At) -> None:
    if not isinstance(at.value, str):
        reader.refuse_value(at, "a text")
    if reader.is_enforced(at.value, at):
        reader.hold(found, spelled(at.value), f"pattern {shown(at.value)}", at)


def _format(reader: _Reader, found: Plain, at: _At) -> None:
    if not isinstance(at.value, str):
        reader.refuse_value(at, "a text")
    if at.value in FORMATS:
        reader.hold(found, FORMATS[at.value], f"format {shown(at.value)}", at)
    else:
        reader.leave_out(at.place, f"format {shown(at.value)}")


def _bound(reader: _Reader, found: Plain, at: _At) -> None:
    """minimum, maximum, exclusiveMinimum, exclusiveMaximum."""
    is_least, value = at.keyword.endswith("inimum"), at.value
    if isinstance(value, bool) and at.keyword.startswith("exclusive"):  # draft 4's
        value = at.node.get("minimum" if is_least else "maximum") if value else None
        if value is None:
            return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        reader.refuse_value(at, "a number")
    if value >= MOST_NUMBER if is_least else value <= -MOST_NUMBER:
        reader.refuse_value(at, f"{'below' if is_least else 'above minus'} {MOST_NUMBER:,}")
    found[at.keyword] = _held(value, is_least)


def _held(value: float, is_least: bool) -> float:
    """A bound that llguidance holds exactly, at or inside of the one asked for."""
    if abs(value) >= MOST_NUMBER:
        return -MOST_NUMBER if is_least else MOST_NUMBER
    if abs(value) < EXACT_NUMBER:
        return int(value) if value == int(value) else value
    return (-(-int(value) // 1024) if is_least else int(value) // 1024) * 1024


def _multiple_of(reader: _Reader, found: Plain, at: _At) -> None:
    value = at.value
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < MOST_NUMBER
    ):
        reader.refuse_value(at, f"a number above 0, below {MOST_NUMBER:,}")
    digits = Decimal(repr(value)).normalize()
    exponent = int(digits.as_tuple().exponent)
    is_small = -9 <= exponent <= 4
    steps = int(digits.scaleb(-min(exponent, 0))) if is_small else MAX_MULTIPLE + 1
    joint = math.lcm(reader.multiple, steps)
    if joint > MAX_MULTIPLE:
        return reader.leave_out(at.place, "multipleOf")
    reader.multiple = joint
    found["multipleOf"] = int(value) if value == int(value) else value


_HANDLERS: dict[str, Callable[[_Reader, Plain, _At], None]] = {
    "$ref": _ref,
    "type": _type,
    "enum": _enum,
    "const": _const,
    "required": _required,
    "additionalProperties": _others,
    "pattern": _pattern,
    "format": _format,
    "multipleOf": _multiple_of,
    **dict.fromkeys(("anyOf", "allOf", "oneOf"), _options),
    **dict.fromkeys(("properties", "patternProperties"), _properties),
    **dict.fromkeys(("items", "prefixItems", "additionalItems"), _items),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _count),
    **dict.fromkeys(("minProperties", "maxProperties"), _count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _bound),
}
assert _HANDLERS.keys() == ENFORCED
