"""An error reaches a client in OpenAI's shape, with the words its library acts on."""

import pytest

from mlx_worker.errors import (
    ContextTooLong,
    EngineDied,
    InvalidParameter,
    Overloaded,
    RequestError,
    UnknownModel,
    WorkerError,
)
from mlx_worker.wire.failure import error_body, error_headers, error_type


@pytest.mark.parametrize(
    ("error", "kind", "param", "code"),
    [
        (InvalidParameter("n", 9, "1 to 8"), "invalid_request_error", "n", "invalid_parameter"),
        (RequestError("no JSON"), "invalid_request_error", None, "invalid_request"),
        (UnknownModel("x"), "invalid_request_error", "model", "model_not_found"),
        (
            ContextTooLong(tokens=9, limit=8),
            "invalid_request_error",
            "messages",
            "context_length_exceeded",
        ),
        (Overloaded("full", retry_after_s=2), "server_error", None, "overloaded"),
        (EngineDied("gone"), "server_error", None, "engine_died"),
    ],
)
def test_an_error_is_its_line_with_type_param_and_code(
    error: WorkerError, kind: str, param: str | None, code: str
):
    """The message is what a person reads, hint included."""
    detail = {"message": str(error), "type": kind, "param": param, "code": code}
    assert error_body(error) == {"error": detail}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "invalid_request_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_a_status_has_openais_word(status: int, kind: str):
    """Clients choose their exception by it."""
    assert error_type(status) == kind


@pytest.mark.parametrize(("wait_s", "seconds"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.2, "2")])
def test_a_full_worker_says_when_to_come_again(wait_s: float, seconds: str):
    """Whole seconds, rounded up, never zero."""
    assert error_headers(Overloaded("full", retry_after_s=wait_s)) == {"Retry-After": seconds}


def test_other_errors_need_no_header():
    """Coming again would not help."""
    assert error_headers(RequestError("no JSON")) == {}
