"""Stories of the generator: the same for the same seed, distinct, well formed, true to their characters."""

from __future__ import annotations

import math
import re

import pytest

from gptserve.weights.storyteller.recipe.generator import CHOICE, Story, lexicon, names, stories, story


@pytest.fixture(scope="module", params=[4_000, pytest.param(20_000, marks=pytest.mark.slow)])
def many(request: pytest.FixtureRequest) -> list[Story]:
    return list(stories("train", request.param))


def test_story_is_a_function_of_split_and_index(many: list[Story]) -> None:
    assert [story("train", index) for index in range(50)] == many[:50]


def test_stories_are_distinct_and_held_out_ones_are_not_in_training(many: list[Story]) -> None:
    texts = {found.text for found in many}
    assert len(texts) == len(many)
    assert not any(found.text in texts for found in stories("held_out", 2000))


def test_main_character_is_in_the_first_and_the_last_paragraph(many: list[Story]) -> None:
    for found in many:
        paragraphs = found.text.split("\n\n")
        assert re.search(rf"\b{found.hero}\b", paragraphs[0])
        assert re.search(rf"\b{found.hero}\b", paragraphs[-1])


def test_only_the_cast_is_named(many: list[Story]) -> None:
    pattern = re.compile(r"\b(?:" + "|".join(sorted(names())) + r")\b")
    for found in many:
        cast = {found.hero} | ({found.friend} if found.friend else set())
        assert set(pattern.findall(found.text)) == cast


def test_a_name_opens_a_sentence_only_where_it_is_new(many: list[Story]) -> None:
    pattern = re.compile(r'(?:^|[.!?]"? |\n)"?(' + "|".join(sorted(names())) + r")\b")
    for found in many:
        for match in pattern.finditer(found.text):
            assert match[1] not in found.text[: match.start(1)], found.text


def test_no_name_is_also_a_word() -> None:
    words = set(re.findall(r"[A-Za-z]+", " ".join(form for forms in lexicon()["forms"].values() for form in forms)))
    assert not names() & words
    assert not set(lexicon()["names"]["she"]) & set(lexicon()["names"]["he"])


def test_quotation_marks_are_balanced_in_every_paragraph(many: list[Story]) -> None:
    for found in many:
        for paragraph in found.text.split("\n\n"):
            assert paragraph.count('"') % 2 == 0, paragraph
            parts = paragraph.split('"')
            for before, said in zip(parts[0::2], parts[1::2], strict=False):
                assert said == said.strip(), paragraph
                assert said[0].isupper() or before.endswith(", "), paragraph
                assert said[-1] in ".,!?", paragraph


def test_article_fits_the_next_word(many: list[Story]) -> None:
    for found in many:
        assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]", found.text), found.text


def test_text_is_clean(many: list[Story]) -> None:
    for found in many:
        assert not re.search(r"[\[\]<>{}|_]|  |“|”| [.,!?]|[.,!?][A-Za-z]|\n\n\n", found.text), found.text
        assert not re.search(r"\b(\w+) \1\b", found.text), found.text
        assert found.text[-1] in '.!?"', found.text


def test_sentences_begin_with_a_capital(many: list[Story]) -> None:
    for found in many[:5000]:
        for paragraph in found.text.split("\n\n"):
            assert paragraph.lstrip('"')[0].isupper(), paragraph
            assert not re.search(r'[a-z][.]"? "?[a-z]', paragraph), paragraph


def test_a_lone_main_character_has_one_pronoun(many: list[Story]) -> None:
    other = {"she": r"\b(?:he|him|his)\b", "he": r"\b(?:she|her)\b"}
    lone = [found for found in many if found.friend is None and found.plot == "wish"]
    assert lone
    for found in lone:
        opening = found.text.split("\n\n")[0].lower()
        assert not re.search(other[found.pronoun], opening), found.text


def test_pronoun_agrees_with_the_name(many: list[Story]) -> None:
    for found in many:
        assert found.hero in lexicon()["names"][found.pronoun]
        if named := re.search(rf"(\w+) (?:named|called) {found.hero}\b", found.text):
            assert named[1] not in {"she": "boy", "he": "girl"}[found.pronoun]


def test_nats_count_every_choice(many: list[Story]) -> None:
    plots, name_count = len(lexicon()["plots"]), len(names())
    openings = len(lexicon()["forms"]["opening"])
    least = math.log(plots * name_count * openings)
    assert all(found.nats > least for found in many)
    assert 50 < sum(found.nats for found in many) / len(many) < 80


def test_a_good_share_begins_with_once_upon_a_time(many: list[Story]) -> None:
    share = sum(found.text.startswith("Once upon a time") for found in many) / len(many)
    assert 0.3 < share < 0.6


def test_every_form_is_told_and_names_only_what_exists() -> None:
    loaded = lexicon()
    beats = {beat.rstrip("?") for plot in loaded["plots"].values() for paragraph in plot for beat in paragraph}
    assert beats == set(loaded["forms"])
    for forms in loaded["forms"].values():
        assert len(forms) == len(set(forms))
        for form in forms:
            assert form.count("“") == form.count("”")
            assert all(word.lower() in loaded["words"] for _, word in CHOICE.findall(form) if word)
