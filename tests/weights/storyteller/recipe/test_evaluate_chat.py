"""Counting answers: what passes as a story, as an honest line, as a kept name; a small random model is sampled."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gptserve.weights.storyteller.recipe.chat import HONEST, Asker, Message
from gptserve.weights.storyteller.recipe.evaluate_chat import (
    Answer,
    Chatter,
    keeps,
    main_character,
    report,
)
from gptserve.weights.storyteller.recipe.generator import stories


def test_stories_are_no_lines_and_lines_are_no_stories() -> None:
    asker = Asker(random.Random(1), "held_out")
    for story in stories("held_out", 50):
        assert Answer(story.text, ended=True).is_story
        assert not Answer(story.text, ended=True).is_honest
    for _ in range(50):
        line = asker.off_topic()[1]
        assert Answer(line, ended=True).is_honest
        assert not Answer(line, ended=True).is_story
    assert not Answer(f"I only tell {HONEST}", ended=False).is_honest


def test_the_main_character_is_named_first_and_kept_to_the_end() -> None:
    for story in stories("held_out", 50):
        assert main_character(story.text) == story.hero
        assert keeps(story.hero, story.text)
    assert main_character("nobody") == ""
    assert not keeps("Mia", "Mia slept.\n\nThen Leo woke up.")


def test_a_figure_is_printed_and_returned(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("ended", [True, True, False, True]) == 0.75
    assert "3/4 = 75.0%" in capsys.readouterr().out


@pytest.mark.slow
def test_an_answer_depends_on_its_conversation_and_its_place_only(chat_miniature: Path) -> None:
    chatter = Chatter(chat_miniature, temperature=0.8)
    long, short = [Message("system", "Be polite."), Message("user", "a fox")], [Message("user", "hello")]
    both = [answer.text[:200] for answer in chatter.answers([long, short])]
    assert both[0] == chatter.answers([long])[0].text[:200]
    assert both[1] == chatter.answers([short, short])[1].text[:200]
    assert both[0] != chatter.answers([short])[0].text[:200]
