"""The recipe on a miniature: padding does not count, the loss falls, the files load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import GPT2LMHeadModel

from gptserve.weights.storyteller.recipe.data import END_ID
from gptserve.weights.storyteller.recipe.train import (
    IGNORED,
    Recipe,
    batch,
    learning_rate,
    masked_loss,
    new_model,
    train,
)

MINIATURE = Recipe(
    steps=12,
    vocab_size=400,
    tokenizer_stories=100,
    context_length=640,
    width=32,
    layers=1,
    heads=2,
    rows=2,
    row_length=576,
    long_every=4,
    peak_rate=1e-2,
    warm_up=2,
    cool_down=4,
    log_every=4,
    save_every=8,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("miniature")
    return folder, train(MINIATURE, folder)


def test_batch_shifts_targets_by_one_and_ignores_padding() -> None:
    inputs, targets = batch([[5, 6, 7], [8, 9]], length=5)
    assert inputs.tolist() == [[5, 6, END_ID, END_ID], [8, END_ID, END_ID, END_ID]]
    assert targets.tolist() == [[6, 7, IGNORED, IGNORED], [9, IGNORED, IGNORED, IGNORED]]


def test_padding_does_not_change_the_loss() -> None:
    model = new_model(MINIATURE, vocab_size=50)
    rows = [[1, 2, 3, 4, 5, 6, 0], [7, 8, 9, 0]]
    with torch.inference_mode():
        short, long = (masked_loss(model, *batch(rows, length)) for length in (7, 30))
        singly = [masked_loss(model, *batch([row], len(row))) * (len(row) - 1) for row in rows]
    torch.testing.assert_close(short, long)
    torch.testing.assert_close(short, torch.stack(singly).sum() / 9)


def test_end_of_text_counts_in_the_loss() -> None:
    _, targets = batch([[1, 2, END_ID]], length=3)
    assert targets.tolist() == [[2, END_ID]]


def test_learning_rate_warms_up_holds_and_cools_down() -> None:
    recipe = Recipe(steps=100, warm_up=10, cool_down=40, peak_rate=1.0)
    rates = [learning_rate(recipe, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert rates[10:60] == pytest.approx([1.0] * 50)
    assert rates[60:] == sorted(rates[60:], reverse=True)
    assert rates[-1] == pytest.approx(0.01)


def test_a_few_steps_lower_the_loss(trained: tuple[Path, list[float]]) -> None:
    _, losses = trained
    assert len(losses) == MINIATURE.steps
    assert sum(losses[-3:]) < sum(losses[:3]) - 1


def test_training_twice_gives_the_same_losses(trained: tuple[Path, list[float]], tmp_path: Path) -> None:
    assert train(MINIATURE, tmp_path) == pytest.approx(trained[1], rel=1e-3)


def test_written_folder_loads_and_is_complete(trained: tuple[Path, list[float]]) -> None:
    folder, _ = trained
    expected = {"config.json", "generation_config.json", "model.safetensors"}
    expected |= {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == expected
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size() == 400
    assert model.config.eos_token_id == END_ID
    assert model.lm_head.weight is model.transformer.wte.weight
