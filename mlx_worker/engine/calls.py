"""Tool calls in Gemma's own syntax, as a grammar: `call:name{key:<|"|>text<|"|>,n:3}`.

Owns how a plain schema is said in it. Leaves schemas to schema.py, and when a call is asked for to
structure.py. Nothing is blank between tokens: the family writes none. Pure; any thread.

Where JSON Schema leaves an object open beside the properties it declares, this closes it: a call
names what its tool declares. Every document so allowed satisfies the schema.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import regex_to_lark

from mlx_worker.engine.merge import Budget, Conflict, Merger
from mlx_worker.engine.patterns import whole

MAX_CALLS = 32  # in one reply: a model that likes to call would go on until max_tokens
MAX_NESTED = 64
MAX_INLINE = 400  # characters: longer expressions become rules, each being used several times
PLAIN_NAME = re.compile(r"[^\s:,{}\[\]<>\"\\|]+")  # of a tool or a key: it is written bare
EXACT_JSON = {"whitespace_flexible": False}

# Digits are bounded so that each number has a finite double: JSON's 1e999 has none.
PRELUDE = r"""
value: text | NUMBER | "true" | "false" | "null" | list | object
list: "[" (value ("," value)*)? "]"
object: "{" (KEY ":" value ("," KEY ":" value)*)? "}"
INTEGER: /-?(0|[1-9][0-9]{0,30})/
NUMBER: /-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?/
KEY: /[A-Za-z_][A-Za-z0-9_-]{0,63}/
"""


def sealed(marker: str) -> str:
    """A control token's name in grammars, and in the tokenizer that follows them.

    It has characters that no reply contains. Under its own name a control token would be taken for
    any text of that spelling: llguidance tokenizes what a schema leaves no choice about.
    """
    inner = marker.replace("<", "\ufdd1").replace(">", "\ufdd2").replace(" ", "\ufdd3")
    return f"<\ufdd0{inner}>"


@dataclass(frozen=True)
class Signs:
    """The control tokens of a call, as a grammar names them, and what may stand between quotes."""

    opens: str = sealed("<|tool_call>")
    closes: str = sealed("<tool_call|>")
    quote: str = sealed('<|"|>')
    char: str = "(?s:.)"


class Unsayable(Exception):
    """A schema that no call can satisfy, or that can't be said: a short sentence."""


@dataclass
class _Tool:
    """One tool's rules."""

    signs: Signs
    prefix: str  # of the names of its rules
    defs: Mapping[str, Any]
    budget: Budget
    rules: list[str] = field(default_factory=list[str])
    left_out: list[str] = field(default_factory=list[str])
    _n: int = 0
    merger: Merger = field(init=False)
    _known: dict[str, str] = field(default_factory=dict[str, str])  # $ref → rule

    def __post_init__(self) -> None:
        self.merger = Merger(self.defs, self.budget)

    def rule(self, body: str, kind: str = "r") -> str:
        """A new rule's name; kind "T" makes it a terminal."""
        self._n += 1
        self.budget.spend(expressions=1, chars=len(body))
        name = f"{self.prefix}{kind}{self._n}"
        name = name.upper() if kind == "T" else name
        self.rules.append(f"{name}: {body}")
        return name

    def value(self, schema: Any, depth: int = 0) -> str:
        """An expression for the values of a plain schema."""
        self.budget.spend(expressions=1)
        if depth > MAX_NESTED:
            raise Unsayable("it is too large")
        found = self._value(schema, depth)
        return self.rule(found) if len(found) > MAX_INLINE else found

    def _value(self, schema: Any, depth: int) -> str:
        if schema is False:
            raise Unsayable("nothing satisfies false")
        if schema is True or not schema:
            return "value"
        if schema.keys() == {"$ref"}:
            return self._referred(schema["$ref"], depth)
        try:
            schema = self.merger.merged(schema)
        except Conflict as conflict:
            raise Unsayable(str(conflict)) from conflict
        if "anyOf" in schema:
            return self._any_of(schema["anyOf"], depth)
        if "$ref" in schema:
            return self._referred(schema["$ref"], depth)
        if "enum" in schema:
            return self._one_of(schema)
        return self._typed(schema, depth)

    def _referred(self, ref: str, depth: int) -> str:
        if ref not in self._known:
            self._n += 1
            name = f"{self.prefix}d{self._n}"
            self._known[ref] = name
            self.rules.append(f"{name}: {self.value(self.defs[ref], depth + 1)}")
            self.budget.spend(chars=len(self.rules[-1]))
        return self._known[ref]

    def _any_of(self, options: Sequence[Any], depth: int) -> str:
        found: list[str] = []
        problems: list[Unsayable] = []
        for option in options:
            try:
                found.append(self.value(option, depth + 1))
            except Unsayable as problem:
                problems.append(problem)
        if not found:
            raise problems[0]
        return _either(found)

    def _one_of(self, schema: Mapping[str, Any]) -> str:
        """The values of an enum; the texts among them within one pair of quotes."""
        values = schema["enum"]
        texts = [self.words(value) for value in values if isinstance(value, str) and value]
        others = [
            self.literal(value) for value in values if not isinstance(value, str) or not value
        ]
        if texts:
            others.insert(0, f"{self.signs.quote} {_either(texts)} {self.signs.quote}")
        if not others:
            raise Unsayable("its enum allows nothing")
        return _either(others)

    def words(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def literal(self, value: Any) -> str:
        """One value, exactly."""
        if isinstance(value, str):
            return " ".join(
                [self.signs.quote, *([self.words(value)] if value else []), self.signs.quote]
            )
        if isinstance(value, list):
            items = ' "," '.join(self.literal(item) for item in value)
            return f'"[" {items} "]"'
        if isinstance(value, dict):
            pairs = ' "," '.join(
                f"{self.key(name)} {self.literal(item)}" for name, item in value.items()
            )
            return f'"{{" {pairs} "}}"'
        return self.words(json.dumps(value))

    def key(self, name: str) -> str:
        if not PLAIN_NAME.fullmatch(name):
            raise Unsayable(
                f"{name[:40]!r} can't be the name of anything in a call, which writes it bare: "
                'no blanks, and none of : , { } [ ] < > " | \\'
            )
        return self.words(f"{name}:")

    def _typed(self, schema: Mapping[str, Any], depth: int) -> str:
        types = schema.get("type") or _meant(schema)
        if types is None:
            return "value"
        options: list[str] = []
        for name in [types] if isinstance(types, str) else types:
            if name in ("null", "boolean"):
                options += ['"null"'] if name == "null" else ['"true"', '"false"']
            else:
                options.append(_SAID[name](self, schema, depth))
        return _either(options)

    def number(self, schema: Mapping[str, Any], depth: int) -> str:
        is_whole = schema.get("type") == "integer"
        return self._number(schema, "integer" if is_whole else "number")

    def integer(self, schema: Mapping[str, Any], depth: int) -> str:
        return self._number(schema, "integer")

    def _number(self, schema: Mapping[str, Any], kind: str) -> str:
        bounds = {key: schema[key] for key in NUMBER_KEYWORDS if key in schema}
        if not bounds:
            return "INTEGER" if kind == "integer" else "NUMBER"
        return f"%json {json.dumps({'type': kind, **bounds, 'x-guidance': EXACT_JSON})}"

    def string(self, schema: Mapping[str, Any], depth: int) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        quote = self.signs.quote
        parts = [f"/{self.signs.char}{{{least},{'' if most is None else most}}}/"]
        if (pattern := schema.get("pattern")) is not None:
            anchored = whole(pattern)
            if anchored is None:
                self.left_out.append("pattern")
            else:
                parts.append(f"/{_in_slashes(anchored)}/")
        if len(parts) == 1 and not least and most is None:
            return "text"
        return f"{quote} {self.rule(' & '.join(parts), 'T')} {quote}"

    def array(self, schema: Mapping[str, Any], depth: int) -> str:
        first = [self.value(item, depth + 1) for item in schema.get("prefixItems", [])]
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        try:
            rest = self.value(schema.get("items", True), depth + 1)
        except Unsayable:
            rest, most = "", len(first)
        if most is not None and least > most:
            raise Unsayable("its list can have no length")
        return f'"[" {_listed(first, rest, least, most, self.rule)} "]"'

    def object(self, schema: Mapping[str, Any], depth: int) -> str:
        required = schema.get("required", [])
        properties = dict(schema.get("properties", {}))
        others = schema.get("additionalProperties", "properties" not in schema)
        properties |= {name: others for name in required if name not in properties}
        pairs: list[tuple[str, bool]] = []
        for name, item in properties.items():
            try:
                pairs.append((f"{self.key(name)} {self.value(item, depth + 1)}", name in required))
            except Unsayable as problem:
                if name in required:
                    raise Unsayable(f"{name[:40]}: {problem}") from problem
        extra = self._extra(schema, others, list(properties), depth)
        least = schema.get("minProperties", 0)
        most = schema.get("maxProperties")
        most_extra = None if most is None else max(0, most - len(pairs))
        body = _sequence(pairs, extra, most_extra, least > 0, self.rule)
        return f'"{{" {body} "}}"'

    def _extra(
        self, schema: Mapping[str, Any], others: Any, names: Sequence[str], depth: int
    ) -> str:
        """A pair whose key is none of the declared ones; "" where there may be none."""
        taken = "|".join(re.escape(name) for name in names if PLAIN_NAME.fullmatch(name))
        free = f" & ~/{_in_slashes(f'(?:{taken})')}/" if taken else ""
        options: list[str] = []
        patterns = schema.get("patternProperties", {})
        for pattern, item in patterns.items():
            anchored = whole(pattern)
            if anchored is not None and item is not False:
                key = self.rule(f"KEY & /{_in_slashes(anchored)}/{free}", "T")
                options.append(f'{key} ":" {self.value(item, depth + 1)}')
        if others is not False and not patterns:
            key = self.rule(f"KEY{free}", "T") if free else "KEY"
            options.append(f'{key} ":" {self.value(others, depth + 1)}')
        return _either(options) if options else ""


NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OBJECT_KEYWORDS = (
    "properties", "required", "additionalProperties", "patternProperties",
    "minProperties", "maxProperties",
)  # fmt: skip
_SAID: dict[str, Callable[[_Tool, Mapping[str, Any], int], str]] = {
    "number": _Tool.number,
    "integer": _Tool.integer,
    "string": _Tool.string,
    "array": _Tool.array,
    "object": _Tool.object,
}


def _meant(schema: Mapping[str, Any]) -> str | None:
    """The type that a schema's keywords are about, where it names none."""
    for kind, keywords in (
        ("object", OBJECT_KEYWORDS),
        ("array", ("items", "prefixItems", "minItems", "maxItems")),
        ("string", ("minLength", "maxLength", "pattern")),
        ("number", NUMBER_KEYWORDS),
    ):
        if any(keyword in schema for keyword in keywords):
            return kind
    return None


def _either(options: Sequence[str]) -> str:
    unique = list(dict.fromkeys(options))
    return unique[0] if len(unique) == 1 else f"( {' | '.join(unique)} )"


def _in_slashes(pattern: str) -> str:
    """A pattern as it stands between slashes: \\d and \\w as JSON Schema means them."""
    return re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", regex_to_lark(pattern, "dw"))


def _listed(
    first: Sequence[str], rest: str, least: int, most: int | None, rule: Callable[[str], str]
) -> str:
    """Items with commas: `first` in order, then any number of `rest` within the bounds."""
    most_rest = None if most is None else max(most - len(first), 0)
    tail = ""
    if rest and most_rest != 0:
        again = max(least - len(first), 0)
        bound = f"{{{again},{'' if most_rest is None else most_rest}}}"
        if not first:
            upper = "" if most is None else most - 1
            full = f'{rest} ("," {rest}){{{max(least - 1, 0)},{upper}}}'
            return full if least else f"( {full} )?"
        tail = f'("," {rest}){bound}'
    body = tail
    count = len(first) if most is None else min(len(first), most)
    for index in reversed(range(count)):
        comma = '"," ' if index else ""
        body = f"{comma}{first[index]} {body}"
        if index >= least:
            body = f"( {rule(body)} )?"
    return body


def _times(most: int | None) -> str:
    return "*" if most is None else f"{{0,{most}}}"


def _sequence(
    pairs: Sequence[tuple[str, bool]],
    extra: str,
    most_extra: int | None,
    is_some: bool,
    rule: Callable[[str], str],
) -> str:
    """Pairs with commas in the declared order, optional ones at will, then extra ones.

    most_extra  of those; None: any number
    is_some     at least one pair
    """
    extra = "" if most_extra == 0 else extra
    # tails[-1 - i]: what follows pair i, if it is there
    tails = [f'("," {extra}){_times(most_extra)}' if extra else ""]
    for pair, is_required in reversed(pairs):
        step = f'"," {pair}' if is_required else f'("," {pair})?'
        tails.append(rule(f"{step} {tails[-1]}") if len(tails) % 8 == 0 else f"{step} {tails[-1]}")
    tails.reverse()
    starts: list[str] = []
    for index, (pair, is_required) in enumerate(pairs):
        starts.append(f"{pair} {tails[index + 1]}")
        if is_required:
            return f"( {' | '.join(rule(start) for start in starts)} )"
    if extra:
        further = _times(None if most_extra is None else most_extra - 1)
        starts.append(f'{extra} ("," {extra}){further}')
    if not starts:
        return ""
    return f"( {' | '.join(rule(start) for start in starts)} ){'' if is_some else '?'}"


def calls(
    tools: Sequence[tuple[str, Mapping[str, Any]]], is_parallel: bool, signs: Signs
) -> tuple[str, list[str]]:
    """The grammar of calls, and what it leaves out of each tool's schema, as "what of tool".

    tools  (name, plain schema of its parameters)

    Raises Unsayable, beginning with the tool's name, and TooLarge.
    """
    budget = Budget()
    left_out: list[str] = []
    rules: list[str] = []
    heads: list[str] = []
    for index, (name, schema) in enumerate(tools):
        tool = _Tool(signs, f"t{index}", _defs(schema), budget)
        try:
            root = {key: schema[key] for key in schema if key != "$defs"}
            body = tool.value({"allOf": [{"type": "object"}, root]})
            heads.append(f"{tool.key(name).replace(':', '', 1)} {body}")
        except Unsayable as problem:
            raise Unsayable(f"{name}: {problem}") from problem
        rules += tool.rules
        left_out += [f"{what} of {name}" for what in tool.left_out]
    times = f"{{1,{MAX_CALLS}}}" if is_parallel else ""
    text = f"TEXT: /{signs.char}*/\ntext: {signs.quote} TEXT {signs.quote}"
    start = (
        f'start: one_call{times}\none_call: {signs.opens} "call:" {_either(heads)} {signs.closes}'
    )
    return "\n".join([start, *rules, PRELUDE.strip(), text, ""]), left_out


def _defs(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {f"#/$defs/{name}": value for name, value in schema.get("$defs", {}).items()}
