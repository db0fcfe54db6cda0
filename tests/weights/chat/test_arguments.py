"""What a template sees of the arguments that a model has written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptserve.weights.chat.arguments import escape_controls, read_arguments

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" \n", {}),
        ("null", {}),
        ('""', {}),
        ('{"city": "Os', {"city": "Os"}),
        ('{"city": "Oslo", "da', {"city": "Oslo"}),
        ('{"city": "a\\', {"city": "a"}),
        ("{", {}),
        ('{"note": "one\ntwo\t"}', {"note": "one\ntwo\t"}),
        ('{\n\t"a": 1\r\n}', {"a": 1}),
        ('{"a": 1}</tool_call>', {"a": 1}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("[1, 2]", "[1, 2]"),
        ("5", "5"),
        ('"Oslo"', '"Oslo"'),
        ("Oslo", "Oslo"),
        ("{'a': 1}", "{'a': 1}"),
        ('{"a":' * 5000, '{"a":' * 5000),
    ],
)
def test_arguments_are_an_object_where_there_is_one(text: str, expected: object) -> None:
    assert read_arguments(text) == expected


@given(OBJECTS)
def test_an_object_is_read_as_it_is(value: dict[str, Any]) -> None:
    assert read_arguments(json.dumps(value)) == value
    assert read_arguments(json.dumps(json.dumps(value))) == value


@given(st.text(st.characters(exclude_categories=["Cs"])) | OBJECTS.map(json.dumps), st.integers(0, 60))
def test_any_text_can_be_given_to_a_template(text: str, cut: int) -> None:
    for given_text in (text, text[:cut]):
        assert isinstance(read_arguments(given_text), dict | str)


@given(OBJECTS)
def test_control_characters_within_strings_are_escaped_and_those_between_values_are_not(value: dict[str, Any]) -> None:
    written = json.dumps(value, indent="\t", ensure_ascii=False)
    raw = written.replace("\\n", "\n").replace("\\t", "\t") if "\\\\" not in written else written
    assert json.loads(escape_controls(raw)) == value
    assert escape_controls(written) == written
