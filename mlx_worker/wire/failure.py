"""Errors → what a client of the OpenAI API expects of them: a body, headers. Pure; any thread."""

import math
from http import HTTPStatus
from typing import Any

from mlx_worker.errors import NotSignedIn, Overloaded, RequestError, TooManyTries, WorkerError

TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


def error_body(error: WorkerError) -> dict[str, Any]:
    """The reply's body, or in a stream the event that ends it before [DONE]."""
    param = error.param if isinstance(error, RequestError) else None
    kind = error_type(error.status)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.code}}


def error_type(status: int) -> str:
    """OpenAI's word for an HTTP status."""
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "server_error"
    return TYPES.get(HTTPStatus(status), "invalid_request_error")


def error_headers(error: WorkerError) -> dict[str, str]:
    """Retry-After in whole seconds, at least one, where waiting helps; how to sign in."""
    if isinstance(error, Overloaded | TooManyTries):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, NotSignedIn):
        return {"WWW-Authenticate": "Bearer"}
    return {}
