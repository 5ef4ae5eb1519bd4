"""JSON replies, and every error in the one shape that clients of OpenAI know.

Owns that shape and which error becomes which reply. Leaves headers that all replies share to
front.py. Event loop; pure.

    {"error": {"message": …, "type": …, "param": …, "code": …}}
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from mlx_worker.errors import WorkerError
from mlx_worker.wire.failure import error_body, error_headers, error_type

MAX_BODY_BYTES = 16 * 1024**2

_HTTP_ERRORS = {  # what aiohttp itself refuses: code, message
    404: (
        "not_found",
        "there is nothing at this path; the API is at /v1/chat/completions, /v1/completions "
        "and /v1/models",
    ),
    405: ("method_not_allowed", "this path does not take the method"),
    413: ("body_too_large", f"the body is too large; this worker takes {MAX_BODY_BYTES:,} bytes"),
    417: ("expectation_failed", "Expect: only 100-continue is known"),
}


class Refusal(Exception):
    """A request that is not let in; `message` tells its author what to change."""

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = headers


def json_reply(
    content: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """`content` as JSON; a number that is not finite becomes null, as JSON has no word for it."""
    text = json.dumps(_finite(content), ensure_ascii=False, allow_nan=False)
    return web.Response(
        text=text, status=status, headers=headers, content_type="application/json", charset="utf-8"
    )


def error_reply(
    status: int,
    code: str,
    message: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """An error in the common shape; its `type` follows from the status."""
    error = {"message": message, "type": error_type(status), "param": param, "code": code}
    return json_reply({"error": error}, status=status, headers=headers)


def reply_to(error: WorkerError | Refusal | web.HTTPException) -> web.Response:
    """The reply that tells a client of an error which is its own or the world's."""
    if isinstance(error, WorkerError):
        return _reply_to_worker_error(error)
    if isinstance(error, Refusal):
        return error_reply(error.status, error.code, error.message, headers=error.headers)
    return _reply_to_http_error(error)


def reply_to_bug(request_id: str) -> web.Response:
    """The reply to a request that met a mistake of ours; the log has the rest under this id."""
    return error_reply(500, "internal_error", f"internal error; the log has request {request_id}")


def _reply_to_worker_error(error: WorkerError) -> web.Response:
    return json_reply(error_body(error), status=error.status, headers=error_headers(error))


def _reply_to_http_error(error: web.HTTPException) -> web.Response:
    code, message = _HTTP_ERRORS.get(error.status, ("http_error", error.reason))
    headers = {}
    if isinstance(error, web.HTTPMethodNotAllowed):
        headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        message = f"{message}; it takes {headers['Allow']}"
    return error_reply(error.status, code, message, headers=headers)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
