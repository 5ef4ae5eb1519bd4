"""The keys of scenario files for readers: the lines of `--help`, and scenario.schema.json.

Owns how the table of scenario.py is shown. Pure; any thread.

`python -m mlx_worker.control.scenario_schema > mlx_worker/control/scenario.schema.json`
"""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import fields

from mlx_worker.control.scenario import (
    AT_REQUEST,
    CHANGES,
    CHANGES_ABOUT,
    ITEMS,
    Key,
    Replies,
    Scenario,
    Workload,
    keys,
    limit,
)
from mlx_worker.records import MAX_DEPTH

HELP_COLUMNS, INDENT = 96, "      "
REPLIES, MACHINE, WORKLOAD, CHANGE = (
    {"$ref": f"#/$defs/{name}"} for name in ("replies", "machine", "workload", "change")
)
CLOSED = {"type": "object", "unevaluatedProperties": False}


def described_keys() -> Iterator[str]:
    """Two lines for each key: name, default and limits; then its sentence."""
    for title, of, skipped in (("scenario", Scenario, ()), ("workload", Workload, keys(Replies))):
        yield f"keys of a {title}:"
        for name, key in keys(of).items():
            if name not in skipped:
                yield f"  {name} = {json.dumps(default_of(of, name))}    {limit(key)}"
                yield about(key.about)
    yield "changes of a scenario:"
    yield f"  {CHANGES} = []    a list of objects"
    yield about(CHANGES_ABOUT)


def about(sentence: str) -> str:
    """What stands below a key in --help."""
    return textwrap.fill(sentence, HELP_COLUMNS, initial_indent=INDENT, subsequent_indent=INDENT)


def default_of(of: type[Replies], name: str) -> object:
    return next(each.default for each in fields(of) if each.name == name)


def schema() -> dict[str, object]:
    """scenario.schema.json. Each key stands in it once; workloads and changes refer to them."""
    machine = {name: key for name, key in keys(Scenario).items() if name not in keys(Replies)}
    requests = {"requests": machine.pop("requests")}
    workload = {name: key for name, key in keys(Workload).items() if name not in keys(Replies)}
    at_request = {AT_REQUEST: {"type": "integer", "minimum": 1}}
    changes = {"description": CHANGES_ABOUT, "type": "array", "items": CHANGE}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A scenario of mlx_worker.control.simulate",
        **CLOSED,
        "allOf": [REPLIES, MACHINE],
        "properties": {
            "$schema": {"type": "string"},
            **_properties(Scenario, requests),
            CHANGES: changes,
        },
        "$defs": {
            "replies": {"properties": _properties(Replies, keys(Replies))},
            "machine": {"properties": _properties(Scenario, machine)},
            "workload": {
                **CLOSED,
                "allOf": [REPLIES],
                "properties": _properties(Workload, workload),
            },
            "change": {
                **CLOSED,
                "required": [AT_REQUEST],
                "allOf": [REPLIES, MACHINE],
                "properties": at_request,
            },
        },
    }


def _properties(of: type[Replies], chosen: dict[str, Key]) -> dict[str, object]:
    return {name: _property(key, default_of(of, name)) for name, key in chosen.items()}


def _property(key: Key, default: object) -> dict[str, object]:
    bounds = {} if key.low is None else {"minimum": key.low, "maximum": key.high}
    common = {"description": key.about, "default": default}
    if key.kind == "workloads":
        return {**common, "type": "array", "items": WORKLOAD}
    if key.kind in ITEMS:
        one: dict[str, object] = {"type": ITEMS[key.kind], **bounds}
        many = {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_DEPTH}
        return {**common, "anyOf": [one, many]}
    if key.choices:
        return {**common, "enum": key.choices}
    return {**common, "type": [key.kind, "null"] if key.is_optional else key.kind, **bounds}


def schema_text() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
