"""GGUF files of which llama.cpp's conversion changes more than names and order: what they compute."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.weights.families import load_config
from gptserve.weights.gguf.reader import read_header
from gptserve.weights.source import resolve_model
from tests.engine.runs import ragged_prompts
from tests.parity.models import load_in_transformers, write_model
from tests.parity.shapes import SHAPES
from tests.parity.test_families import paged_logits
from tests.weights.gguf.written import write_gguf

_FALCON = {**SHAPES["Falcon-H1"][1], "tie_word_embeddings": False, "time_step_limit": [0.0, math.inf]}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def check(folder: Path, vocab_size: int) -> None:
    """Assert that a file of the model in a folder gives the logits that transformers gives for the folder."""
    path = folder.with_suffix(".gguf")
    write_gguf(folder, path, GGMLQuantizationType.F32)
    prompts, model = ragged_prompts(5, 60, vocab_size=vocab_size), load_in_transformers(folder)
    with torch.no_grad():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    largest = max(its.abs().max() for its in expected)
    for found, its in zip(paged_logits(resolve_model(str(path)), prompts, ReferenceAttention()), expected, strict=True):
        assert (found - its).abs().max() < 1e-4 * largest


@pytest.mark.parametrize(
    "more", [{}, {"mamba_rms_norm": True, "mamba_norm_before_gate": False}], ids=["plain", "norms"]
)
def test_weights_of_falcon_h1_have_its_factors(more: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder, "falcon_h1", {**_FALCON, **more})
    check(folder, 90)
    of_file = load_config(resolve_model(str(folder.with_suffix(".gguf"))), "refuse")
    factors = [
        {its for _, parts in config.weight_factors for its in parts} for config in (of_file, load_config(folder))
    ]
    assert factors[0] == {1.0} < factors[1]


def test_gemma_3n_has_inputs_of_layers_for_all_tokens_and_keys_that_are_not_computed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model_type, fields = SHAPES["Gemma 3n, past its window"]
    write_model(folder, model_type, fields)
    tensors = load_file(folder / "model.safetensors")
    for part in ("k_proj", "v_proj", "k_norm"):  # as published
        tensors[f"model.layers.5.self_attn.{part}.weight"] = tensors[f"model.layers.2.self_attn.{part}.weight"] + 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    check(folder, fields["vocab_size_per_layer_input"])
    header = read_header(folder.with_suffix(".gguf"))
    assert header.tensors["per_layer_token_embd.weight"].shape[0] == fields["vocab_size"]
    assert "blk.5.attn_k.weight" in header.tensors
