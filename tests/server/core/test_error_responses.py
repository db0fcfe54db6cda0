from __future__ import annotations

import pytest

from gptserve.engine.errors import DeathKind, EngineDiedError, InvalidRequestError, QueueFullError
from gptserve.server.core.error_responses import error_body, headers_of, status_of, to_service_error
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
