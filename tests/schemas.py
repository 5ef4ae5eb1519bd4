"""Fifty-odd JSON Schemas, as varied as clients' are; each is enforced whole."""

from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Address(BaseModel):
    street: str
    zip: str = Field(pattern=r"^\d{5}$")
    country: Literal["DE", "FR"] = "DE"


class Person(BaseModel):
    """What pydantic makes of a nested model with defaults, an enum and a union."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=20)
    age: int = Field(ge=0, le=150)
    address: Address
    favourite: Colour | None = None
    tags: list[str] = Field(default_factory=list, max_length=3)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Owner(BaseModel):
    pet: Cat | Dog = Field(discriminator="kind")
    score: float = Field(ge=0, lt=10)


class Tree(BaseModel):
    value: int
    left: "Tree | None" = None
    right: "Tree | None" = None


def closed(is_required: bool = True, /, **properties: Any) -> dict[str, Any]:
    """An object of these properties alone; all required, or none."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if is_required else [],
        "additionalProperties": False,
    }


STRING = {"type": "string"}
INTEGER = {"type": "integer"}

SCHEMAS: list[tuple[str, dict[str, Any]]] = [
    ("json_object", {"type": "object"}),
    ("anything", {}),
    ("two fields", closed(city=STRING, days=INTEGER)),
    ("open object", {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}),
    ("all optional", closed(False, a=STRING, b=INTEGER, c={"type": "boolean"})),
    (
        "optional around required",
        closed(False, a=INTEGER, b=STRING, c=INTEGER, d=STRING) | {"required": ["b"]},
    ),
    ("required beyond properties", {"type": "object", "required": ["x", "y"]}),
    ("map of integers", {"type": "object", "additionalProperties": INTEGER}),
    (
        "map with a field",
        {
            "type": "object",
            "properties": {"id": STRING},
            "required": ["id"],
            "additionalProperties": INTEGER,
        },
    ),
    ("string", STRING),
    ("short string", {"type": "string", "minLength": 2, "maxLength": 5}),
    ("integer", INTEGER),
    ("number", {"type": "number"}),
    ("boolean", {"type": "boolean"}),
    ("null", {"type": "null"}),
    ("bounded integer", {"type": "integer", "minimum": -3, "maximum": 17}),
    ("open bounds", {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10}),
    ("bounded number", {"type": "number", "minimum": -1.5, "maximum": 2.25}),
    ("int64", {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}),
    ("float32", {"type": "number", "minimum": -3.4028235e38, "maximum": 3.4028235e38}),
    ("multiple", {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000}),
    ("half steps", {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 50}),
    ("enum", {"enum": ["red", "green", "blue"]}),
    ("mixed enum", {"enum": [1, 2.5, None, True, "x", [1, "a"], {"k": "v"}]}),
    ("long enum", {"type": "string", "enum": [f"option-{n}" for n in range(500)]}),
    ("typed enum", {"type": "string", "enum": ["a", "b", 3, None]}),
    ("const", closed(version={"const": 2}, kind={"const": "point"}, x={"type": "number"})),
    ("const object", {"const": {"b": [1, {"c": None}], "a": "é"}}),
    ("list", {"type": "array", "items": INTEGER}),
    ("bounded list", {"type": "array", "items": STRING, "minItems": 2, "maxItems": 4}),
    (
        "nested lists",
        {"type": "array", "items": {"type": "array", "items": INTEGER, "maxItems": 3}},
    ),
    (
        "tuple",
        {
            "type": "array",
            "prefixItems": [STRING, INTEGER, {"type": "boolean"}],
            "items": False,
            "minItems": 3,
        },
    ),
    (
        "tuple with a tail",
        {"type": "array", "prefixItems": [STRING], "items": INTEGER, "minItems": 2, "maxItems": 4},
    ),
    ("list of objects", closed(rows={"type": "array", "items": closed(id=INTEGER, name=STRING)})),
    ("any of types", {"type": ["string", "integer", "null"]}),
    ("any of", {"anyOf": [INTEGER, closed(error=STRING), {"type": "array", "items": STRING}]}),
    ("one of types", {"oneOf": [STRING, INTEGER, {"type": "null"}]}),
    (
        "one of by kind",
        {
            "oneOf": [
                closed(kind={"const": "a"}, x=INTEGER),
                closed(kind={"const": "b"}, y=STRING),
                closed(kind={"enum": ["c", "d"]}),
            ]
        },
    ),
    (
        "all of",
        {
            "allOf": [
                {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
                {"type": "object", "properties": {"b": STRING}, "required": ["b"]},
            ]
        },
    ),
    (
        "either of two fields",
        closed(False, a=INTEGER, b=INTEGER)
        | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ),
    (
        "refs",
        closed(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"})
        | {"$defs": {"point": closed(x={"type": "number"}, y={"type": "number"})}},
    ),
    (
        "definitions",
        {
            "definitions": {"name": {"type": "string", "maxLength": 8}},
            **closed(first={"$ref": "#/definitions/name"}, last={"$ref": "#/definitions/name"}),
        },
    ),
    (
        "recursive list",
        closed(False, value=INTEGER, next={"$ref": "#"}) | {"required": ["value"]},
    ),
    (
        "recursive tree",
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": closed(
                    name=STRING, children={"type": "array", "items": {"$ref": "#/$defs/node"}}
                )
            },
        },
    ),
    ("pattern", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    ("pattern anywhere", {"type": "string", "pattern": "ab+c", "maxLength": 12}),
    ("alternatives", {"type": "string", "pattern": "^(yes|no|maybe)$"}),
    ("date", {"type": "string", "format": "date"}),
    ("date-time", closed(at={"type": "string", "format": "date-time"})),
    ("time", {"type": "string", "format": "time"}),
    ("uuid", closed(id={"type": "string", "format": "uuid"})),
    ("email", {"type": "string", "format": "email"}),
    ("ipv4", {"type": "string", "format": "ipv4"}),
    ("ipv6", {"type": "string", "format": "ipv6"}),
    ("hostname", {"type": "string", "format": "hostname"}),
    ("uri", closed(link={"type": "string", "format": "uri"})),
    ("duration", {"type": "string", "format": "duration"}),
    ("unicode keys", closed(**{"größe": INTEGER, "名前": STRING, "😀": {"type": "null"}})),
    ("odd keys", closed(**{"a b": INTEGER, 'q"uote': STRING, "back\\slash": {"type": "null"}})),
    (
        "pattern properties",
        {
            "type": "object",
            "patternProperties": {"^n_[a-z]{1,4}$": INTEGER, "^s_[a-z]{1,4}$": STRING},
            "additionalProperties": False,
        },
    ),
    ("one property at least", closed(False, a=INTEGER, b=STRING) | {"minProperties": 1}),
    ("nullable by anyOf", closed(note={"anyOf": [STRING, {"type": "null"}]})),
    ("deep", closed(a=closed(b=closed(c=closed(d=closed(e={"type": "boolean"})))))),
    (
        "older draft",
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [STRING, INTEGER],
            "additionalItems": False,
        },
    ),
    ("pydantic person", Person.model_json_schema()),
    ("pydantic union", Owner.model_json_schema()),
    ("pydantic tree", Tree.model_json_schema()),
]  # fmt: skip
