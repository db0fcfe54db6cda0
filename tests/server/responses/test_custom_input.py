"""The input of a custom tool is read from its JSON as it arrives, however that is written and cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptserve.server.responses.custom_input import InputReader


def read(pieces: list[str]) -> list[str]:
    reader = InputReader()
    return [reader.read(piece) for piece in pieces]


@given(
    st.text(st.sampled_from('ab"\\/\n\t\x01é🏔\ud800\udc00uU{}'), max_size=20),
    st.booleans(),
    st.sampled_from(["{}{}", " {} \n{} "]),
    st.lists(st.integers(0, 150), max_size=20),
)
def test_the_text_of_the_json_comes_out_however_it_is_cut(text: str, ascii: bool, form: str, cuts: list[int]) -> None:
    written = json.dumps(text, ensure_ascii=True) if ascii else json.dumps(text, ensure_ascii=False)
    arguments = form.format('{"input":', f"{written}}}")
    places = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    pieces = [arguments[start:end] for start, end in itertools.pairwise(places)]
    expected = json.loads(written)
    if ascii:  # half a surrogate pair is no character
        expected = expected.encode("utf-16-be", "surrogatepass").decode("utf-16-be", "replace")

    assert "".join(read(pieces)) == expected


def test_the_text_comes_as_soon_as_it_is_known() -> None:
    assert read(['{"inp', 'ut": "a', "\\", "nb\\ud83c", "\\udfd4", "\\ud83c", "x", '"', '} "']) == [
        *("", "a", "", "\nb", "🏔", "", "\ufffdx", "", "")
    ]


@pytest.mark.parametrize("arguments", ['{"text": "a"}', "{}", "[1]", '"x"', '{"in put": "a"}', '{"input": 3}'])
def test_arguments_of_another_form_come_as_they_are(arguments: str) -> None:
    assert "".join(read([*arguments])) == arguments
    assert "".join(read([arguments])) == arguments
