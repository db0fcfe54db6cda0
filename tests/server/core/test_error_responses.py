from __future__ import annotations

import json

import pytest

from gptserve.engine.errors import DeathKind, EngineDiedError, InvalidRequestError, QueueFullError
from gptserve.server.core.error_responses import (
    error_body,
    error_response,
    headers_of,
    is_of_messages,
    messages_error_body,
    status_of,
    to_service_error,
)
from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.store import JobStoreError


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "headers"),
    [
        (InvalidRequestError("m", param="p", code="c"), 400, "invalid_request_error", "c", {}),
        (QueueFullError("m", retry_after_s=3), 429, "rate_limit_error", "queue_full", {"retry-after": "3"}),
        (EngineDiedError("m"), 503, "server_error", "engine_unavailable", {"retry-after": "5"}),
        (EngineDiedError("m", DeathKind.CLOSED), 503, "server_error", "draining", {"retry-after": "5"}),
        (JobStoreError("m"), 500, "server_error", "journal_failed", {}),
        (ServiceError("c", "m"), 400, "invalid_request_error", "c", {}),
        (KeyError("secret"), 500, "server_error", "internal_error", {}),
    ],
)
def test_every_error_has_its_status_type_and_code(
    error: Exception, status: int, kind: str, code: str, headers: dict[str, str]
) -> None:
    told = to_service_error(error)
    assert (status_of(told), told.code, headers_of(told)) == (status, code, headers)
    assert "secret" not in str(told)
    assert error_body(told) == {"error": {"message": str(told), "type": kind, "param": told.param, "code": code}}


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("invalid_type", 400, "invalid_request_error"),
        ("invalid_api_key", 401, "authentication_error"),
        ("host_not_allowed", 403, "permission_error"),
        ("model_not_found", 404, "not_found_error"),
        ("method_not_allowed", 405, "invalid_request_error"),
        ("request_timeout", 408, "timeout_error"),
        ("body_too_large", 413, "request_too_large"),
        ("unsupported_media_type", 415, "invalid_request_error"),
        ("queue_full", 429, "rate_limit_error"),
        ("generation_failed", 500, "api_error"),
        ("loading", 503, "overloaded_error"),
    ],
)
def test_an_error_has_anthropics_type_on_the_routes_of_messages(code: str, status: int, kind: str) -> None:
    error = ServiceError(code, "m")
    body = {"type": "error", "error": {"type": kind, "message": "m"}}
    assert (status_of(error), messages_error_body(error)) == (status, body)
    state = {"log_fields": {"request_id": "r"}}
    answer = error_response(error, scope={"path": "/v1/messages", "state": state})
    assert json.loads(bytes(answer.body)) == {**body, "request_id": "r"}
    assert (answer.status_code, headers_of(error).items() <= dict(answer.headers).items()) == (status, True)
    for other in ("/v1/models", "/v1/messagesx", "/v1/chat/completions"):
        assert json.loads(bytes(error_response(error, scope={"path": other}).body)) == error_body(error)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/messages", True),
        ("/v1/messages/", True),
        ("/v1/messages/count_tokens", True),
        ("/llm/v1/messages", True),  # behind a proxy, while the model is loaded
        ("/messages", False),
        ("/v1/message", False),
    ],
)
def test_the_routes_of_messages_are_known_by_their_path(path: str, *, expected: bool) -> None:
    assert is_of_messages(path) is expected
