"""Each line of a batch's input is read within a limit, and what is wrong with it is said in words."""

from __future__ import annotations

import io
import json

import pytest

from gptserve.server.batches.lines import RawLine, line_of, line_seed, read_lines, repeated_lines
from gptserve.server.core.errors import ServiceError

URLS = ("/v1/completions",)
GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


class Counting(io.BytesIO):
    most = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        self.most = max(self.most, len(line))
        return line


def raw(fields: object, n: int = 7) -> RawLine:
    return RawLine(n, json.dumps(fields).encode())


def test_a_long_line_is_passed_over_in_pieces() -> None:
    file = Counting(b"{}\n" + b"x" * 3_000_000 + b"\n\n{}")
    assert list(read_lines(file, 100)) == [RawLine(1, b"{}\n"), RawLine(2, None), RawLine(4, b"{}")]
    assert file.most <= 2**20


def test_a_line_at_the_limit_is_read() -> None:
    assert list(read_lines(io.BytesIO(b"12345\n123456\n12345"), 5)) == [
        RawLine(1, b"12345\n"),
        RawLine(2, None),
        RawLine(3, b"12345"),
    ]


def test_a_good_line_is_taken() -> None:
    line = line_of(raw(GOOD), 100, URLS, is_repeated=False)
    assert (line.custom_id, line.url, line.body) == ("a", "/v1/completions", {"prompt": "x"})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (raw({}), "line 7: custom_id must be a text"),
        (raw({**GOOD, "custom_id": ""}), "line 7: custom_id must be a text"),
        (raw({**GOOD, "method": "GET"}), "line 7: method must be POST"),
        (raw({**GOOD, "url": "/v1/../etc"}), "line 7: url must be one of /v1/completions"),
        (raw({**GOOD, "url": []}), "line 7: url must be one of"),
        (raw({**GOOD, "body": 3}), "line 7: body must be an object"),
        (raw([]), "line 7: the body: input should be an object"),
        (RawLine(7, b"\xff"), "line 7: the body is not valid JSON"),
        (RawLine(7, None), "line 7: it may have at most 100 bytes"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(line: RawLine, says: str) -> None:
    with pytest.raises(ServiceError, match=says):
        line_of(line, 100, URLS, is_repeated=False)


def test_the_second_line_with_an_id_is_refused() -> None:
    lines = [raw(GOOD, 1), raw({}, 2), raw({**GOOD, "custom_id": "b"}, 3), raw(GOOD, 5), RawLine(6, None)]
    assert repeated_lines(lines) == ([1, 2, 3, 5, 6], {5})
    with pytest.raises(ServiceError, match="line 5: custom_id must differ"):
        line_of(lines[3], 100, URLS, is_repeated=True)


def test_a_seed_is_of_the_batch_and_the_line() -> None:
    seeds = {line_seed(batch_id, n) for batch_id in ("x", "y") for n in (1, 2)}
    assert len(seeds) == 4
    assert line_seed("x", 1) in seeds
