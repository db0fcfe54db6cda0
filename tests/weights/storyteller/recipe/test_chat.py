"""Conversations: typed requests that say what their stories have, honest lines, and splits that share nothing."""

from __future__ import annotations

import random
import re

import pytest

from gptserve.weights.storyteller.recipe.chat import HONEST, Asker, Message, conversation
from gptserve.weights.storyteller.recipe.generator import lexicon, names, stories
from gptserve.weights.storyteller.recipe.order import phrases


@pytest.fixture(scope="module")
def conversations() -> list[list[Message]]:
    return [conversation("train", index) for index in range(400)]


def test_conversation_is_a_function_of_split_and_index(conversations: list[list[Message]]) -> None:
    assert [conversation("train", index) for index in range(20)] == conversations[:20]
    assert conversation("held_out", 0) != conversations[0]


def test_requests_and_answers_take_turns(conversations: list[list[Message]]) -> None:
    for messages in conversations:
        roles = [message.role for message in messages]
        start = 1 if roles[0] in ("system", "developer") else 0
        assert roles[start:] == ["user", "assistant"] * ((len(roles) - start) // 2)
        assert len(roles) > start


def test_every_answer_is_a_story_or_an_honest_line(conversations: list[list[Message]]) -> None:
    answers = [message.content for messages in conversations for message in messages if message.role == "assistant"]
    lines = [answer for answer in answers if HONEST in answer]
    assert len(answers) / 5 < len(lines) < len(answers) / 2
    assert not any("\n" in line for line in lines)
    assert not any(HONEST in story.text for story in stories("train", 2000))


def test_an_answer_that_was_cut_off_goes_on_where_it_stopped(conversations: list[list[Message]]) -> None:
    cuts = [
        (message.content, more.content)
        for messages in conversations
        for message, more in zip(messages, messages[2:], strict=False)
        if not message.is_whole and more.is_whole
    ]
    assert cuts
    for start, end in cuts:
        joined = f"{start} {end}"
        assert joined.count('"') % 2 == 0
        assert joined.count("\n\n") >= 2
        assert joined[-1] in '.!?"'


def test_the_name_of_the_main_character_weighs_most_in_what_comes_next(conversations: list[list[Message]]) -> None:
    begun = re.compile("another adventure|went out again|last adventure of|all was well with")
    answers = [
        message
        for messages in conversations
        for message in messages
        if message.role == "assistant" and begun.search(message.content[:60])
    ]
    assert answers
    for answer in answers:
        start, end, _ = max(answer.weighty, key=lambda span: span[2])
        assert answer.content[start:end] in names() | {*phrases()["more_names"]["she"], *phrases()["more_names"]["he"]}


def test_most_stories_at_the_end_are_cut_off_once_they_have_what_was_asked_for() -> None:
    ends = [conversation("train", index)[-2:] for index in range(300)]
    cut = [(request.content, answer.content) for request, answer in ends if not answer.is_whole]
    assert len(cut) > len(ends) / 3
    kinds = [(kind, answer) for request, answer in cut for kind in lexicon()["animals"] if f" {kind} " in request]
    assert kinds
    assert all(kind in answer for kind, answer in kinds)


def test_a_request_names_all_that_its_story_has_to_have() -> None:
    asker = Asker(random.Random(1), "train")
    themes = phrases()["themes"]
    asked = [asker.story() for _ in range(500)]
    for request in asked:
        for element in request.order.elements:
            wordings = themes.get(element.word, [element.word]) if element.slot == element.word else [element.word]
            typed = request.text.lower().replace("mice", "mouse").replace("puppies", "puppy")
            assert any(wording.lower() in typed for wording in wordings), (request.text, element)
    assert any(len(request.order.elements) >= 4 for request in asked)
    assert any(not request.order.elements for request in asked)


def test_nothing_is_left_open_in_what_is_typed() -> None:
    asker = Asker(random.Random(2), "held_out")
    typed = [asker.story().text for _ in range(300)]
    typed += [asker.off_topic()[0] for _ in range(300)] + [asker.go_on("Mia") for _ in range(50)]
    for text in typed:
        assert not re.search(r"[{}|]|\[\w*\|", text), text


def test_names_that_are_not_in_the_lexicon_come_only_when_asked_for() -> None:
    asker = Asker(random.Random(3), "train", more_names=1)
    for request in (asker.story() for _ in range(300)):
        asked = {element.word for element in request.order.elements}
        assert {request.order.hero.name, request.order.friend.name} - names() <= asked


def test_held_out_wordings_and_words_are_in_no_other_list() -> None:
    lists = phrases()
    groups = [lists[name] for name in ("frames", "plain_frames", "mood_frames", "go_on", "systems", "unknown")]
    groups += [topic for topic in lists["off_topic"].values() if "train" in topic]
    for group in groups:
        assert group["held_out"]
        assert not set(group["train"]) & set(group["held_out"])
    more = lists["more_names"]
    assert not {*more["she"], *more["he"]} & set(more["held_out"])


def test_pairs_of_name_and_kind_are_of_one_split() -> None:
    pairs = {}
    for split in ("train", "held_out"):
        asker = Asker(random.Random(4), split)
        pairs[split] = {(who.name, who.kind) for who in (asker.character() for _ in range(1000))}
    assert all(pairs.values())
    assert not pairs["train"] & pairs["held_out"]
