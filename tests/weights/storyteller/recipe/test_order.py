"""Stories to order have all that was ordered, and are as well told as the others."""

from __future__ import annotations

import random
import re

import pytest

from gptserve.weights.storyteller.recipe.chat import Asker, Request
from gptserve.weights.storyteller.recipe.generator import Split, Story
from gptserve.weights.storyteller.recipe.judge import name_fault
from gptserve.weights.storyteller.recipe.order import (
    CENTRAL,
    WEIGHT_OF_ASKED,
    WEIGHT_OF_CHOICE,
    Character,
    Element,
    Order,
    phrases,
    tell,
)

FOX, BEAR = Character("Mia", "she", "fox"), Character("Leo", "he", "bear")


def told(split: Split, count: int) -> list[tuple[Request, Story]]:
    """Ask for stories that some plot has room for."""
    rng = random.Random(f"test:{split}")
    asker = Asker(rng, split, more_names=0)
    pairs = [(request, tell(rng, request.order)) for request in (asker.story() for _ in range(count))]
    return [(request, story) for request, story in pairs if story is not None]


@pytest.fixture(scope="module", params=["train", "held_out"])
def exchanges(request: pytest.FixtureRequest) -> list[tuple[Request, Story]]:
    return told(request.param, 300)


def test_all_that_a_request_names_is_in_its_story(exchanges: list[tuple[Request, Story]]) -> None:
    assert len(exchanges) == 300
    for request, story in exchanges:
        for element in request.order.elements:
            assert element.is_in(story.text, 2 if element.slot in CENTRAL else 1), (request.text, story.text)


def test_the_story_of_another_request_rarely_has_it(exchanges: list[tuple[Request, Story]]) -> None:
    several = [(request, story) for request, story in exchanges if len(request.order.elements) > 1]
    others = [story for _, story in several[1:]] + [several[0][1]]
    fitting = [request.order.is_fulfilled_by(other.text) for (request, _), other in zip(several, others, strict=True)]
    assert sum(fitting) < len(fitting) / 20


def test_characters_keep_their_names(exchanges: list[tuple[Request, Story]]) -> None:
    assert [name_fault(story.text, request.order.hero.name) for request, story in exchanges] == [None] * len(exchanges)


def test_what_is_asked_for_is_told_in_the_first_paragraph(exchanges: list[tuple[Request, Story]]) -> None:
    for request, story in exchanges:
        assert all(element.is_in(story.text.split("\n\n")[0]) for element in request.order.elements), story.text


def test_words_that_were_asked_for_weigh_more_than_those_that_lead_to_them() -> None:
    text = "Once there was a fox. She was on the beach. The fox slept."
    spans = Order(FOX, BEAR, (Element("{hero", "fox"), Element("{place", "beach"))).weighty_spans(text)
    heavy = [text[start:end] for start, end, weight in spans if weight == WEIGHT_OF_ASKED]
    leading = [text[start:end] for start, end, weight in spans if weight == WEIGHT_OF_CHOICE]
    assert heavy == ["fox", "beach"]
    assert leading == ["", "She was on the "]


def test_a_character_is_what_was_ordered() -> None:
    story = tell(random.Random(1), Order(FOX, BEAR, (Element("{hero", "fox"), Element("{friend", "bear"))))
    assert story is not None
    assert (story.hero, story.friend, story.pronoun) == ("Mia", "Leo", "she")
    assert story.text.index("fox") < story.text.index("Leo")


def test_the_next_story_introduces_nobody_again() -> None:
    for seed in range(100):
        story = tell(random.Random(seed), Order(FOX, BEAR, is_sequel=True))
        assert story is not None
        assert name_fault(story.text, "Mia") is None, story.text
        assert not re.search("fox (named|called)", story.text)


def test_what_the_plot_has_no_sentence_for_is_told_too() -> None:
    elements = (
        Element("{pet", "lamb"),
        Element("{thing", "kite"),
        Element("{fear", "thunder"),
        Element("moon", "moon"),
    )
    order = Order(FOX, BEAR, elements, {"pets": "lamb", "things": "kite", "fears": "thunder"})
    stories = [tell(random.Random(seed), order) for seed in range(50)]
    assert all(story is not None and order.is_fulfilled_by(story.text) for story in stories)


def test_there_is_a_sentence_for_every_kind_of_element() -> None:
    rng = random.Random(5)
    elements = [each for _ in range(2000) for each in Asker(rng, "train").story().order.elements]
    assert {element.slot for element in elements} - {"{hero"} == set(phrases()["asides"])


def test_what_no_plot_has_room_for_is_not_told() -> None:
    assert tell(random.Random(1), Order(FOX, BEAR, (Element("<sad>", "dragon"),))) is None


def test_a_word_is_found_whole() -> None:
    assert Element("", "rain").is_in("The rain came.")
    assert not Element("", "rain").is_in("A rainbow!")
    assert not Element("", "rain").is_in("The rain came.", times=2)
