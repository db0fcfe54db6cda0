"""What is dropped of a conversation that is too long: the oldest turns, then the oldest calls of the last turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptserve.server.responses.truncation import _pieces, truncations
from gptserve.server.schemas.response_tools import CallItem, CallOutputItem, CustomCallItem
from gptserve.server.schemas.responses import InputItem, Item

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
    number, shortened = truncations(items)
    return [" ".join(names[id(item)] for item in shortened(step)) for step in range(number + 1)]


def every_version(items: list[Item]) -> list[list[Item]]:
    """Return the same conversations as `truncations`, each made anew from all that was dropped before it."""
    made = [list(items)]
    dropped: set[int] = set()
    for piece in _pieces(items)[:-1]:
        dropped.update(piece)
        calls = {item.call_id for i in dropped if isinstance(item := items[i], CallItem | CustomCallItem)}
        kept = [
            item
            for i, item in enumerate(items)
            if i not in dropped and not (isinstance(item, CallOutputItem) and item.call_id in calls)
        ]
        if len(kept) < len(made[-1]):
            made.append(kept)
    return made


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


@given(st.lists(st.sampled_from(WORDS), max_size=30))
def test_each_version_is_what_dropping_piece_by_piece_leaves(words: list[str]) -> None:
    items = [item_of(word) for word in words]
    number, shortened = truncations(items)
    made = [shortened(step) for step in range(number + 1)]
    assert [list(map(id, left)) for left in made] == [list(map(id, left)) for left in every_version(items)]


class CountedItems(list[Item]):
    """Items that count how often one is looked at."""

    num_looks = 0

    def __iter__(self) -> Iterator[Item]:
        for item in super().__iter__():
            self.num_looks += 1
            yield item

    def __getitem__(self, index: Any) -> Any:
        self.num_looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("words", ["u1", "u1 a1", "c1 r1", "c1 x2 r2 r1 a1"])
def test_the_work_grows_with_the_items_and_not_with_their_square(words: str) -> None:
    items = CountedItems(item_of(word) for _ in range(500) for word in words.split())
    number, shortened = truncations(items)
    assert items.num_looks <= 6 * len(items)
    items.num_looks = 0
    assert len(shortened(number // 2)) < len(items)
    assert items.num_looks == len(items)
