"""The recipe on a miniature: padding does not count, the loss falls, the files load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GPT2LMHeadModel

from gptserve.weights.chat.template import load_chat_template
from gptserve.weights.storyteller.recipe.data import CHAT_TEMPLATE, END_ID, TURN_END, TURN_START, Token
from gptserve.weights.storyteller.recipe.train import (
    Recipe,
    batch,
    learning_rate,
    new_model,
    total_weight,
    train,
    train_chat,
    weighted_loss,
)
from tests.weights.storyteller.recipe.miniature import MINIATURE


def weighted(*ids: int) -> list[Token]:
    return [(token, 1.0) for token in ids]


def test_batch_shifts_targets_by_one_and_padding_weighs_nothing() -> None:
    inputs, targets, weights = batch([[(5, 0), (6, 0), (7, 30), (0, 1)], weighted(8, 9)])
    assert inputs.tolist() == [[5, 6, 7], [8, 9, END_ID]]
    assert targets.tolist() == [[6, 7, END_ID], [9, END_ID, END_ID]]
    assert weights.tolist() == [[0, 30, 1], [1, 0, 0]]


def test_padding_does_not_change_the_loss() -> None:
    model = new_model(MINIATURE, vocab_size=50)
    rows = [weighted(1, 2, 3, 4, 5, 6, 0), weighted(7, 8, 9, 0)]
    with torch.inference_mode():
        together, singly = weighted_loss(model, rows), [weighted_loss(model, [row]) for row in rows]
    torch.testing.assert_close(together, sum(singly))


def test_a_token_counts_in_the_loss_by_its_weight() -> None:
    model = new_model(MINIATURE, vocab_size=50)
    rows = [[(1, 1.0), (2, 1.0), (3, weight)] for weight in (0.0, 1.0, 2.0)]
    with torch.inference_mode():
        only_read, once, twice = (weighted_loss(model, [row]).item() for row in rows)
    assert twice - once == pytest.approx(once - only_read, rel=1e-4)
    assert [total_weight([row]) for row in rows] == [1, 2, 3]


def test_learning_rate_warms_up_holds_and_cools_down() -> None:
    recipe = Recipe(steps=100, warm_up=10, cool_down=40, peak_rate=1.0)
    rates = [learning_rate(recipe, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert rates[10:60] == pytest.approx([1.0] * 50)
    assert rates[60:] == sorted(rates[60:], reverse=True)
    assert rates[-1] == pytest.approx(0.01)


def test_a_few_steps_lower_the_loss(miniature: tuple[Path, list[float]]) -> None:
    _, losses = miniature
    assert len(losses) == MINIATURE.steps
    assert sum(losses[-3:]) < sum(losses[:3]) - 1


def test_training_twice_gives_the_same_losses(miniature: tuple[Path, list[float]], tmp_path: Path) -> None:
    assert train(MINIATURE, tmp_path) == pytest.approx(miniature[1], rel=1e-3)


def test_written_folder_loads_and_is_complete(miniature: tuple[Path, list[float]]) -> None:
    folder, _ = miniature
    expected = {"config.json", "generation_config.json", "model.safetensors"}
    expected |= {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == expected
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size() == 400
    assert model.config.eos_token_id == END_ID
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.slow
def test_the_second_stage_adds_two_tokens_and_a_template(chat_miniature: Path) -> None:
    model = GPT2LMHeadModel.from_pretrained(chat_miniature, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(chat_miniature)
    assert model.config.vocab_size == len(tokenizer) == 402
    assert tokenizer.convert_tokens_to_ids([TURN_START, TURN_END]) == [400, 401]
    assert tokenizer.decode([400, 401, 5], skip_special_tokens=True) == tokenizer.decode([5])
    assert model.generation_config.eos_token_id == [END_ID, 401]
    template = load_chat_template(chat_miniature)
    assert template is not None
    assert template.source == tokenizer.chat_template == CHAT_TEMPLATE


def test_the_second_stage_starts_from_the_first(miniature: tuple[Path, list[float]], tmp_path: Path) -> None:
    once = replace(MINIATURE, steps=1, peak_rate=0.0, warm_up=0)
    train_chat(once, miniature[0], tmp_path)
    before, after = (
        GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32) for folder in (miniature[0], tmp_path)
    )
    old, new = before.state_dict(), after.state_dict()
    for name, tensor in old.items():
        torch.testing.assert_close(new[name][: len(tensor)], tensor, rtol=0, atol=0)
    assert len(new["lm_head.weight"]) == len(old["lm_head.weight"]) + 2
