"""GET /openapi.json: every endpoint of the gateway, in OpenAPI 3.1.

Owns which operations there are, who may call them and what they answer. Leaves the forms of bodies
to openapi_parts.py. Built once, when the module is imported; pure but for the handler.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from aiohttp import web

from mlx_worker import __version__
from mlx_worker.gateway.api_reading import MOST_FILTER_CHARS
from mlx_worker.gateway.openapi_parts import (
    FLAG,
    ID,
    MODE,
    NAME,
    PERMISSION,
    ROLE,
    SCHEMAS,
    TEXT,
    Schema,
    data_of,
    listed,
    page_of,
    ref,
    some_of,
    with_more,
)
from mlx_worker.gateway.security import CSRF_HEADER
from mlx_worker.gateway.store import MOST_ROWS
from mlx_worker.http.replies import json_reply

ERRORS = {
    400: "the request is not valid",
    401: "no key, or a wrong one",
    403: "the key lacks the permission, or a page of another origin asks",
    404: "there is none, or it is another organisation's",
    408: "the body took too long to come",
    409: "it can't be done as things stand",
    413: "the body is too large",
    415: "a body must be application/json",
    421: "the gateway does not go by the name in Host",
    422: "a value can't be",
    429: "too many wrong keys or streams; see Retry-After",
    500: "a fault of the gateway's",
    502: "a worker's reply broke off",
    503: "it can't be done now",
    504: "a worker took too long",
}
EVERY = (400, 421, 500, 503)  # that any request may be answered with
KEYED = (401, 403)
BODY = (408, 413, 415, 422)
KEY_OR_COOKIE = [{"key": []}, {"session": []}]
KEY = [{"key": []}]
NOBODY: list[dict[str, list[str]]] = []


def _media(schema: Schema, kind: str = "application/json") -> dict[str, Any]:
    return {kind: {"schema": schema}}


def _operation(
    id: str,
    summary: str,
    answers: dict[int, dict[str, Any] | None],
    *,
    body: Schema | None = None,
    parameters: Sequence[dict[str, Any]] = (),
    errors: Iterable[int] = (),
    security: list[dict[str, list[str]]] = KEY_OR_COOKIE,
) -> dict[str, Any]:
    """answers: status → media of the reply; None: it has no body."""
    codes = {*errors, *EVERY, *(KEYED if security else ()), *(BODY if body else ())}
    responses: dict[str, Any] = {
        str(code): {"description": "done", **({"content": media} if media else {})}
        for code, media in answers.items()
    }
    responses |= {
        str(code): {"description": ERRORS[code], "content": _media(ref("Error"))}
        for code in sorted(codes)
    }
    found: dict[str, Any] = {
        "operationId": id,
        "summary": summary,
        "security": security,
        "responses": responses,
    }
    if parameters:
        found["parameters"] = list(parameters)
    if body:
        found["requestBody"] = {"required": True, "content": _media(body)}
    return found


def _query(name: str, schema: Schema, description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _path_id(schema: Schema) -> dict[str, Any]:
    return {"name": "id", "in": "path", "required": True, "schema": schema}


WORD: Schema = {"type": "string", "minLength": 1, "maxLength": MOST_FILTER_CHARS}
MOMENT: Schema = {"type": "string", "minLength": 1, "examples": ["2026-11-30T12:00:00Z"]}
CURSOR = _query(
    "cursor",
    {"type": "string", "pattern": "^(0|[1-9][0-9]{0,17})$"},
    "next_cursor of the page before",
)
LIMIT = _query("limit", {"type": "integer", "minimum": 1, "maximum": MOST_ROWS}, "rows of a page")
OWN_ID = _path_id(ID)
FILTERS = [
    _query("worker", WORD, "the id of a worker"),
    _query("key", WORD, "the id of a key"),
    _query("model", WORD, "a model's name"),
    _query("since", MOMENT, "Unix seconds or a date; the moment itself counts"),
    _query("until", MOMENT, "Unix seconds or a date; the moment itself doesn't count"),
    _query("error", WORD, "a code; any: only failed requests; none: only those that went well"),
    _query("format", {"type": "string", "enum": ["json", "csv"]}, "csv: all rows as a table"),
    CURSOR,
    LIMIT,
]
PIN = {
    "name": "X-Pendra-Worker-Id",
    "in": "header",
    "schema": ID,
    "description": "the worker that must answer",
}
SENT = (404, 409)
CHAT_ERRORS = (404, 408, 413, 415, 429, 502, 504)

SESSION = {
    "post": _operation(
        "signIn", "Sign in with a key; answers with a cookie", {204: None},
        body=some_of("key", key=TEXT), errors=(401, 403, 429), security=NOBODY,
    ),
    "delete": _operation("signOut", "End the session", {204: None}),
}  # fmt: skip
WORKERS = {
    "get": _operation("listWorkers", "All workers", {200: _media(data_of("Worker"))}, errors=[404]),
    "post": _operation(
        "addWorker", "Add a worker; the one reply that has its key",
        {201: _media(with_more("Worker", key=TEXT))}, body=some_of("name", name=NAME),
        errors=[404],
    ),
}  # fmt: skip
WORKER = {
    "get": _operation("getWorker", "One worker", {200: _media(ref("Worker"))},
                      parameters=[OWN_ID], errors=[404]),
    "delete": _operation("disableWorker", "Disable a worker, for good", {204: None},
                         parameters=[OWN_ID], errors=[404]),
}  # fmt: skip
SWITCH = {
    "patch": _operation(
        "switchSpeculation", "Speculative decoding of a worker: automatic, or off",
        {202: _media(ref("Revision"))}, body=some_of("mode", mode=MODE), parameters=[OWN_ID],
        errors=SENT,
    )
}  # fmt: skip
SETTINGS = {
    "patch": _operation(
        "changeSettings", "Other settings of a worker", {202: _media(ref("Revision"))},
        body=some_of(kv_prefix_cache=FLAG, run_requests_together=FLAG), parameters=[OWN_ID],
        errors=SENT,
    )
}  # fmt: skip
USAGE = {
    "get": _operation(
        "listUsage", "One row a request, the newest first",
        {200: {**_media(page_of("UsageRow")), **_media(TEXT, "text/csv")}}, parameters=FILTERS,
        errors=[422],
    )
}  # fmt: skip
KEYS = {
    "get": _operation("listKeys", "Keys that aren't revoked", {200: _media(data_of("Key"))}),
    "post": _operation(
        "createKey", "Make a key; the one reply that has it",
        {201: _media(with_more("Key", secret=TEXT))},
        body=some_of("name", "role", name=NAME, role=ROLE, permissions=listed(PERMISSION)),
    ),
}  # fmt: skip
REVOKE = {
    "delete": _operation("revokeKey", "Revoke a key, and end its sessions", {204: None},
                         parameters=[OWN_ID], errors=SENT),
}  # fmt: skip
AUDIT = {
    "get": _operation("listAudit", "Who changed what", {200: _media(page_of("AuditEntry"))},
                      parameters=[CURSOR, LIMIT], errors=[422]),
}  # fmt: skip
EVENTS = {
    "get": _operation("listen", "Says when what a console shows has changed",
                      {200: _media(TEXT, "text/event-stream")}, errors=(429,)),
}  # fmt: skip
PLATFORM = {
    "patch": _operation(
        "switchPlatform", "Speculative decoding on all workers or on some, by the platform",
        {200: _media(ref("PlatformState"))}, security=KEY,
        body=some_of("mode", mode=MODE, workers={**listed(TEXT), "minItems": 1}),
    )
}  # fmt: skip
ORGANISATIONS = {
    "get": _operation("listOrganisations", "All organisations",
                      {200: _media(data_of("Organisation"))}, security=KEY),
}  # fmt: skip
OFFER = {
    "patch": _operation(
        "offerSpeculation", "Whether an organisation is offered speculative decoding",
        {200: _media(ref("Organisation"))}, security=KEY, parameters=[OWN_ID], errors=[404],
        body=some_of("is_speculation_available", is_speculation_available=FLAG),
    )
}  # fmt: skip


def _writes(id: str, summary: str, form: str) -> dict[str, Any]:
    answer = {**_media(ref("Completion")), **_media(TEXT, "text/event-stream")}
    found = _operation(id, summary, {200: answer}, body=ref(form), parameters=[PIN],
                       errors=CHAT_ERRORS)  # fmt: skip
    return {"post": found}


PATHS: dict[str, dict[str, Any]] = {
    "/health": {
        "get": _operation("health", "Whether it runs", {200: _media(ref("Health"))},
                          security=NOBODY, errors=[403])
    },
    "/openapi.json": {
        "get": _operation("openapi", "This document", {200: _media({"type": "object"})},
                          security=NOBODY, errors=[403])
    },
    "/v1/chat/completions": _writes("chat", "Write a reply to messages", "ChatRequest"),
    "/v1/completions": _writes("complete", "Go on from a text", "CompletionRequest"),
    "/v1/models": {
        "get": _operation("listModels", "Models that connected workers serve",
                          {200: _media(ref("Models"))})
    },
    "/v1/models/{id}": {
        "get": _operation("getModel", "One of them", {200: _media(ref("Model"))},
                          parameters=[_path_id(TEXT)], errors=[404])
    },
    "/api/v1/session": SESSION,
    "/api/v1/me": {
        "get": _operation("me", "Whose key this is", {200: _media(ref("Me"))}, errors=[404])
    },
    "/api/v1/workers": WORKERS,
    "/api/v1/workers/{id}": WORKER,
    "/api/v1/workers/{id}/speculative-decoding": SWITCH,
    "/api/v1/workers/{id}/settings": SETTINGS,
    "/api/v1/usage": USAGE,
    "/api/v1/keys": KEYS,
    "/api/v1/keys/{id}": REVOKE,
    "/api/v1/audit": AUDIT,
    "/api/v1/events": EVENTS,
    "/api/v1/platform/speculative-decoding": PLATFORM,
    "/api/v1/platform/organisations": ORGANISATIONS,
    "/api/v1/platform/organisations/{id}": OFFER,
}  # fmt: skip

DOCUMENT: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {
        "title": "mlx-worker gateway",
        "version": __version__,
        "description": "Replies from an organisation's workers, and what is known and set of them.",
    },
    "paths": PATHS,
    "components": {
        "schemas": SCHEMAS,
        "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer", "description": "mwk_…, mwp_…"},
            "session": {
                "type": "apiKey",
                "in": "cookie",
                "name": "mlx_gateway_session",
                "description": "of the console; a change then needs our own Origin and the "
                f"header {CSRF_HEADER}",
            },
        },
    },
}


async def show(request: web.Request) -> web.Response:
    return json_reply(DOCUMENT)


ROUTES = [web.get("/openapi.json", show, name="openapi")]
