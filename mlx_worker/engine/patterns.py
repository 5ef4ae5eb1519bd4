"""Regular expressions of a JSON Schema: the known formats, and a client's own pattern.

Owns which pattern can be enforced, and how it is spelled for llguidance, whose dialect is Rust's;
a schema's is ECMAScript's. Leaves the rest of a schema to schema.py. Pure; any thread.
"""

import re
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from llguidance import LLMatcher

MAX_PATTERN_CHARS = 2_000
# Characters that a pattern has once its repeats are written out, and how often those of a repeated
# group count. (a{1000}){1000}: its first mask took 10 s and 330 MB at 262,144 ids; to be tried,
# (a{260}){260} takes 1 s, (a{100}){100} 0.2 s, and [a-z]{1,65000} no time (2-core EPYC).
MAX_REPEATED_CHARS = 70_000
GROUP_WEIGHT = 6

Verdict = Literal["enforced", "beyond", "invalid", "too large"]

_YEAR_AND_DAY = (
    r"(?:(?:0[1-9]|[1-9][0-9])[0-9]{2}|00(?:0[1-9]|[1-9][0-9]))-"
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_DAY = (
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
)
_DATE = f"(?:{_YEAR_AND_DAY}|{_LEAP_DAY})"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"  # of four labels at most, so of 255 characters
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_H16 = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_H16}:){{7}}{_H16}",
        *(f"(?:{_H16}:){{{n}}}(?::{_H16}){{1,{7 - n}}}" for n in range(1, 7)),
        f"(?:{_H16}:){{1,7}}:",
        f":(?::{_H16}){{1,7}}",
        "::",
    ]
)
_URI_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]{{0,20}}:(?://(?:{_NAME}|{_IPV4})(?::[0-9]{{1,4}})?(?:/{_URI_CHAR}*)*"
    rf"|{_URI_CHAR}+(?:/{_URI_CHAR}*)*)(?:\?(?:{_URI_CHAR}|[/?])*)?(?:#(?:{_URI_CHAR}|[/?])*)?"
)
_DURATION = (
    r"P(?:[0-9]{1,9}W|(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?"
    r"|[0-9]{1,9}D)(?:T{T})?|T{T})"
).replace(
    "{T}",
    r"(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)",
)

# Each is narrower than its RFC where that keeps every reader content: no leap second, no year 0,
# no 29 February but in leap years (llguidance's own `date` has one in each year).
FORMATS: dict[str, str] = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": _DURATION,
        "email": rf"{_ATOM}(?:\.{_ATOM}){{0,5}}@{_NAME}",
        "hostname": _NAME,
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uuid": r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
        "uri": _URI,
    }.items()
}


@lru_cache(maxsize=4096)
def verdict(pattern: str) -> Verdict:
    """enforced: llguidance reads it; beyond: only a backtracking engine would; invalid: none."""
    if len(pattern) > MAX_PATTERN_CHARS or repeated_chars(pattern) > MAX_REPEATED_CHARS:
        return "too large"
    schema: dict[str, Any] = {"type": "string", "pattern": spelled(pattern)}
    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        LLMatcher.grammar_from_json_schema(schema)
    )
    if not is_error:
        return "enforced"
    if "Unsatisfiable" in messages[0]:
        return "enforced"  # its letters are readable; that nothing matches is the schema's fault
    return "beyond" if _is_python(pattern) else "invalid"


@lru_cache(maxsize=1024)
def fits(pattern: str, **lengths: int) -> bool:
    """Whether llguidance can follow a `spelled` pattern and keep minLength and maxLength too."""
    schema: dict[str, Any] = {"type": "string", "pattern": pattern, **lengths}
    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        LLMatcher.grammar_from_json_schema(schema)
    )
    return not is_error or "Unsatisfiable" in messages[0]


def _is_python(pattern: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            re.compile(re.sub(r"\(\?<(?=[A-Za-z_])", "(?P<", pattern))
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def spelled(pattern: str) -> str:
    """A pattern with what only Rust finds special made plain: set operations, stray braces."""
    found: list[str] = []
    atoms = _atoms(pattern)
    for (atom, is_in_class), following in zip(atoms, [*atoms[1:], ("", False)], strict=True):
        is_set_operation = atom in ("[", "&", "~") or (atom == "-" and following == ("-", True))
        is_stray = atom in ("{", "}") and not is_in_class
        is_escaped = (is_in_class and is_set_operation) or is_stray
        found.append(f"\\{atom}" if is_escaped else atom)
    return "".join(found)


_QUANTIFIER = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
_ESCAPED = re.compile(r"\\(?:[pPux]\{[^}]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.)", re.DOTALL)


def _atoms(pattern: str) -> list[tuple[str, bool]]:
    """Its escapes, quantifiers and single characters; whether each is inside a class's brackets."""
    found: list[tuple[str, bool]] = []
    at, class_at = 0, -1  # class_at: where the open class's first member stands
    while at < len(pattern):
        match = _ESCAPED.match(pattern, at) or (
            _QUANTIFIER.match(pattern, at) if class_at < 0 else None
        )
        atom = match[0] if match else pattern[at]
        is_close = class_at >= 0 and atom == "]" and at > class_at
        found.append((atom, class_at >= 0 and not is_close))
        at += len(atom)
        if is_close:
            class_at = -1
        elif class_at < 0 and atom == "[":
            class_at = at + pattern.startswith("^", at)
    return found


def repeated_chars(pattern: str) -> int:
    """How many characters it has once each {m,n} is written out; groups weigh more."""
    open_groups, size, last, is_in_class = [], 0, 0, False
    for atom, in_class in _atoms(pattern):
        if in_class or (is_in_class and atom == "]"):
            is_in_class, last = in_class, 0
            continue
        if atom == "(":
            open_groups.append(size)
            size, last = 0, 0
        elif atom == ")":
            last = size
            size = (open_groups.pop() if open_groups else 0) + last
        elif _QUANTIFIER.fullmatch(atom):
            times = max(int(n) for n in atom[1:-1].split(",") if n)
            weight = GROUP_WEIGHT if last > 1 else 1
            size += weight * max(last, 1) * max(times - 1, 0)
            last = max(last, 1) * times
        else:
            size, last = size + 1, 1
    return size + sum(open_groups)


def whole(pattern: str) -> str | None:
    """A `spelled` pattern as one that matches a text from end to end; None where that is hard.

    A schema's pattern may match anywhere; the regular expressions of a grammar have no anchors.
    """
    atoms = _atoms(pattern)
    body = atoms[1:] if atoms and atoms[0][0] == "^" else atoms
    ends_at_end = bool(body) and body[-1] == ("$", False)
    body = body[:-1] if ends_at_end else body
    if any(not in_class and atom in ("^", "$") for atom, in_class in body):
        return None
    is_anchored = ends_at_end or len(body) < len(atoms)
    if is_anchored and _has_alternatives(body):
        return None
    before = "" if atoms and atoms[0][0] == "^" else "(?s:.*)"
    text = "".join(atom for atom, _ in body)
    return f"{before}(?:{text}){'' if ends_at_end else '(?s:.*)'}"


def _has_alternatives(atoms: Sequence[tuple[str, bool]]) -> bool:
    """Whether an | stands outside of every group."""
    n_open = 0
    for atom, in_class in atoms:
        n_open += 0 if in_class else (atom == "(") - (atom == ")")
        if atom == "|" and not in_class and n_open == 0:
            return True
    return False
