"""The files in the repository: small enough, consistent with each other and with the recipe, and they tell a story."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import GPT2LMHeadModel, GPT2TokenizerFast

from gptserve.weights.storyteller.recipe.data import END_ID, END_OF_TEXT, TURN_END
from gptserve.weights.storyteller.recipe.evaluate import Prompt, held_out_loss, sample
from gptserve.weights.storyteller.recipe.generator import stories
from gptserve.weights.storyteller.recipe.judge import name_fault
from gptserve.weights.storyteller.recipe.train import Recipe

MOST_BYTES = 16_000_000


@pytest.fixture(scope="module")
def tokenizer(storyteller: Path) -> Tokenizer:
    return Tokenizer.from_file(str(storyteller / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(storyteller: Path) -> GPT2LMHeadModel:
    return GPT2LMHeadModel.from_pretrained(storyteller, dtype=torch.float32)


def test_weights_are_small_half_precision_and_named_like_gpt2(storyteller: Path) -> None:
    path = storyteller / "model.safetensors"
    assert path.stat().st_size <= MOST_BYTES
    with safe_open(path, framework="pt") as opened:
        names = set(opened.keys())
        assert all(opened.get_tensor(name).dtype == torch.bfloat16 for name in names)
    assert {"transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.c_attn.weight"} <= names
    assert "lm_head.weight" not in names


def test_config_agrees_with_tokenizer_and_recipe(storyteller: Path, tokenizer: Tokenizer) -> None:
    config = json.loads((storyteller / "config.json").read_text())
    recipe = Recipe()
    assert config["model_type"] == "gpt2"
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert (config["n_positions"], config["n_embd"], config["n_layer"], config["n_head"]) == (
        recipe.context_length,
        recipe.width,
        recipe.layers,
        recipe.heads,
    )
    assert config["bos_token_id"] == config["eos_token_id"] == tokenizer.token_to_id(END_OF_TEXT) == END_ID
    generation = json.loads((storyteller / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [END_ID, tokenizer.token_to_id(TURN_END)]


def test_tokenizer_files_agree(storyteller: Path, tokenizer: Tokenizer) -> None:
    vocabulary = json.loads((storyteller / "vocab.json").read_text(encoding="utf-8"))
    merges = (storyteller / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    described = json.loads(tokenizer.to_str())["model"]
    assert vocabulary == described["vocab"]
    assert merges == [pair if isinstance(pair, str) else " ".join(pair) for pair in described["merges"]]
    slow = GPT2TokenizerFast.from_pretrained(storyteller)
    for found in stories("held_out", 20):
        assert slow(found.text)["input_ids"] == tokenizer.encode(found.text).ids


@pytest.mark.slow
def test_every_story_fits_and_comes_back(tokenizer: Tokenizer) -> None:
    for found in stories("held_out", 2000):
        ids = tokenizer.encode(found.text).ids
        assert len(ids) + 2 <= Recipe().row_length
        assert tokenizer.decode(ids) == found.text


def test_tokenizer_knows_every_byte(tokenizer: Tokenizer) -> None:
    text = "".join(map(chr, range(0x20, 0x500))) + "日本語 🙂\r\n\t\0"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_model_predicts_held_out_stories(model: GPT2LMHeadModel, tokenizer: Tokenizer) -> None:
    loss, own, _ = held_out_loss(model, tokenizer, count=20)
    assert own < loss < 1.5 * own


@pytest.mark.slow
def test_model_tells_a_whole_story(model: GPT2LMHeadModel, tokenizer: Tokenizer) -> None:
    prompt = Prompt("Once upon a time there was a little girl named Lily", "Lily")
    told = sample(model, tokenizer, [prompt] * 4, temperature=0.5, seed=0)
    assert all(story.ended for story in told)
    assert [name_fault(story.text, "Lily") for story in told].count(None) >= 3
