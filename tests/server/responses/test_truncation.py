"""What is dropped of a conversation that is too long: the oldest turns, then the oldest calls of the last turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptserve.server.api.response_schemas import InputItem, Item
from gptserve.server.api.response_tool_schemas import CallItem, CallOutputItem, CustomCallItem
from gptserve.server.responses.truncation import truncations

ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}


def item_of(word: str) -> Item:
    """Return the item of a word: a role and a number, or a call, a custom call or a result and the id of the call."""
    kind, name = word[0], word[1:]
    if kind in ROLES:
        return InputItem.model_validate({"role": ROLES[kind], "content": word})
    if kind == "c":
        return CallItem(type="function_call", call_id=name, name="f", arguments="{}")
    if kind == "x":
        return CustomCallItem(type="custom_tool_call", call_id=name, name="f", input="")
    return CallOutputItem(type="function_call_output", call_id=name, output="")


def words_of(words: str) -> list[str]:
    """Return what the truncations leave, as words."""
    given = words.split()
    items = [item_of(word) for word in given]
    names = dict(zip(map(id, items), given, strict=True))
    return [" ".join(names[id(item)] for item in left) for left in truncations(items)]


@pytest.mark.parametrize(
    ("words", "shorter"),
    [
        ("u1", []),
        ("s1 u1 a1", []),
        ("u1 a1 u2", ["u2"]),
        ("a1 u1 a2 u2", ["u1 a2 u2", "u2"]),
        ("s1 u1 a1 d1 u2 a2 u3 d2", ["s1 d1 u2 a2 u3 d2", "s1 d1 u3 d2"]),
        ("u1 a1 c1 r1 a2 u2", ["u2"]),
        ("u1 c1 r1 c2 r2", ["u1 c2 r2"]),
        ("u1 c1 x2 r1 r2 a1 c3 r3", ["u1 a1 c3 r3"]),
        ("u1 c1 c2 r1 c3 r3 r2 a1", ["u1 a1"]),
        ("u1 c1 u2 r1 a1", ["u2 a1"]),
        ("u1 u2 u3", ["u2 u3", "u3"]),
    ],
)
def test_the_oldest_goes_first(words: str, shorter: list[str]) -> None:
    assert words_of(words) == [words, *shorter]


WORDS = "s1 d1 u1 u2 a1 c1 c2 x3 r1 r2 r3".split()  # noqa: SIM905


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=12))
def test_what_must_stay_stays_and_no_result_is_without_its_call(words: list[str]) -> None:
    given = " ".join(words)
    whole, *shorter = words_of(given)

    assert whole == given
    users = [word for word in words if word[0] == "u"]
    for longer, left in zip([whole, *shorter], shorter, strict=False):
        assert len(left) < len(longer)
    for text in shorter:
        left = text.split()
        assert [word for word in left if word[0] in "sd"] == [word for word in words if word[0] in "sd"]
        assert words[-1][0] == "r" or left[-1] == words[-1]
        assert users[-1:] == [word for word in left if word[0] == "u"][-1:]
        made = {word[1:] for word in words if word[0] in "cx"}
        lacking = made - {word[1:] for word in left if word[0] in "cx"}
        assert not any(word[0] == "r" and word[1:] in lacking for word in left)
