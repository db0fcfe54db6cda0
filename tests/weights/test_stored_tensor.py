"""Stored tensors are equal if their types, shapes and bytes are, wherever they lie."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gptserve.weights import stored_tensor
from gptserve.weights.errors import InvalidCheckpointError
from gptserve.weights.stored_tensor import StoredTensor


@pytest.fixture
def one(tmp_path: Path) -> StoredTensor:
    (tmp_path / "one").write_bytes(b"--12345678--")
    return StoredTensor(tmp_path / "one", "one", "F32", (2,), 2, 10)


@pytest.mark.parametrize("chunk_bytes", [1, 3, 4, 8, 99])
@pytest.mark.parametrize(("data", "is_equal"), [("12345678", True), ("12345679", False), ("02345678", False)])
def test_equal_bytes_are_equal(
    one: StoredTensor, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, data: str, is_equal: bool
) -> None:
    monkeypatch.setattr(stored_tensor, "CHUNK_BYTES", chunk_bytes)
    path = one.path.with_name("other")
    path.write_bytes(b"-" + data.encode() + b"+++")
    other = replace(one, path=path, name="other", start=1, end=9)

    assert one.equals(other) is other.equals(one) is is_equal


def test_other_types_and_shapes_are_never_equal(one: StoredTensor) -> None:
    assert one.equals(one)
    assert not one.equals(replace(one, dtype="I32"))
    assert not one.equals(replace(one, shape=(1, 2)))


def test_a_file_that_is_gone_is_named(one: StoredTensor) -> None:
    gone = replace(one, path=one.path.with_name("gone"))
    reason = f"^{re.escape(f'{gone.path} could not be read: No such file or directory')}$"
    for this, other in ((one, gone), (gone, one)):
        with pytest.raises(InvalidCheckpointError, match=reason):
            this.equals(other)
