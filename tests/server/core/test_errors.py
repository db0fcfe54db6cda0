from __future__ import annotations

import pytest

from gptserve.server.core.errors import ServiceError, show


def test_a_long_message_is_cut() -> None:
    assert str(ServiceError("c", "x" * 10_000)) == "x" * 399 + "…"


def test_an_error_is_the_same_after_it_was_written_down() -> None:
    error = ServiceError("c", "m", param="p", retry_after_s=3)
    assert ServiceError.from_fields(error.fields()).fields() == error.fields()


def test_an_error_that_an_older_version_wrote_down_is_read() -> None:
    older = {"status": 500, "message": "m", "code": "c", "param": None, "headers": {}}
    assert ServiceError.from_fields(older).fields() == ServiceError("c", "m").fields()


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
