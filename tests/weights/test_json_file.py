"""One JSON object, or one sentence in the error class asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gptserve.weights.json_file
from gptserve.weights.errors import InvalidConfigError, TokenizerError
from gptserve.weights.json_file import read_json_object, read_leading_list, read_text


def test_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": [1, null]}')
    assert read_json_object(tmp_path / "a.json", TokenizerError) == {"x": [1, None]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"a": 1', "is not valid JSON"),
        (b'{"a": "\xff"}', "is not valid JSON"),
        (b"[" * 200_000, "is not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"[1, 2]", "must hold a JSON object, got a list"),
        (b"null", "must hold a JSON object, got a NoneType"),
    ],
    ids=lambda value: ascii(value[:12]),
)
def test_anything_else_is_one_sentence(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(InvalidConfigError, match=message) as caught:
        read_json_object(path, InvalidConfigError)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for name in ("a.json", "folder.json"):
        with pytest.raises(InvalidConfigError, match=f"{name} is missing in"):
            read_json_object(tmp_path / name, InvalidConfigError)


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert read_json_object(path, InvalidConfigError, max_bytes=8) == {"a": 1}
    for read in (read_json_object, read_text):
        with pytest.raises(InvalidConfigError, match="must be at most 7 bytes, got 8"):
            read(path, InvalidConfigError, max_bytes=7)
        with path.open("ab") as file:
            file.truncate(2**40)
        with pytest.raises(InvalidConfigError, match="must be at most 8388608 bytes, got 1099511627776"):
            read(path, InvalidConfigError)
        path.write_text('{"a": 1}')


@pytest.mark.parametrize("values", [b"[],", b"{},", b"1,"])
def test_many_values_are_not_built(values: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'{"a": [' + values * 1000 + b"0]}")
    assert len(str(read_json_object(path, InvalidConfigError))) > 1000
    monkeypatch.setattr(gptserve.weights.json_file, "MAX_VALUES", 1000)
    with pytest.raises(InvalidConfigError, match="must hold at most 1000 values"):
        read_json_object(path, InvalidConfigError)


@pytest.mark.parametrize(("before", "after"), [("[", "]"), ('{"a":', "}")])
def test_values_may_not_nest_deep(before: str, after: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": ' + before * 63 + "1" + after * 63 + ', "b": 2}')
    assert read_json_object(path, InvalidConfigError)["b"] == 2
    path.write_text('{"a": ' + before * 64 + "1" + after * 64 + "}")
    with pytest.raises(InvalidConfigError, match="must nest at most 64 lists and objects in one another"):
        read_json_object(path, InvalidConfigError)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=30))
def test_any_bytes_are_read_or_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    try:
        value = read_json_object(tmp_path / "a.json", InvalidConfigError)
    except InvalidConfigError:
        return
    assert isinstance(value, dict)


def test_only_a_file_that_is_not_required_may_be_missing(tmp_path: Path) -> None:
    assert read_json_object(tmp_path / "x.json", InvalidConfigError, required=False) == {}
    with pytest.raises(InvalidConfigError, match=r"x\.json is missing in"):
        read_json_object(tmp_path / "x.json", InvalidConfigError)


def test_text_is_read_as_utf8_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes("é\n".encode())
    assert read_text(path, InvalidConfigError) == "é\n"
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidConfigError, match=r"x\.txt could not be read as UTF-8: 'utf-8' codec"):
        read_text(path, InvalidConfigError)


JSON = st.recursive(
    st.none() | st.integers() | st.text('{}[],:\\" é', max_size=4),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from("xyz"), values, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.dictionaries(st.sampled_from("xyz"), JSON, max_size=3),
    indent=st.sampled_from([None, 2]),
    ensure_ascii=st.booleans(),
    head_bytes=st.integers(0, 60),
)
def test_a_leading_list_is_what_the_whole_object_has(
    tmp_path: Path, value: dict[str, Any], indent: int | None, ensure_ascii: bool, head_bytes: int
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=ensure_ascii), encoding="utf-8")
    expected = value.get("x") if isinstance(value.get("x"), list) else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gptserve.weights.json_file, "HEAD_BYTES", head_bytes)
        assert read_leading_list(path, "x", TokenizerError) == expected


def test_a_leading_list_is_read_without_what_is_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"y": {"x": [2]}, "x": [1], "z": nothing that JSON knows')
    assert read_leading_list(path, "x", TokenizerError) == [1]
    with pytest.raises(TokenizerError, match="is not valid JSON"):
        read_leading_list(path, "z", TokenizerError)
    for content in ("[" * 200_000, '{"x": ' + "[" * 200_000):
        path.write_text(content)
        with pytest.raises(TokenizerError, match="is not valid JSON"):
            read_leading_list(path, "x", TokenizerError)
    with pytest.raises(TokenizerError, match=r"b\.json is missing in"):
        read_leading_list(tmp_path / "b.json", "x", TokenizerError)
