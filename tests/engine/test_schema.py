"""What of a client's JSON Schema holds for a reply, what is left out, and what is refused."""

import datetime
import json
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gemma_calls import read_calls
from llguidance import LLMatcher, LLTokenizer
from mlx_lm.tool_parsers import json_tools, pythonic
from mlx_lm.tool_parsers.gemma4 import parse_tool_call
from schemas import SCHEMAS, closed
from walks import GEMMA, demo_tokenizer, problem, walk

from mlx_worker.engine import patterns, structure
from mlx_worker.engine.schema import ANNOTATIONS, ENFORCED, MAX_PROPERTIES, UNENFORCED
from mlx_worker.engine.structure import LIMITS, calls_grammar, check, structure_grammar
from mlx_worker.errors import RequestError
from mlx_worker.records import Structure, TextProtocol, Tools
from tests.tiers import thinned

NAMES = [name for name, _ in SCHEMAS]
LIMIT_S = 3.0  # of this thread's own time, for any schema; an idle machine takes one at most
INTEGER = {"type": "integer"}
JSON_CALLS = TextProtocol(
    "marked",
    call=("<tool_call>", "</tool_call>"),
    are_ids=False,
    read_call=json_tools.parse_tool_call,
)


def tool(parameters: Any, name: str = "get_it") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def notice_of(schema: Any) -> str | None:
    notice = structure_grammar(Structure(json.dumps(schema)))[1]
    return notice and notice[1]


def accepts(schema: Any, text: str) -> bool:
    """Whether the grammar of a schema lets a text be written whole, byte by byte."""
    return matches(structure_grammar(Structure(json.dumps(schema)))[0].text, text)


def matches(grammar: str, text: str) -> bool:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def _refused(ask: Callable[[], Any]) -> RequestError | None:
    try:
        ask()
    except RequestError as error:
        return error
    return None


def refusal_of(schema: Any) -> RequestError:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(RequestError) as caught:
        structure_grammar(Structure(text))
    return caught.value


# Walks


@pytest.mark.parametrize(("name", "schema"), thinned(SCHEMAS), ids=NAMES)
def test_whatever_the_masks_allow_satisfies_the_schema(name: str, schema: Any):
    """Random replies by the masks alone are JSON that jsonschema accepts, and none gets stuck."""
    grammar, notice = structure_grammar(Structure(json.dumps(schema)))
    assert notice is None
    for seed in range(6):
        text = demo_tokenizer().decode(walk(grammar, seed, n_free=(3, 10, 25)[seed % 3]))
        assert problem(schema, json.loads(text)) is None, text


@pytest.mark.parametrize(
    ("name", "schema"), thinned([pair for pair in SCHEMAS if pair[0] != "odd keys"])
)
def test_calls_in_gemmas_syntax_satisfy_their_tools_schema(name: str, schema: Any):
    """Random calls by the masks alone read back as arguments that jsonschema accepts."""
    is_object = name != "anything" and "object" in (
        schema.get("type"),
        "$ref" in schema and "object",
    )
    parameters = schema if is_object else as_property(schema)
    tools = Tools((tool(parameters),), is_required=True, is_parallel=False)
    grammar, notice = calls_grammar(tools, GEMMA)
    assert notice is None
    for seed in range(4):
        text = demo_tokenizer().decode(walk(grammar, seed, n_free=(4, 10, 25)[seed % 3]))
        [(called, arguments)] = read_calls(text)
        assert called == "get_it"
        assert problem(parameters, arguments) is None, text


def as_property(schema: dict[str, Any]) -> dict[str, Any]:
    """An object with one property of that schema; its definitions move to the root."""
    hoisted = {key: schema[key] for key in ("$defs", "definitions", "$schema") if key in schema}
    inner = {key: value for key, value in schema.items() if key not in hoisted}
    return {**closed(it=inner), **hoisted}


def test_there_are_schemas_enough():
    """The walks above cover fifty kinds of schema at least."""
    assert len(SCHEMAS) == len(set(NAMES)) >= 50


# Keywords: each is enforced, left out with a notice, an annotation, or refused

# keyword → (schema that has it, a document that breaks it, one that keeps it)
BROKEN_AND_KEPT: dict[str, tuple[Any, str, str]] = {
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}, '"x"', "1"),
    "type": ({"type": "string"}, "1", '"1"'),
    "enum": ({"enum": ["a", "b"]}, '"c"', '"b"'),
    "const": ({"const": 5}, "6", "5"),
    "anyOf": ({"anyOf": [INTEGER, {"type": "null"}]}, '"x"', "null"),
    "allOf": ({"allOf": [INTEGER, {"minimum": 3}]}, "2", "3"),
    "oneOf": ({"oneOf": [INTEGER, {"type": "null"}]}, '"x"', "null"),
    "properties": ({"type": "object", "properties": {"a": INTEGER}}, '{"a":"x"}', '{"a":1}'),
    "required": ({"type": "object", "required": ["a"]}, "{}", '{"a":1}'),
    "additionalProperties": (
        {"type": "object", "additionalProperties": INTEGER},
        '{"a":"x"}',
        '{"a":1}',
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n": INTEGER}},
        '{"n1":"x"}',
        '{"n1":1}',
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, "{}", '{"a":1}'),
    "maxProperties": ({"type": "object", "maxProperties": 1}, '{"a":1,"b":1}', '{"a":1}'),
    "items": ({"type": "array", "items": INTEGER}, '["a"]', "[1,2]"),
    "prefixItems": ({"type": "array", "prefixItems": [INTEGER]}, '["a"]', '[1,"a"]'),
    "additionalItems": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [INTEGER],
            "additionalItems": False,
        },
        "[1,2]",
        "[1]",
    ),
    "minItems": ({"type": "array", "minItems": 2}, "[1]", "[1,2]"),
    "maxItems": ({"type": "array", "maxItems": 1}, "[1,2]", "[1]"),
    "minLength": ({"type": "string", "minLength": 2}, '"a"', '"ab"'),
    "maxLength": ({"type": "string", "maxLength": 1}, '"ab"', '"\U0001f600"'),
    "pattern": ({"type": "string", "pattern": "b+"}, '"aca"', '"abc"'),
    "format": ({"type": "string", "format": "date"}, '"2023-02-29"', '"2024-02-29"'),
    "minimum": ({"type": "number", "minimum": 1.5}, "1.4", "1.5"),
    "maximum": ({"type": "integer", "maximum": 10}, "11", "10"),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 1}, "1", "1.1"),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 1}, "1", "0"),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, "4", "6"),
}
LEFT_OUT: dict[str, Any] = {
    "not": {"type": "string"},
    "if": {"type": "string"},
    "then": {"type": "string"},
    "else": {"type": "string"},
    "uniqueItems": True,
    "contains": INTEGER,
    "minContains": 1,
    "maxContains": 2,
    "propertyNames": {"maxLength": 3},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "dependencies": {"a": ["b"]},
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
    "$recursiveAnchor": True,
    "nullable": True,
}


def test_every_keyword_is_in_one_class():
    """The three classes are disjoint, and the two tables below name every keyword of theirs."""
    assert not ENFORCED & ANNOTATIONS | ENFORCED & UNENFORCED | ANNOTATIONS & UNENFORCED
    assert (BROKEN_AND_KEPT.keys(), LEFT_OUT.keys()) == (ENFORCED, UNENFORCED)


@pytest.mark.parametrize("keyword", sorted(ENFORCED))
def test_an_enforced_keyword_can_not_be_broken(keyword: str):
    """What jsonschema refuses can't be written, what it accepts can, and nothing is left out."""
    schema, broken, kept = BROKEN_AND_KEPT[keyword]
    assert (problem(schema, json.loads(broken)) is None, accepts(schema, broken)) == (False, False)
    assert (problem(schema, json.loads(kept)) is None, accepts(schema, kept)) == (True, True)
    assert notice_of(schema) is None


@pytest.mark.parametrize("keyword", sorted(UNENFORCED))
def test_a_keyword_that_is_not_enforced_is_told(keyword: str):
    """The notice names the keyword and where it stands; the rest of the schema holds."""
    schema = closed(a={"type": ["integer", "array", "object"], keyword: LEFT_OUT[keyword]})
    notice = structure_grammar(Structure(json.dumps(schema)))[1]
    message = f"the schema is enforced without {keyword} at /properties/a"
    assert notice == ("strict_schema_not_enforced", message)
    assert not accepts(schema, '{"a":"x"}')


@pytest.mark.parametrize("keyword", sorted(ANNOTATIONS - {"$defs", "definitions", "$id"}))
def test_an_annotation_changes_nothing(keyword: str):
    """Titles, defaults and the like are no restriction, so there is nothing to tell."""
    schema = closed(a={"type": "integer", keyword: "x"})
    assert notice_of(schema) is None
    assert accepts(schema, '{"a":1}')


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        ({"type": "string", "format": "regex"}, "format 'regex'"),
        ({"type": "string", "pattern": "^(?=a)."}, "pattern '^(?=a).'"),
        ({"type": "string", "pattern": r"(a)\1"}, "pattern '(a)"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        (closed(False, a={}, b={}, c={}) | {"maxProperties": 2}, "maxProperties"),
        ({"type": "integer", "multipleOf": 999_983}, "multipleOf"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"type": "string", "format": "email", "minLength": 90, "maxLength": 99}, "minLength"),
        ({"type": "integer", "minLenght": 3}, "minLenght"),
    ],
)
def test_a_value_that_is_not_enforced_is_told(schema: Any, left_out: str):
    """Some values of an enforced keyword, and keywords that nobody knows, are left out and told."""
    assert left_out in (notice_of(schema) or "")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False},
        {"type": "object", "unevaluatedProperties": True},
        {"type": "object", "required": ["a", "b"], "minProperties": 2},
        closed(a={}, b={}) | {"maxProperties": 2},
        {"type": "string", "maxLength": 10**9},
        {"type": "integer", "x-order": 3},
        {"oneOf": [closed(k={"const": "a"}), closed(k={"enum": ["b", "c"]})]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "string"}}},
    ],
)
def test_what_holds_anyway_is_not_told(schema: Any):
    """A keyword that forbids nothing, or nothing more, needs no notice."""
    assert notice_of(schema) is None


def test_a_long_notice_is_cut():
    """However much is left out, the message stays readable."""
    schema = closed(**{f"p{n}": {"type": "array", "uniqueItems": True} for n in range(100)})
    message = notice_of(schema) or ""
    assert message.endswith("and 92 more")
    assert len(message) < 500


# Values


@pytest.mark.parametrize(
    "text", ['"\\ud800"', '"\\u0061"', '"\\ud83d\\ude00"', '"\\/"', '"\x01"', '"\\x"', '"a\nb"']
)
def test_a_string_has_no_escape_but_the_short_ones(text: str):
    """No lone surrogate, no second spelling of a character, nothing that is no JSON."""
    assert not accepts({"type": "string"}, text)


def test_an_escaped_name_is_no_other_name():
    """{"\\u0061": …} would get the schema of unknown properties, and be read as the one of "a"."""
    schema = {"type": "object", "properties": {"a": INTEGER, "b\nc": INTEGER}}
    assert not accepts(schema, '{"\\u0061":"x"}')
    assert not accepts(schema, '{"b\\u000ac":"x"}')


def test_a_declared_property_is_not_written_twice():
    """Free names may repeat, as JSON allows, declared ones may not: the last would win."""
    schema = {"type": "object", "properties": {"a": INTEGER}}
    assert not accepts(schema, '{"a":1,"a":"x"}')
    assert accepts(schema, '{"a":1,"b":2,"b":3}')


@pytest.mark.parametrize("text", ["01", "1.", ".5", "+1", "NaN", "Infinity", "1.0", "1e3", "0x1"])
def test_an_integer_is_written_as_one(text: str):
    """One spelling only: what some readers take for a float is none."""
    assert not accepts(INTEGER, text)


@pytest.mark.parametrize(
    ("schema", "kept", "broken"),
    [
        ({"type": "integer", "minimum": 2**53 + 1}, str(2**53 + 1024), str(2**53)),
        ({"type": "integer", "maximum": -(2**53) - 1}, str(-(2**53) - 1024), str(-(2**53))),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**64}, str(10**18), '"x"'),
        ({"type": "number", "maximum": 1e308, "minimum": 0}, "3.5", "-1"),
    ],
)
def test_bounds_beyond_a_double_are_kept(schema: Any, kept: str, broken: str):
    """llguidance holds bounds as doubles; rounded outward, they would let wrong numbers pass."""
    assert (accepts(schema, kept), accepts(schema, broken)) == (True, False)
    assert problem(schema, json.loads(kept)) is None


@pytest.mark.parametrize("value", [1.0, -0.0, 0.1, 1.5e-9, 10**18, "é\n\u2028", [], {}])
def test_a_constant_is_written_so_that_it_is_equal(value: Any):
    """Whatever a const is spelled like, what the grammar writes equals it."""
    schema = {"const": value}
    text = demo_tokenizer().decode(walk(structure_grammar(Structure(json.dumps(schema)))[0], 0, 0))
    assert problem(schema, json.loads(text)) is None


@pytest.mark.parametrize(
    "set_operator", ["[a&&b]+", "[a-c--b]+", "[x~~y]+", "[[]+", "a{,3}", "{x}"]
)
def test_a_pattern_means_what_ecmascript_means(set_operator: str):
    """Rust reads set operations and stray braces where ECMAScript reads characters."""
    schema = {"type": "string", "pattern": f"^{set_operator}$"}
    texts = ["a", "b", "&", "-", "~", "[", "a{,3}", "{x}", "aaa"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found = [bool(re.search(schema["pattern"], text)) for text in texts]
    if set_operator == "a{,3}":  # Python's own extension
        found = [text == "a{,3}" for text in texts]
    assert [accepts(schema, json.dumps(text)) for text in texts] == found


@pytest.mark.parametrize("name", sorted(patterns.FORMATS))
def test_a_known_format_is_a_pattern_that_holds(name: str):
    """Each format's own pattern can be enforced."""
    assert patterns.verdict(patterns.FORMATS[name]) == "enforced"


def test_a_date_is_one_of_the_calendar():
    """Every day of 8,000 years, and none that is not: 29 February by the Gregorian rule."""
    pattern = re.compile(patterns.FORMATS["date"])
    days = ["02-28", "02-29", "02-30", "04-30", "04-31", "12-31", "12-32", "00-10", "13-01"]

    def exists(text: str) -> bool:
        try:
            return bool(datetime.date.fromisoformat(text))
        except ValueError:
            return False

    texts = [f"{year:04}-{day}" for year in range(0, 8000, 4) for day in days]
    texts += [f"{year:04}-02-29" for year in range(1, 3000)]
    assert [text for text in texts if bool(pattern.search(text)) != exists(text)] == []


# Blanks


def written(value: Any, indent: int | None, separators: tuple[str, str] | None = None) -> str:
    return json.dumps(value, indent=indent, separators=separators)


@pytest.mark.parametrize(
    "text",
    [
        written({"a": 1, "b": [1, 2, {"c": None}]}, None, (",", ":")),
        written({"a": 1, "b": [1, 2, {"c": None}]}, None),
        written({"a": 1, "b": [1, 2, {"c": None}]}, 2),
        written({"a": {"b": {"c": {"d": {"e": [[[1]]]}}}}}, 4),
        '{ "a" : 1 }',
        "{\n}",
    ],
)
def test_the_usual_layouts_can_be_written(text: str):
    """Compact, with spaces, and pretty-printed to ten levels of four spaces."""
    assert accepts({"type": "object"}, text)


@pytest.mark.parametrize(
    "text", ['{  "a":1}', "{\n\n}", "{\n" + " " * 41 + "}", "{\t}", " {}", "{} "]
)
def test_blanks_do_not_run_on(text: str):
    """A model that loves blanks can write a line break and 40 spaces at one place, no more."""
    assert not accepts({"type": "object"}, text)


def test_a_call_has_no_blanks():
    """Gemma's calls have none between their tokens."""
    assert "%ignore" not in calls_grammar(Tools((tool(closed(a=INTEGER)),)), GEMMA)[0].text


# Refusals

PRIMES = (2, 3, 5, 7, 11, 13, 17)


def every(n: int, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^(.{{{n}}})*$", **more}


DEEP = '{"items":' * 900 + "{}" + "}" * 900
CHAIN = {
    f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}", "minLength": 1}] * 2} for n in range(25)
} | {"d25": {"type": "string"}}
HOSTILE: list[tuple[str, Any]] = [
    ("no JSON", "{"),
    ("NaN", '{"minimum": NaN}'),
    ("a list", []),
    ("false", False),
    ("lone surrogate", '{"const": "\\ud800"}'),
    ("unknown type", {"type": "strin"}),
    ("properties as a list", {"properties": []}),
    ("required as a text", {"required": "a"}),
    ("negative length", {"minLength": -1}),
    ("empty enum", {"enum": []}),
    ("empty anyOf", {"anyOf": []}),
    ("bounds crossed", {"type": "integer", "minimum": 5, "maximum": 1}),
    ("types exclude each other", {"allOf": [{"type": "string"}, INTEGER]}),
    ("required false", closed(a=False)),
    (
        "required and forbidden",
        {"type": "object", "required": ["z"], "additionalProperties": False},
    ),
    ("pattern without a match", {"type": "string", "pattern": "^abc$", "maxLength": 2}),
    ("no multiple in bounds", {"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 5}),
    ("list that needs a forbidden item", {"type": "array", "items": False, "minItems": 1}),
    ("needs itself", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    ("is itself", {"$ref": "#"}),
    (
        "refs in a circle",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ),
    ("a web address", {"$ref": "https://example.com/schema.json"}),
    ("a file", {"$ref": "file:///etc/passwd"}),
    ("another document", {"$ref": "other.json#/a"}),
    ("dangling", {"$ref": "#/$defs/a"}),
    ("dangling anchor", {"$ref": "#there"}),
    ("ref that is none", {"$ref": 5}),
    ("a schema of its own inside", closed(a={"$id": "https://example.com/a"})),
    ("nested too deep", DEEP),
    ("too long", {"description": "x" * 250_000}),
    ("huge enum", {"enum": [f"value {n}" for n in range(9_000)]}),
    ("long value", {"enum": ["x" * 150_000]}),
    ("deep value", {"const": json.loads("[" * 60 + "]" * 60)}),
    ("huge number", {"const": 10**400}),
    ("inexact number", {"const": 2**53 + 1}),
    ("control character", {"const": "\x01"}),
    ("many properties", closed(**{f"p{n}": {} for n in range(MAX_PROPERTIES + 1)})),
    ("many patterns", {"patternProperties": {f"^a{n:03}x": {} for n in range(300)}}),
    ("overlapping patterns", {"type": "object", "patternProperties": {"^a": {}, "b$": INTEGER}}),
    ("many schemas", {"anyOf": [{"type": "string"}] * 4_000}),
    ("huge minItems", {"type": "array", "minItems": 10**9}),
    ("huge minLength", {"type": "string", "minLength": 10**9}),
    ("multiple of nothing", {"multipleOf": 0}),
    ("bad pattern", {"type": "string", "pattern": "(["}),
    ("repeats of repeats", {"type": "string", "pattern": "^(a{1000}){1000}$"}),
    ("endless repeat", {"type": "string", "pattern": "a{99999999999}"}),
    ("long pattern", {"type": "string", "pattern": "a" * 5_000}),
    (
        "unions of objects",
        {
            "allOf": [
                {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {f"k{n}{m}": every(2 + 10 * n + m) for m in range(4)},
                        }
                        for n in range(5)
                    ]
                }
            ]
            * 4
        },
    ),
    (
        "800 patterns",
        {
            "anyOf": [
                {"type": "string", "pattern": f"^[a-z]{{{n}}}x.*y{{{n}}}$"} for n in range(800)
            ]
        },
    ),
    (
        "large patterns",
        {
            "anyOf": [
                {"type": "string", "pattern": f"^[a-z]{{{9 * n}}}x.*y{{{9 * n}}}$"}
                for n in range(99)
            ]
        },
    ),
    (
        "unions that multiply",
        {"allOf": [{"anyOf": [closed(a={"const": n}), closed(b={})]} for n in range(30)]},
    ),
]
COSTLY: list[tuple[str, Any]] = [
    ("refs that double", {"$ref": "#/$defs/d0", "$defs": CHAIN}),
    ("fewer of them", {"$ref": "#/$defs/d8", "$defs": CHAIN}),
    ("one of 500 kinds", {"oneOf": [closed(k={"const": f"{n}"}) for n in range(500)]}),
    ("500 optional", closed(False, **{f"p{n}": {} for n in range(MAX_PROPERTIES)})),
    ("500 optional, open", {"type": "object", "properties": {f"p{n}": {} for n in range(500)}}),
    ("enum and pattern", {"enum": [f"v{n}" for n in range(990)], "pattern": "^v[0-9]*7$"}),
    ("50 patterns", {"type": "object", "patternProperties": {f"^a{n:03}x": {} for n in range(50)}}),
    ("a prime multiple", {"type": "integer", "multipleOf": 19_997}),
    ("two multiples", {"allOf": [{"multipleOf": 9_973}, {"multipleOf": 9_967}]}),
    ("many repeats", {"type": "string", "pattern": "^(a{100}){100}$"}),
    ("x-guidance", {"type": "object", "x-guidance": {"lenient": True}}),
]


@pytest.mark.parametrize(("name", "schema"), HOSTILE, ids=[name for name, _ in HOSTILE])
def test_a_schema_that_can_not_be_is_refused_at_once(name: str, schema: Any):
    """400 with the key at fault, one short line, and within the time limit."""
    began = time.thread_time()
    error = refusal_of(schema)
    assert time.thread_time() - began < LIMIT_S
    assert error.param == structure.SCHEMA_PARAM
    assert error.message.startswith(structure.SCHEMA_PARAM)
    assert "\n" not in str(error)
    assert len(str(error)) < 500


@pytest.mark.parametrize(
    "options",
    [
        [every(n) for n in (997, 991, 983, 977, 971, 967, 953, *PRIMES)],
        [{"type": "string", "pattern": f"^[a-z]{{{n}}}x.*y{{{n}}}$"} for n in range(100)],
        [{"type": "string", "pattern": f"^.*x.{{{n}}}$"} for n in range(100)],
    ],
    ids=["repeats", "different", "ends"],
)
def test_as_many_patterns_as_may_be_are_followed_in_time(options: list[Any]):
    """Masks of alternatives at one place, byte by byte; or a limit ends them in time."""
    text = structure_grammar(Structure(json.dumps({"anyOf": options})))[0].text
    matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0, limits=LIMITS)
    generator = np.random.default_rng(3)
    began = time.thread_time()
    for byte in b'"' + bytes(generator.choice(list(b"abxy"), 300)):
        matcher.compute_bitmask()
        if not matcher.consume_token(int(byte)):
            break
    assert time.thread_time() - began < LIMIT_S


@pytest.mark.parametrize(("name", "schema"), COSTLY, ids=[name for name, _ in COSTLY])
def test_a_costly_schema_is_read_in_time(name: str, schema: Any):
    """The largest that the limits let through, compiled and begun."""
    began = time.thread_time()
    structure_grammar(Structure(json.dumps(schema)))
    assert time.thread_time() - began < LIMIT_S


@pytest.mark.parametrize(("name", "schema"), thinned(HOSTILE + COSTLY))
def test_a_tools_parameters_are_as_safe(name: str, schema: Any):
    """The same schemas as parameters of a tool that must be called, within the limit as well."""
    if isinstance(schema, str):
        return
    is_whole = isinstance(schema, dict) and ("$defs" in schema or schema.get("type") == "object")
    tools = Tools((tool(schema if is_whole else closed(a=schema)),), is_required=True)
    began = time.thread_time()
    error = _refused(lambda: (check(None, tools), calls_grammar(tools, GEMMA)))
    assert error is None or error.param in ("tools[0].function.parameters", "tools")
    assert len(str(error)) < 500
    assert time.thread_time() - began < LIMIT_S


DATE = {"type": "string", "format": "date"}
MEETING: list[tuple[str, Any, str]] = [
    ("two", {"allOf": [every(997), every(991)]}, "pattern '^(.{991})*$' at /allOf/1"),
    ("seven", {"allOf": [every(n) for n in PRIMES]}, "pattern '^(.{3})*$' at /allOf/1"),
    ("nested", {"allOf": [{"allOf": [every(997)]}, {"allOf": [every(991)]}]}, "{991}"),
    ("pattern and format", every(997, format="email"), "format 'email'"),
    ("format in allOf", every(997, allOf=[{"format": "email"}]), "format 'email' at /allOf/0"),
    ("beside $ref", every(997, **{"$ref": "#/$defs/a", "$defs": {"a": every(991)}}), "{997}"),
    (
        "allOf over $ref",
        {
            "allOf": [{"$ref": f"#/$defs/d{n}"} for n in PRIMES],
            "$defs": {f"d{n}": every(n) for n in PRIMES},
        },
        "/$defs/d",
    ),
    (
        "refs in a row",
        {
            **every(997),
            "$ref": "#/$defs/a",
            "$defs": {"a": every(991, **{"$ref": "#/$defs/b"}), "b": every(983)},
        },
        "{997}",
    ),
    ("own and allOf's", every(997, allOf=[every(991), every(983)]), "{991}"),
    ("of a property", {"allOf": [closed(a=every(997)), closed(a=every(991))]}, "{991}"),
    (
        "of a property and the others",
        {
            "allOf": [
                {"type": "object", "additionalProperties": every(997)},
                {"type": "object", "required": ["a"], "properties": {"a": every(991)}},
            ]
        },
        "pattern",
    ),
    (
        "of free names",
        {
            "type": "object",
            "patternProperties": {"^a": every(997)},
            "allOf": [{"additionalProperties": every(991)}],
        },
        "pattern",
    ),
    (
        "of items",
        {
            "allOf": [
                {"type": "array", "items": every(997)},
                {"type": "array", "prefixItems": [every(991)], "minItems": 1},
            ]
        },
        "pattern",
    ),
    (
        "of a name and its pattern",
        {
            "type": "object",
            "properties": {"ab": every(997)},
            "patternProperties": {"^a": every(991)},
        },
        "{991}",
    ),
    ("beside anyOf", every(997, anyOf=[every(991), every(983)]), "{991}"),
    (
        "two anyOf",
        {"allOf": [{"anyOf": [every(997), every(991)]}, {"anyOf": [every(983), every(977)]}]},
        "{983}",
    ),
    ("length", every(997, minLength=991 * 3), "minLength"),
    ("length in allOf", {"allOf": [every(997), {"minLength": 991 * 3}]}, "minLength at /allOf/1"),
    ("same names", {"$ref": "#/$defs/a", "$defs": {"a": every(997, allOf=[every(991)])}}, "{991}"),
]


@pytest.mark.parametrize(("name", "schema", "told"), MEETING, ids=[name for name, *_ in MEETING])
def test_one_pattern_holds_for_a_text(name: str, schema: Any, told: str):
    """Others that meet it are left out with the notice, which names them, for calls as well."""
    began = time.thread_time()
    assert told in (notice_of(schema) or "")
    assert time.thread_time() - began < LIMIT_S
    hoisted = {key: schema[key] for key in ("$defs",) if key in schema}
    inner = {key: value for key, value in schema.items() if key not in hoisted}
    tools = Tools((tool({**closed(a=inner), **hoisted}),), is_required=True)
    began = time.thread_time()
    error = _refused(lambda: (check(None, tools), calls_grammar(tools, GEMMA)))
    assert time.thread_time() - began < LIMIT_S
    assert error is None


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string", "format": name} for name in patterns.FORMATS]},
        {"type": "object", "properties": {"a": DATE, "b": {"type": "string", "pattern": "x"}}},
        {"allOf": [DATE, {"format": "date", "minLength": 10}]},
        {"allOf": [closed(False, a=DATE), closed(False, a={"type": "string"})]},
        {"oneOf": [closed(k={"const": n}, v={"type": "string", "pattern": f"{n}"}) for n in "ab"]},
        {"type": "object", "patternProperties": {"^a": DATE, "^b": every(2)}},
        {"type": "object", "properties": {"a": DATE}, "patternProperties": {"^x-": every(2)}},
        {"type": "array", "prefixItems": [DATE, every(2)], "items": every(3)},
        {
            **closed(a={"$ref": "#/$defs/a"}, b={"$ref": "#/$defs/a", "title": "b"}),
            "$defs": {"a": DATE},
        },
    ],
    ids=json.dumps,
)
def test_patterns_that_do_not_meet_all_hold(schema: Any):
    """Alternatives, and texts in different places."""
    assert notice_of(schema) is None


def union(n_parts: int, n_options: int) -> dict[str, Any]:
    """An object that must be one of n_options in each of n_parts ways."""
    options = [
        {"anyOf": [{"type": "object", "properties": {f"k{n}": {"const": m}}, "required": [f"k{n}"]}
                   for m in range(n_options)]}
        for n in range(n_parts)
    ]  # fmt: skip
    return closed(a={"allOf": options})


def list_of(depth: int) -> Any:
    return {"type": "array", "items": list_of(depth - 1), "minItems": 1} if depth else INTEGER


TOGETHER: list[tuple[str, list[Any]]] = [
    ("40 of 4^4", [union(4, 4)] * 40),
    ("60 of 3^5", [union(5, 3)] * 60),
    ("100 wide ones", [closed(False, **{f"p{n}": {} for n in range(90)})] * 100),
    ("keys that Gemma lacks", [union(4, 4) | {"required": ["a b"], "properties": {}}] * 40),
    (
        "unions that conflict in Gemma's syntax",
        [{"allOf": [union(4, 4), {"multipleOf": 3}, {"multipleOf": 5}]}] * 128,
    ),
    ("repeats", [closed(a={"type": "string", "pattern": f"^({c}{{100}}){{100}}$"})
                 for c in "abcdefghijklmnopqrst"]),
    ("multiples", [closed(a={"type": "integer", "multipleOf": 19_997})] * 100),
    ("enums and patterns", [
        closed(a={"enum": [f"v{n}" for n in range(900)], "pattern": "^v[0-9]*7$"})
    ] * 20),
    ("free names", [
        {"type": "object", "patternProperties": {f"^a{n:02}x": {} for n in range(50)}}
    ] * 90),
    ("enums in unions", [closed(a={"enum": [*range(990)], "anyOf": [{"minimum": 0}] * 900})] * 4),
    ("a base with 400 in unions", [
        closed(a=closed(False, **{f"p{n}": {} for n in range(400)}) | {"anyOf": [{}] * 400})
    ] * 4),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters"), thinned(TOGETHER, 2), ids=[name for name, _ in TOGETHER]
)
def test_tools_are_bounded_together(name: str, parameters: list[Any]):
    """Each may be had alone; all are refused in one line within the limit, and again at once."""
    tools = Tools(tuple(tool(p, f"f{n}") for n, p in enumerate(parameters)), is_required=True)
    for limit in (LIMIT_S, LIMIT_S / 10):
        began = time.thread_time()
        error = _refused(lambda: (check(None, tools), calls_grammar(tools, GEMMA)))
        assert time.thread_time() - began < limit
        if name != "keys that Gemma lacks":
            assert error is not None
            assert error.param is not None
            assert structure.TOO_COSTLY in error.message
            assert "\n" not in error.message


def test_check_makes_the_calls_grammar():
    """The engine's thread finds it made."""
    tools = Tools((tool(union(4, 4)),), is_required=True)
    check(None, tools)
    began = time.thread_time()
    calls_grammar(tools, GEMMA)
    assert time.thread_time() - began < 0.05


def test_lists_in_lists_do_not_double():
    """A list's items stand in its grammar twice: its first one and the others."""
    tools = Tools((tool(closed(a=list_of(28))),), is_required=True)
    began = time.thread_time()
    grammar, _ = calls_grammar(tools, GEMMA)
    assert time.thread_time() - began < LIMIT_S
    assert len(grammar.text) < 20_000


def test_many_usual_tools_are_taken():
    """As many as may be offered, of ten parameters each."""
    parameters = closed(False, **{f"p{n}": {"type": "string"} for n in range(10)})
    tools = Tools(tuple(tool(parameters, f"f{n}") for n in range(128)), is_required=True)
    check(None, tools)
    assert calls_grammar(tools, GEMMA)[1] is None


def test_a_client_sets_no_options_of_the_compiler():
    """x-guidance would let blanks run on and keywords be dropped in silence."""
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    assert not accepts(schema, "{   }")


def test_a_repeated_schema_is_compiled_once():
    """An agent that sends its schema with each call pays for it once."""
    schema = Structure(json.dumps(closed(**{f"p{n}": {"type": "string"} for n in range(300)})))
    structure_grammar(schema)
    began = time.thread_time()
    for _ in range(100):
        structure_grammar(schema)
    assert time.thread_time() - began < 0.05


def test_a_call_may_stand_in_a_documents_place():
    """Tools beside a schema: the grammar says so."""
    structure_, tools = Structure('{"type":"object"}'), Tools((tool(None),))
    assert structure_grammar(structure_, tools)[0].may_call
    assert not structure_grammar(structure_, None)[0].may_call


# Calls


def called(parameters: Any, text: str) -> bool:
    """Whether a call's arguments can be written as in `text`; control tokens are single bytes."""
    plain = structure._plain_tools(structure._said(Tools((tool(parameters),))))
    signs = structure.Signs('"<"', '">"', '"\'"', "[^']")
    lark, _ = structure.calls([(name, one.schema) for _, name, one in plain], True, signs)
    return matches(LLMatcher.grammar_from_lark(lark), f"<call:get_it{text}>")


@pytest.mark.parametrize(
    ("parameters", "kept", "broken"),
    [
        (None, ["{}"], ["{a:1}", ""]),
        (closed(a=INTEGER), ["{a:1}", "{a:-20}"], ["{}", "{a:1.5}", "{a:'1'}", "{ a:1}", "{a:1,}"]),
        (closed(False, a={}, b={}, c={}), ["{}", "{b:1}", "{a:1,c:2}"], ["{,b:1}", "{b:1,a:1}"]),
        (
            closed(False, a={}, b={}, c={}) | {"required": ["b"]},
            ["{b:1}", "{a:'x',b:[1,{k:null}]}", "{b:true,c:'y'}"],
            ["{}", "{a:1}", "{a:1,c:1}"],
        ),
        (
            {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True},
            ["{}", "{a:1}", "{a:1,z:'x'}", "{z:1,y:2}"],
            ["{a:'x'}", "{z:1,a:'x'}"],
        ),
        ({"type": "object", "properties": {"a": INTEGER}}, ["{}", "{a:1}"], ["{z:1}"]),
        ({"type": "object"}, ["{}", "{z:{y:[]}}"], ["{z:}", "[]"]),
        (
            closed(a={"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3}),
            ["{a:[1,2]}", "{a:[1,2,3]}"],
            ["{a:[1]}", "{a:[1,2,3,4]}", "{a:[]}"],
        ),
        (
            closed(a={"type": "array", "prefixItems": [INTEGER, {"type": "null"}], "minItems": 1}),
            ["{a:[1]}", "{a:[1,null]}", "{a:[1,null,'x',2]}"],
            ["{a:[]}", "{a:[null]}"],
        ),
        (
            closed(a={"enum": ["x", "y z", 3, None, ""]}),
            ["{a:'x'}", "{a:'y z'}", "{a:3}", "{a:null}", "{a:''}"],
            ["{a:'z'}", "{a:x}", "{a:4}"],
        ),
        (closed(a={"const": {"k": [1, "v"]}}), ["{a:{k:[1,'v']}}"], ["{a:{k:[1]}}"]),
        (closed(a={"type": "string", "maxLength": 2}), ["{a:''}", "{a:'é!'}"], ["{a:'abc'}"]),
        (closed(a={"type": "string", "pattern": r"^\d+/\w$"}), ["{a:'12/b'}"], ["{a:'12/'}"]),
        (closed(a={"type": "string", "pattern": "b"}), ["{a:'abc'}"], ["{a:'ac'}"]),
        (closed(a={"type": "integer", "minimum": 3, "maximum": 12}), ["{a:12}"], ["{a:13}"]),
        (
            closed(a={"allOf": [{"type": "integer", "minimum": 3}, {"minimum": 5, "maximum": 9}]}),
            ["{a:5}", "{a:9}"],
            ["{a:4}", "{a:10}"],
        ),
        (closed(a={"type": ["boolean", "null"]}), ["{a:true}", "{a:null}"], ["{a:0}"]),
        (
            closed(a={"allOf": [closed(x=INTEGER) | {"additionalProperties": True}, {}]}),
            ["{a:{x:1}}"],
            ["{a:{}}"],
        ),
    ],
)
def test_a_call_has_the_arguments_its_schema_allows(parameters: Any, kept: Any, broken: Any):
    """Gemma's syntax, argument by argument."""
    assert [text for text in kept if not called(parameters, text)] == []
    assert [text for text in broken if called(parameters, text)] == []


@pytest.mark.parametrize("is_parallel", [True, False])
def test_several_calls_only_where_they_may_be(is_parallel: bool):
    """is_parallel: one call or more; else exactly one."""
    grammar, _ = calls_grammar(Tools((tool(None),), True, is_parallel=is_parallel), GEMMA)
    assert grammar.is_call
    assert ("one_call{1,32}" in grammar.text) == is_parallel


def test_only_the_named_tool_may_be_called():
    """tool_choice with a name leaves the others out, also where they could not be enforced."""
    tools = Tools((tool({"type": 5}, "bad"), tool(closed(a=INTEGER), "good")), True, only="good")
    texts = {demo_tokenizer().decode(walk(calls_grammar(tools, GEMMA)[0], n, 0)) for n in range(9)}
    assert {name for text in texts for name, _ in read_calls(text)} == {"good"}


def test_mlx_lms_own_parser_reads_the_calls():
    """What the grammar writes is what the family's reader expects."""
    tools = Tools(
        (tool(closed(a={"type": "string", "enum": ["x y"]}, n=INTEGER)),), True, None, False
    )
    text = demo_tokenizer().decode(walk(calls_grammar(tools, GEMMA)[0], 1, 0))
    found: Any = parse_tool_call(text)
    assert found["arguments"] == read_calls(text)[0][1]


def test_json_between_markers_is_enforced():
    """Families whose calls are JSON: name and arguments, between the markers."""
    tools = Tools((tool(closed(a=INTEGER)), tool(closed(b={"type": "null"}), "other")), True)
    grammar, notice = calls_grammar(tools, JSON_CALLS)
    assert (grammar.is_call, notice) == (True, None)
    call = '<tool_call>\n{"name": "get_it", "arguments": {"a": 1}}\n</tool_call>'
    assert matches(grammar.text, call)
    assert matches(
        grammar.text, call + '<tool_call>{"name":"other","arguments":{"b":null}}</tool_call>'
    )
    assert not matches(grammar.text, call.replace('"a": 1', '"b": null'))


@pytest.mark.parametrize(
    "protocol",
    [
        TextProtocol(),
        TextProtocol("marked", call=("[", "]"), read_call=pythonic.parse_tool_call),
        TextProtocol("gemma4", call=("<|tool_call>", "<tool_call|>"), are_ids=False),
    ],
)
def test_other_families_calls_are_not_enforced(protocol: TextProtocol):
    """A clear 400 with the way out, instead of calls that are hoped for."""
    with pytest.raises(RequestError) as caught:
        calls_grammar(Tools((tool(None),), is_required=True), protocol)
    assert (caught.value.param, "auto" in (caught.value.hint or "")) == ("tool_choice", True)


@pytest.mark.parametrize("key", ["a b", "a:b", "a{", '"q"', ""])
def test_a_key_that_a_call_can_not_write_is_refused(key: str):
    """Keys stand bare in Gemma's syntax; the message names it."""
    with pytest.raises(RequestError) as caught:
        calls_grammar(Tools((tool(closed(**{key: INTEGER})),), is_required=True), GEMMA)
    assert caught.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("protocol", [GEMMA, JSON_CALLS])
@pytest.mark.parametrize("parameters", [{"type": "string"}, {"enum": [1]}, {"type": "array"}])
def test_arguments_are_an_object(protocol: TextProtocol, parameters: Any):
    """Parameters that are anything else are refused, and {} is any object."""
    with pytest.raises(RequestError) as caught:
        calls_grammar(Tools((tool(parameters),), is_required=True), protocol)
    assert caught.value.param in ("tools[0].function.parameters", "tools")


def test_check_asks_tools_only_where_one_must_be_called():
    """Under tool_choice auto a tool's parameters are the client's own affair."""
    check(None, Tools((tool({"type": 5}),)))
    with pytest.raises(RequestError, match=r"tools\[0\]"):
        check(None, Tools((tool({"type": 5}),), is_required=True))


def test_a_pattern_is_measured_with_its_repeats():
    """Nested repeats multiply."""
    sizes = [
        patterns.repeated_chars(p)
        for p in ("abc", "a{3}", "(ab){4}", "((a{2}b){3}c){5}", "[a-z]{7}")
    ]
    assert sizes == [3, 3, 2 + 6 * 6, 40 + 6 * 160, 7]


def test_random_bytes_are_no_schema_and_no_crash():
    """Fuzz: whatever JSON is given as a schema, the answer is a grammar or one short refusal."""
    generator = np.random.default_rng(7)
    keywords = [*sorted(ENFORCED), *sorted(UNENFORCED), "zzz"]

    def value(depth: int) -> Any:
        kind = int(generator.integers(0, 9 if depth < 4 else 6))
        if kind < 6:
            return [None, True, False, -1, 2.5, "#/a"][kind]
        if kind == 6:
            return [value(depth + 1) for _ in range(int(generator.integers(0, 3)))]
        names = generator.choice(keywords, size=int(generator.integers(0, 4)))
        return {str(name): value(depth + 1) for name in names}

    for _ in range(1_500):
        schema = Structure(json.dumps(value(0)))
        error = _refused(lambda schema=schema: structure_grammar(schema))
        assert len(str(error)) < 500
