"""What a client wants a reply to be → the grammar that makes it so.

Owns the grammars of response_format and tool_choice: their blanks, the limits they are compiled
under, and what is told where they can't be had. Leaves the reading of schemas to schema.py, Gemma's
syntax of calls to calls.py, and masks to grammar.py. Pure; any thread.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mlx_worker.engine.calls import MAX_CALLS, Signs, Unsayable, calls, sealed
from mlx_worker.engine.merge import TooLarge
from mlx_worker.engine.schema import (
    MAX_CHARS,
    SIMPLER,
    TOO_COSTLY,
    Plain,
    PlainSchema,
    parsed,
    read,
    refusal,
)
from mlx_worker.errors import RequestError
from mlx_worker.records import Grammar, Notice, Structure, TextProtocol, Tools

# Blanks between two JSON tokens: none, one space, or a line break and its indent of up to ten
# levels of four. llguidance tries the pattern once at each place, so this is all that a model which
# loves blanks can write there, 41 characters; its default lets one go on for ever.
BLANKS = r" |\n {0,40}"
# Without \u: with it, a key "\u0061" passes for another one than "a", and gets another schema.
JSON_OPTIONS = {"whitespace_pattern": BLANKS, "json_allowed_escapes": 'nrbtf\\"'}


# An object of 500 optional properties has 2,007 items in a row, which llguidance's default forbids.
# Its 250,000 lexer states may take 500 MB. Regular expressions over the whole vocabulary in advance
# took a second for what one reply hardly needs.
def _limits(n_symbols: int) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=20_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=200_000,
        max_lexer_states=50_000,
        max_grammar_size=n_symbols,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


LIMITS = _limits(65_000)  # llguidance can number no more symbols
SCHEMA_LIMITS = _limits(32_000)  # one of 500 optional properties has 8,000; unions multiply
# Of all tools together; one of four unions of four has 8,000 and takes 30 ms. Each is tried with
# the first limit that it keeps, and costs that much.
MAX_SYMBOLS = 100_000
MAX_WEIGHT = 150_000  # of all tools' schemas together
SIZES = (500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
N_TRIED = 48  # bytes of a document that are tried out before a schema is taken
MAX_SHOWN = 8  # of what a notice lists
CACHED = 64  # grammars; an agent repeats its own few

P = ParamSpec("P")
T = TypeVar("T")

SCHEMA_PARAM = "response_format.json_schema.schema"
GEMMA = ("", "")  # in the place of its markers, which calls.py knows
ANY_OBJECT = {"type": "object"}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def structure_grammar(
    structure: Structure, tools: Tools | None = None, protocol: TextProtocol | None = None
) -> tuple[Grammar, Notice | None]:
    """The grammar of a JSON document. With tools, calls may stand in its place.

    protocol  of the model: how it writes those

    Raises RequestError for a schema that is wrong, too large or can't be satisfied.
    """
    text, left_out = _document(structure.schema)
    if tools is None:
        return Grammar(text), _notice(left_out)
    if protocol is None or not can_hold_calls(protocol):
        return Grammar(text, may_call=True), _notice(left_out)
    calls, notice = calls_grammar(tools, protocol)
    return Grammar(text, may_call=True, calls=calls.text), _notice(left_out) or notice


def calls_grammar(tools: Tools, protocol: TextProtocol) -> tuple[Grammar, Notice | None]:
    """The grammar of one tool call, or of several where they may be; optional unless required.

    Raises RequestError for parameters that can't be enforced, and for families whose calls can't.
    """
    syntax = _syntax(protocol)
    if syntax is None:
        raise RequestError(
            "tool_choice: this model's tool calls can't be enforced",
            param="tool_choice",
            hint="ask with tool_choice auto",
        )
    markers = (protocol.call or ("", "")) if syntax == "json" else GEMMA
    said = _said(_held(tools))
    text, left_out = _calls(said, tools.is_parallel, syntax, markers, protocol.are_ids)
    return Grammar(text, is_call=True, is_optional=not tools.is_required), _notice(left_out)


def check(structure: Structure | None, tools: Tools | None) -> None:
    """Raises RequestError for what no model could be held to; asks for no tokenizer.

    What it makes is kept, so that on the engine's thread little is left to do.
    """
    if structure is not None:
        _document(structure.schema)
    if tools is not None and (tools.is_required or tools.is_strict):
        said = _said(_held(tools))
        _plain_tools(said)
        try:
            _calls(said, tools.is_parallel, "gemma", GEMMA, True)
        except RequestError as error:
            if TOO_COSTLY in error.message:  # other families may have what Gemma's syntax lacks
                raise


def _kept(make: Callable[P, T]) -> Callable[P, T]:
    """Makes each result once, a refusal as well; the least recently used goes first."""

    @lru_cache(CACHED)
    def outcome(*args: P.args, **kwargs: P.kwargs) -> tuple[T] | dict[str, Any]:
        try:
            return (make(*args, **kwargs),)
        except RequestError as error:
            return {"message": error.message, "param": error.param, "hint": error.hint}

    @wraps(make)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        found = outcome(*args, **kwargs)
        if isinstance(found, dict):
            raise RequestError(**found)
        return found[0]

    return again


def _notice(left_out: Sequence[str]) -> Notice | None:
    if not left_out:
        return None
    shown = ", ".join(left_out[:MAX_SHOWN])
    more = f" and {len(left_out) - MAX_SHOWN} more" if len(left_out) > MAX_SHOWN else ""
    return "strict_schema_not_enforced", f"the schema is enforced without {shown}{more}"


@_kept
def _document(schema: str) -> tuple[str, tuple[str, ...]]:
    plain = read(parsed(schema, SCHEMA_PARAM), SCHEMA_PARAM)
    text = LLMatcher.grammar_from_json_schema(_with_options(plain.schema))
    _try(text, SCHEMA_PARAM, SCHEMA_LIMITS)
    return text, plain.left_out


def _with_options(schema: Plain) -> Plain:
    return {**schema, "x-guidance": JSON_OPTIONS}


def _held(tools: Tools) -> Tools:
    """The tools with what calls are held to: where none must come, the strict ones' schemas."""
    if tools.is_required:
        return tools
    return replace(tools, offered=tuple(map(_loosened, tools.offered)))


def _loosened(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool["function"]
    return tool if function.get("strict") else {"function": {**function, "parameters": ANY_OBJECT}}


def _said(tools: Tools) -> str:
    """The tools that may be called, as JSON text: what grammars are cached by."""
    offered = [
        (f"tools[{index}].function.parameters", tool["function"]["name"], _parameters(tool))
        for index, tool in enumerate(tools.offered)
        if tools.only is None or tool["function"]["name"] == tools.only
    ]
    if not offered:
        raise RequestError(f"tool_choice: no tool {tools.only} is offered", param="tool_choice")
    try:
        text = json.dumps(offered)
    except (TypeError, ValueError, RecursionError) as error:
        raise refusal("tools", "nested too deep, or not JSON") from error
    if len(text) > MAX_CHARS:
        what = f"{len(text):,} characters of tools to choose from; at most {MAX_CHARS:,}"
        raise refusal("tools", what, "offer fewer tools, or name the one that must be called")
    return text


def _parameters(tool: Mapping[str, Any]) -> Any:
    parameters = tool["function"].get("parameters")
    return NO_PARAMETERS if parameters in (None, {}) else parameters


@_kept
def _plain_tools(said: str) -> tuple[tuple[str, str, PlainSchema], ...]:
    """(param, name, plain schema) of each tool; each could be compiled as JSON."""
    found: list[tuple[str, str, PlainSchema]] = []
    n_left, weight = MAX_SYMBOLS, 0
    for index, (param, name, parameters) in enumerate(json.loads(said)):
        plain = read(parsed(json.dumps(parameters), param), param, names=f"t{index}d")
        weight += plain.weight
        if weight > MAX_WEIGHT:
            raise refusal("tools", TOO_COSTLY, SIMPLER)
        n_left -= _try_sized(
            LLMatcher.grammar_from_json_schema(_with_options(plain.schema)), param, n_left
        )
        found.append((param, name, plain))
    return tuple(found)


def can_hold_calls(protocol: TextProtocol) -> bool:
    """Whether calls that come by themselves can be held to a schema from their marker on."""
    return protocol.are_ids and _syntax(protocol) is not None


def _syntax(protocol: TextProtocol) -> Literal["gemma", "json"] | None:
    """How the model's calls are written; None: in a way that has no grammar here."""
    reader = getattr(protocol.read_call, "__module__", "")
    if protocol.family == "gemma4" and protocol.are_ids:
        return "gemma"
    if protocol.family == "marked" and protocol.call and reader.endswith(".json_tools"):
        return "json"
    return None


@_kept
def _calls(
    said: str, is_parallel: bool, syntax: str, markers: tuple[str, str], are_ids: bool
) -> tuple[str, tuple[str, ...]]:
    tools = _plain_tools(said)
    left_out = [
        f"{what} of {name}" if len(tools) > 1 else what
        for _, name, plain in tools
        for what in plain.left_out
    ]
    if syntax == "gemma":
        text, more = _gemma_calls(tools, is_parallel)
        return text, tuple(dict.fromkeys([*left_out, *more]))
    return _json_calls(tools, is_parallel, markers, are_ids), tuple(left_out)


def _gemma_calls(
    tools: Sequence[tuple[str, str, PlainSchema]], is_parallel: bool
) -> tuple[str, list[str]]:
    named = [(name, plain.schema) for _, name, plain in tools]
    joint = tools[0][0] if len(tools) == 1 else "tools"
    try:
        tried, _ = calls(
            named, is_parallel, Signs('"\\u0001"', '"\\u0002"', '"\\u0003"', "[^\\x03]")
        )
        text, left_out = calls(named, is_parallel, Signs())
    except Unsayable as problem:
        param = next((p for p, name, _ in tools if str(problem).startswith(f"{name}:")), "tools")
        hint = "ask with tool_choice auto and without strict"
        raise refusal(param, str(problem), hint) from problem
    except TooLarge as problem:
        raise refusal(joint, TOO_COSTLY, SIMPLER) from problem
    _try(LLMatcher.grammar_from_lark(tried), joint, LIMITS)
    return LLMatcher.grammar_from_lark(text), left_out


def _json_calls(
    tools: Sequence[tuple[str, str, PlainSchema]],
    is_parallel: bool,
    markers: tuple[str, str],
    are_ids: bool,
) -> str:
    """Calls as JSON between markers: {"name": …, "arguments": …}."""
    options: list[Plain] = []
    defs: Plain = {}
    for _, name, plain in tools:
        defs |= plain.schema.get("$defs", {})
        arguments = {key: value for key, value in plain.schema.items() if key != "$defs"}
        call = {"name": {"const": name}, "arguments": {"allOf": [{"type": "object"}, arguments]}}
        options.append(
            {
                "type": "object",
                "properties": call,
                "required": list(call),
                "additionalProperties": False,
            }
        )
    schema = {"anyOf": options, **({"$defs": defs} if defs else {})}
    body = json.dumps(_with_options(schema))
    opens, closes = (_mark(marker, are_ids) for marker in markers)
    times = f"{{1,{MAX_CALLS}}}" if is_parallel and closes else ""
    rules = [
        f"start: one{times}",
        f"one: {opens} BLANK? call BLANK? {closes}",
        r'BLANK: "\n"',
        f"call: %json {body}",
    ]
    _try(LLMatcher.grammar_from_json_schema(_with_options(schema)), "tools", LIMITS)
    return LLMatcher.grammar_from_lark("\n".join(rules))


def _mark(marker: str, are_ids: bool) -> str:
    return sealed(marker) if are_ids and marker else json.dumps(marker) if marker else ""


# Trying out: a schema that compiles may still run into a limit at its first byte.

_PREFERRED = b'}]"0123456789:,ntf{[- \\'


@lru_cache(1)
def _bytes_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def _try_sized(text: str, param: str, most: int) -> int:
    """As _try: about how many symbols the grammar has, which must be at most `most`."""
    for size in SIZES:
        if size <= most:
            matcher = LLMatcher(_bytes_tokenizer(), text, log_level=0, limits=_limits(size))
            if "symbols) too big" not in matcher.get_error():
                _begin(matcher, param)
                return size
    raise refusal(param, TOO_COSTLY, SIMPLER)


def _try(text: str, param: str, limits: LLParserLimits) -> None:
    """Compile a grammar and begin a document of it. Raises RequestError with what is wrong."""
    _begin(LLMatcher(_bytes_tokenizer(), text, log_level=0, limits=limits), param)


def _begin(matcher: LLMatcher, param: str) -> None:
    if matcher.is_error():
        raise _complaint(matcher.get_error(), param)
    for _ in range(N_TRIED):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise _complaint(matcher.get_error(), param)
        allowed = np.unpackbits(bits, bitorder="little")[:256]
        if matcher.is_accepting() or not allowed.any():
            return
        byte = next((byte for byte in _PREFERRED if allowed[byte]), int(np.argmax(allowed)))
        matcher.consume_token(byte)


_COMPLAINTS: tuple[tuple[str, str, str | None], ...] = (
    (r"Regex is empty", "no text has its pattern and length", None),
    (r"Unsatisfiable schema: (.*)", "no document satisfies it: {}", None),
    (r"patternProperty regexes (.*) are not", "patternProperties {} overlap", "make them differ"),
    (
        r"panic|assertion|too (?:large|big|many|complex)|limit|fuel|max is|exceeded|determine",
        TOO_COSTLY,
        SIMPLER,
    ),
)


def first_line(complaint: str) -> str:
    """What llguidance says is wrong, short; its further lines show states of the parser."""
    return " ".join(complaint.split("\n", 1)[0].split())[:200]


def _complaint(message: str, param: str) -> RequestError:
    """The error that tells a client of llguidance's complaint."""
    line = first_line(message)
    for pattern, said, hint in _COMPLAINTS:
        if match := re.search(pattern, line):
            return refusal(param, said.format(*match.groups()), hint)
    return refusal(param, f"it can't be enforced: {line}")
