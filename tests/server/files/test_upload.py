"""The form of an upload is read as it comes: any split gives the same, and what is wrong is said in words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from gptserve.server.core.errors import ServiceError
from gptserve.server.files.files import PIECE_BYTES, Upload
from gptserve.server.files.upload import Form, read_upload

TYPE = "multipart/form-data; boundary=xyz"


class Written:
    """Stands for an upload, and notes what is written at once."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    async def write(self, data: bytes) -> None:
        self.pieces.append(data)


def part(disposition: str, value: bytes) -> bytes:
    return b"--xyz\r\nContent-Disposition: form-data; " + disposition.encode() + b"\r\n\r\n" + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--xyz--\r\n"


PURPOSE = part('name="purpose"', b"batch")
FILE = part('name="file"; filename="in.jsonl"', b'{"a": 1}\n--xy\r\n')


def read(body: Sequence[bytes], content_type: str = TYPE) -> tuple[Form, Written]:
    written = Written()

    async def stream() -> AsyncIterator[bytes]:
        for piece in body:
            yield piece

    async def test() -> Form:
        return await read_upload(content_type, stream(), cast(Upload, written), 20)

    return asyncio.run(test()), written


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("body", [form(FILE, PURPOSE), form(PURPOSE, FILE)], ids=["file first", "file last"])
def test_any_split_of_a_form_gives_the_same(size: int, body: bytes) -> None:
    found, written = read([body[i : i + size] for i in range(0, len(body), size)])
    assert found == Form("in.jsonl", {"purpose": "batch"})
    assert b"".join(written.pieces) == b'{"a": 1}\n--xy\r\n'


def test_a_file_is_written_piece_by_piece() -> None:
    parts = [part('name="file"; filename="x"', b"")[:-2], *([b"y" * 2**16] * 9), b"\r\n", form(PURPOSE)]
    written = read(parts)[1]
    assert [len(piece) for piece in written.pieces] == [PIECE_BYTES, PIECE_BYTES, 2**16]


def test_an_empty_file_is_one() -> None:
    assert read([form(part('name="file"; filename="x"', b""), PURPOSE)])[1].pieces == []


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\\\dir\\\\in.jsonl", "in.jsonl"),
        ("a%22b.jsonl", 'a"b.jsonl'),
        ("é.jsonl", "é.jsonl"),
    ],
)
def test_a_filename_is_no_path(given: str, name: str) -> None:
    assert read([form(part(f'name="file"; filename="{given}"', b"x"), PURPOSE)])[0].filename == name


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (form(PURPOSE), "missing_required_parameter", "file is required"),
        (form(FILE, FILE), "invalid_value", "file may be given once"),
        (form(PURPOSE, PURPOSE, FILE), "invalid_value", "purpose may be given once"),
        (form(part('name="file"', b"x"), PURPOSE), "invalid_type", "file must be a file with a filename"),
        (form(part('name="x"', b"")), "unknown_parameter", "a form may have file, purpose, .*, got 'x'"),
        (form(part('name="purpose"', b"b" * 65)), "invalid_value", "purpose may have at most 64 bytes"),
        (form(part('name="purpose"', b"\xff"), FILE), "invalid_value", "purpose must be UTF-8"),
        (form(part('name="file"; filename="a/"', b"")), "invalid_value", "filename must have 1 to 255 characters"),
        (form(part('name="file"; filename="%0D"', b"")), "invalid_value", "none of them a control character"),
        (form(part(f'name="file"; filename="{"x" * 256}"', b"")), "invalid_value", "filename must have 1 to 255"),
        (FILE, "invalid_value", "the form has no end: its last boundary is missing"),
        (b"", "invalid_value", "the form has no end"),
        (b"hello", "invalid_value", "the body is no form of multipart/form-data"),
        (b"--xyz\r\n" + b"a: b\r\n" * 1000, "invalid_value", "the body is no form of multipart/form-data"),
        (b"--xyz\r\na: " + b"b" * 100_000, "invalid_value", "the body is no form of multipart/form-data"),
    ],
)
def test_a_bad_form_is_refused_in_words(body: bytes, code: str, says: str) -> None:
    with pytest.raises(ServiceError, match=says) as raised:
        read([body])
    assert raised.value.code == code


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=x"])
def test_another_type_is_refused(content_type: str) -> None:
    with pytest.raises(ServiceError, match="content-type must be multipart/form-data with a boundary"):
        read([], content_type)


def test_a_boundary_that_is_too_long_is_refused() -> None:
    with pytest.raises(ServiceError, match="the body is no form"):
        read([], f"multipart/form-data; boundary={'x' * 1000}")


def test_a_file_that_stalls_is_given_up() -> None:
    async def test() -> None:
        async def stream() -> AsyncIterator[bytes]:
            yield FILE
            await asyncio.Event().wait()

        rule = "a file must arrive within 0.01 s and a second for each 32768 bytes"
        with pytest.raises(ServiceError, match=rule) as raised:
            await read_upload(TYPE, stream(), cast(Any, Written()), 0.01)
        assert raised.value.code == "request_timeout"

    asyncio.run(asyncio.wait_for(test(), 20))
