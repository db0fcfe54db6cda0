"""Sampling and counting, with a small random model: the machinery, not the figures."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from transformers import GPT2LMHeadModel

from gptserve.weights.storyteller.recipe.data import END_ID, END_OF_TEXT, train_tokenizer
from gptserve.weights.storyteller.recipe.evaluate import (
    Prompt,
    Sample,
    held_out_loss,
    prompts,
    report,
    sample,
    until_end,
)
from gptserve.weights.storyteller.recipe.generator import stories
from gptserve.weights.storyteller.recipe.train import Recipe, new_model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(vocab_size=400, num_stories=100)


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    return new_model(Recipe(width=32, layers=1, heads=2), vocab_size=400).eval()


def samples_of_the_generator(count: int, ended: bool = True) -> list[Sample]:
    return [Sample(Prompt("", found.hero), found.text, ended) for found in stories("held_out", count)]


def test_prompts_are_bare_plain_and_named() -> None:
    chosen = prompts(30)
    assert len(chosen) == 30
    assert sum(prompt.hero is None for prompt in chosen) == 20
    assert all(prompt.text.endswith(prompt.hero) for prompt in chosen if prompt.hero is not None)


def test_sample_depends_on_its_own_seed_only(model: GPT2LMHeadModel, tokenizer: Tokenizer) -> None:
    start = Prompt("Once upon a time", None)
    both = sample(model, tokenizer, [start, start], 0.8, seed=5)
    alone = sample(model, tokenizer, [start], 0.8, seed=6)
    assert both[0].text != both[1].text
    assert both[1].text[:200] == alone[0].text[:200]
    assert all(found.text.startswith("Once upon a time") for found in both)


def test_what_is_told_is_cut_behind_the_first_end() -> None:
    assert until_end([4, 5, END_ID, 6, 9], ends={END_ID, 9}) == [4, 5, END_ID]
    assert until_end([4, 9, 5, END_ID], ends={END_ID, 9}) == [4, 9]
    assert until_end([4, 5, 6], ends={END_ID}) == [4, 5, 6]


def test_a_story_has_no_token_that_ends_a_text(model: GPT2LMHeadModel, tokenizer: Tokenizer) -> None:
    [told] = sample(model, tokenizer, [Prompt(END_OF_TEXT, None)], 0.8, seed=1)
    assert END_OF_TEXT not in told.text


def test_held_out_loss_of_an_untrained_model_is_that_of_a_guess(model: GPT2LMHeadModel, tokenizer: Tokenizer) -> None:
    loss, own, tokens = held_out_loss(model, tokenizer, count=3)
    assert loss == pytest.approx(torch.log(torch.tensor(400.0)).item(), abs=0.3)
    assert 0 < own < 1
    assert tokens == sum(len(tokenizer.encode(found.text).ids) + 1 for found in stories("held_out", 3))


def test_bar_is_met_by_the_generator_and_missed_by_stories_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptserve.weights.storyteller.recipe.evaluate.copied", lambda samples: 0)
    assert report(samples_of_the_generator(20))
    assert not report(samples_of_the_generator(20, ended=False))
