"""The forms of what the gateway takes and answers, as JSON Schemas of the OpenAPI document.

Owns the words and limits that the document gives; that they are the true ones, the tests see to
against a running gateway. Pure; any thread.
"""

from typing import Any, get_args

from mlx_worker.gateway.api_reading import MOST_NAME_CHARS
from mlx_worker.gateway.api_usage import COLUMNS
from mlx_worker.gateway.records import ALLOWED, PERMISSIONS
from mlx_worker.records import State

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
WHOLE: Schema = {"type": "integer"}
ID: Schema = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
TIME: Schema = {"type": "number", "description": "Unix seconds"}
MODE: Schema = {"type": "string", "enum": ["auto", "off"]}
ROLE: Schema = {"type": "string", "enum": list(ALLOWED)}
PERMISSION: Schema = {"type": "string", "enum": list(PERMISSIONS)}
NAME: Schema = {
    "type": "string",
    "minLength": 1,
    "maxLength": MOST_NAME_CHARS,
    "description": "visible characters; spaces around them are dropped",
}


def maybe(schema: Schema) -> Schema:
    """It, or null."""
    if "type" not in schema or "enum" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}


def listed(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def record(**properties: Schema) -> Schema:
    """An object with just these, each of them there."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def some_of(*required: str, **properties: Schema) -> Schema:
    """A body: with just these, some of which must be there."""
    found = {**record(**properties), "required": list(required)}
    return found if required else {**found, "minProperties": 1}


def with_more(name: str, **properties: Schema) -> Schema:
    """A named form with more in it."""
    base = SCHEMAS[name]
    return record(**base["properties"], **properties)


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def data_of(name: str) -> Schema:
    return record(data=listed(ref(name)))


def page_of(name: str) -> Schema:
    cursor = {**maybe(TEXT), "description": "of the next page; null: there is none"}
    return record(data=listed(ref(name)), next_cursor=cursor)


SCHEMAS: dict[str, Schema] = {
    "Error": record(error=record(message=TEXT, type=TEXT, param=maybe(TEXT), code=maybe(TEXT))),
    "Health": {"type": "object", "properties": {"status": {"const": "ok"}}, "required": ["status"]},
    "Organisation": record(id=ID, name=TEXT, is_speculation_available=FLAG),
    "Me": record(
        organisation=ref("Organisation"),
        key=record(id=ID, name=TEXT, role=ROLE, hint=TEXT),
        permissions=listed(PERMISSION),
        display_name=TEXT,
    ),
    "Key": record(
        id=ID,
        name=TEXT,
        role=ROLE,
        permissions={**listed(PERMISSION), "description": "beside those of its role"},
        hint={**TEXT, "description": "its first characters"},
        created=TIME,
    ),
    "Settings": record(
        speculative_decoding=MODE, kv_prefix_cache=FLAG, run_requests_together=FLAG
    ),
    "Measured": record(
        state={"enum": list(get_args(State))},
        speedup={**maybe(NUMBER), "description": "a fraction: 0.24 is +24%"},
        low=maybe(NUMBER),
        high=maybe(NUMBER),
        depth=maybe(WHOLE),
        acceptance=maybe(NUMBER),
        tokens_per_round=maybe(NUMBER),
        cost=maybe(NUMBER),
        spread=maybe(NUMBER),
        requests=WHOLE,
        tokens=WHOLE,
        loss=NUMBER,
        loss_share=NUMBER,
        since_s=NUMBER,
        why=TEXT,
    ),
    "Line": record(
        id=TEXT,
        is_loaded=FLAG,
        context_tokens=maybe(WHOLE),
        model_bytes=maybe(WHOLE),
        draft=maybe(TEXT),
        draft_bytes=maybe(WHOLE),
        draft_problem=maybe(TEXT),
        speculation={**maybe(TEXT), "description": "the line as the console shows it, if any"},
        measured=maybe(ref("Measured")),
    ),
    "Worker": record(
        id=ID,
        name=TEXT,
        version=maybe(TEXT),
        connected=FLAG,
        since={**maybe(TIME), "description": "when this connection began, in Unix seconds"},
        seen={**maybe(TIME), "description": "when it was last here, in Unix seconds"},
        draining=FLAG,
        settings=maybe(ref("Settings")),
        settings_problem=maybe(TEXT),
        settings_pending={**FLAG, "description": "a change waits for the worker's word"},
        speculative_pinned_off={
            "type": ["boolean", "null"],
            "description": "switched off by its settings; null: it can't be set from here",
        },
        takes=record(
            speculative_decoding=FLAG, kv_prefix_cache=FLAG, run_requests_together=FLAG
        ),
        platform=record(speculative_decoding=MODE, display_name=TEXT),
        queue=maybe({"type": "object"}),
        memory=maybe({"type": "object"}),
        power=maybe(
            record(
                is_on_battery={"type": ["boolean", "null"]},
                thermal={
                    **maybe(TEXT),
                    "description": "nominal, fair, serious or critical, from serious on slowed "
                    "down by heat; older workers say throttled; null: it isn't said",
                },
                is_low_power={"type": ["boolean", "null"]},
            )
        ),
        models=listed(ref("Line")),
    ),
    "UsageRow": {
        **record(
            **{
                **dict.fromkeys(COLUMNS, maybe(TEXT)),
                **dict.fromkeys(("at", "tokens_per_second", "ttft_ms", "ended"), maybe(NUMBER)),
                **dict.fromkeys(("prompt_tokens", "completion_tokens"), maybe(WHOLE)),
                "id": WHOLE,
                "is_streamed": FLAG,
                "draft_acceptance_rate": {
                    **maybe(NUMBER),
                    "description": "accepted over drafted, 0 to 1; null: no draft was used",
                },
            }
        )
    },
    "AuditEntry": record(
        id=WHOLE, at=TIME, actor=TEXT, action=TEXT, target=TEXT, details=TEXT
    ),
    "Revision": record(revision=WHOLE),
    "PlatformState": record(speculative_decoding=MODE, display_name=TEXT, revision=WHOLE),
    "ChatRequest": {
        "type": "object",
        "description": "as OpenAI's, with the extensions of the worker's own API",
        "properties": {
            "model": TEXT,
            "messages": {"type": "array", "items": {"type": "object"}, "minItems": 1},
            "stream": maybe(FLAG),
            "speculation": maybe({"type": "string", "enum": ["auto", "on", "off"]}),
        },
        "required": ["model", "messages"],
    },
    "CompletionRequest": {
        "type": "object",
        "description": "as OpenAI's, with the extensions of the worker's own API",
        "properties": {"model": TEXT, "prompt": {}, "stream": maybe(FLAG)},
        "required": ["model", "prompt"],
    },
    "Completion": {
        "type": "object",
        "description": "as OpenAI's; pendra has worker, timing and request_id",
        "properties": {
            "id": TEXT,
            "object": TEXT,
            "model": TEXT,
            "choices": {"type": "array", "items": {"type": "object"}},
            "usage": {"type": "object"},
            "pendra": {"type": "object"},
        },
        "required": ["id", "object", "model", "choices"],
    },
    "Model": {
        "type": "object",
        "properties": {
            "id": TEXT, "object": {"const": "model"}, "created": WHOLE, "owned_by": TEXT,
        },
        "required": ["id", "object"],
    },
    "Models": {
        "type": "object",
        "properties": {"object": {"const": "list"}, "data": listed(ref("Model"))},
        "required": ["object", "data"],
    },
}  # fmt: skip
