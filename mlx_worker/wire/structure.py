"""response_format → the form that a reply's text must have.

Owns the three formats and how long a schema may be. A schema is enforced whether it is called
strict or not. Leaves which schemas can be enforced to the engine. Pure; any thread.
"""

from collections.abc import Mapping
from typing import Any

from mlx_worker.records import Structure
from mlx_worker.wire.document import document, written
from mlx_worker.wire.fields import Reader, flag, free_object, missing, name, record, text, word

MAX_SCHEMA_BYTES = 256 * 1024


def response_format(path: str, value: Any) -> Structure | None:
    """None: any text."""
    kind = free_object(path, value).get("type")
    if kind is None:
        raise missing(path, "type")
    return FORMATS[word(*FORMATS)(f"{path}.type", kind)](path, value)


def _text(path: str, value: Any) -> None:
    ALONE(path, value)


def _object(path: str, value: Any) -> Structure:
    ALONE(path, value)
    return Structure('{"type":"object"}')


def _schema(path: str, value: Any) -> Structure:
    given = WITH_SCHEMA(path, value)["json_schema"]
    where = f"{path}.json_schema.schema"
    return Structure(written(where, given["schema"], MAX_SCHEMA_BYTES))


ALONE = record({"type": text})
JSON_SCHEMA = record(
    {"name": name, "schema": document, "strict": flag, "description": text},
    required=["name", "schema"],
)
WITH_SCHEMA = record({"type": text, "json_schema": JSON_SCHEMA}, required=["json_schema"])
FORMATS: Mapping[str, Reader] = {"text": _text, "json_object": _object, "json_schema": _schema}
