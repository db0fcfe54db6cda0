"""The lines of a batch are checked before the first is computed, a piece at a time, and each error names its line."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from gptserve.server.batches import validation
from gptserve.server.batches.store import LineError
from gptserve.server.batches.validation import MAX_ERRORS, Validation

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def lines(*given: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in given)


def check(data: bytes, max_bytes: int = 1000) -> tuple[Validation, int]:
    checked, num_steps = Validation(io.BytesIO(data), max_bytes, ("/v1/completions",)), 1
    while checked.step():
        num_steps += 1
    return checked, num_steps


def test_good_lines_are_counted_a_piece_at_a_time() -> None:
    checked, num_steps = check(b"".join(lines({**GOOD, "custom_id": str(i)}) + b"\n" for i in range(2000)))
    assert (checked.num_lines, checked.errors) == (2000, [])
    assert num_steps > 2


def test_each_error_names_its_line() -> None:
    data = lines(GOOD, {}, {**GOOD, "url": "/v1/embeddings"}) + b"\n{\n" + lines(GOOD) + b"x" * 2000 + b"\n"
    found = [(error.line, error.code, error.param) for error in check(data)[0].errors]
    assert found == [
        (2, "invalid_value", "custom_id"),
        (3, "invalid_value", "url"),
        (5, "invalid_json", None),
        (6, "invalid_value", "custom_id"),
        (7, "body_too_large", None),
    ]
    assert check(lines(GOOD, GOOD))[0].errors == [
        LineError("invalid_value", "line 2: custom_id must differ from those before", "custom_id", 2)
    ]


def test_a_million_bad_lines_cost_no_more_than_the_first_of_them() -> None:
    file = io.BytesIO(b"{}\n" * 1_000_000)
    checked = Validation(file, 1000, ("/v1/completions",))
    assert not checked.step()
    assert (len(checked.errors), file.tell()) == (MAX_ERRORS, 3 * MAX_ERRORS)


def test_blank_lines_are_read_a_piece_at_a_time() -> None:
    file = io.BytesIO(b" " * 999 + b"\n" + (b" " * 999 + b"\n") * 1000)
    assert Validation(file, 1000, ("/v1/completions",)).step()
    assert file.tell() < 100_000


def test_too_many_lines_and_none_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_LINES", 2)
    monkeypatch.setattr(validation, "MAX_BLANK_LINES", 2)
    three = check(lines(*({**GOOD, "custom_id": str(i)} for i in range(3))))[0]
    assert three.errors == [LineError("too_many_lines", "a batch may have at most 2 lines", "input_file_id", 3)]
    blank = check(b"\n \n" + lines(GOOD) + b"\n\n" + b"x" * 2000)[0]
    assert blank.errors == [LineError("too_many_lines", "a batch may have at most 2 blank lines", "input_file_id", 4)]
    for empty in (b"", b"\n \n"):
        assert check(empty)[0].errors == [LineError("empty_file", "the input file has no line", "input_file_id")]
