from __future__ import annotations

import pytest

from gptserve.engine.errors import DeathKind, EngineDiedError, InvalidRequestError, QueueFullError
from gptserve.server.errors import ApiError, show, to_api_error
from gptserve.weights.errors import TokenizerError


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "headers"),
    [
        (InvalidRequestError("m", param="p", code="c"), 400, "invalid_request_error", "c", {}),
        (TokenizerError("m"), 400, "invalid_request_error", "invalid_value", {}),
        (QueueFullError("m", retry_after_s=3), 429, "rate_limit_error", "queue_full", {"retry-after": "3"}),
        (EngineDiedError("m"), 503, "server_error", "engine_unavailable", {"retry-after": "5"}),
        (EngineDiedError("m", DeathKind.CLOSED), 503, "server_error", "draining", {"retry-after": "5"}),
        (ApiError(418, "m", code="c"), 418, "invalid_request_error", "c", {}),
        (KeyError("secret"), 500, "server_error", "internal_error", {}),
    ],
)
def test_every_error_has_its_status_type_and_code(
    error: Exception, status: int, kind: str, code: str, headers: dict[str, str]
) -> None:
    told = to_api_error(error)
    assert (told.status, told.type, told.code, told.headers) == (status, kind, code, headers)
    assert "secret" not in told.message
    assert told.body() == {
        "error": {"message": told.message, "type": kind, "param": told.param, "code": code},
    }


def test_a_long_message_is_cut() -> None:
    assert ApiError(400, "x" * 10_000, code="c").message == "x" * 399 + "…"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        ("5", "'5'"),
        (1.5, "1.5"),
        ([1, "a", None], "[1, 'a', null]"),
        (list(range(100)), "[0, 1, 2, 3, ...]"),
        ({"a": [True]}, "{'a': [true]}"),
    ],
)
def test_a_value_is_shown_as_it_was_given(value: object, shown: str) -> None:
    assert show(value) == shown


@pytest.mark.parametrize("value", ["x" * 10**6, 10**4000, [["y" * 10**6] * 10] * 10**5, {"z" * 10**6: 1}])
def test_a_huge_value_is_shown_shortly(value: object) -> None:
    assert len(show(value)) < 2000
