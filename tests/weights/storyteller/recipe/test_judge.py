"""The judge passes every story of the generator and finds the faults a model makes."""

from __future__ import annotations

import pytest

from gptserve.weights.storyteller.recipe.generator import Story, stories
from gptserve.weights.storyteller.recipe.judge import name_fault, pronoun_fault


@pytest.fixture(scope="module")
def held_out() -> list[Story]:
    return list(stories("held_out", 1500))


@pytest.fixture(scope="module")
def with_friend(held_out: list[Story]) -> list[Story]:
    return [found for found in held_out if found.friend is not None]


def replace_last(text: str, old: str, new: str) -> str:
    head, _, tail = text.rpartition(old)
    return head + new + tail


def test_every_story_of_the_generator_passes(held_out: list[Story]) -> None:
    for found in held_out:
        assert name_fault(found.text, found.hero) is None, found.text
        assert name_fault(found.text) is None
        assert not pronoun_fault(found.text), found.text


def test_a_stranger_in_the_last_mention_is_found(held_out: list[Story]) -> None:
    for found in held_out[:200]:
        stranger = next(name for name in ("Tom", "Lily", "Max") if name not in (found.hero, found.friend))
        assert name_fault(replace_last(found.text, found.hero, stranger)) is not None


def test_a_friend_in_the_place_of_the_main_character_is_found(with_friend: list[Story]) -> None:
    for found in with_friend[:200]:
        assert found.friend is not None
        *rest, last = found.text.split("\n\n")
        assert name_fault("\n\n".join([*rest, last.replace(found.hero, found.friend)])) is not None


def test_a_name_other_than_the_given_one_is_found(held_out: list[Story]) -> None:
    assert name_fault(held_out[0].text, "Nobody") is not None


def test_an_invented_name_is_found(held_out: list[Story]) -> None:
    found = held_out[0]
    assert name_fault(replace_last(found.text, found.hero, f"{found.hero} and Brillo")) == "unknown name: Brillo"


def test_a_text_without_names_is_found() -> None:
    assert name_fault("Once upon a time there was a fox.") == "nobody is named"


def test_a_friend_who_slips_in_is_found() -> None:
    text = "Tom was a little boy who loved stories.\n\nTom was happy, and then Lily came. Tom smiled."
    assert name_fault(text) == "Lily is not introduced"


def test_a_wrong_pronoun_is_found() -> None:
    assert pronoun_fault("Tom was a little boy. She had many questions.\n\nTom slept.")
    assert not pronoun_fault("Tom was a little boy. He had many questions.\n\nTom slept.")
