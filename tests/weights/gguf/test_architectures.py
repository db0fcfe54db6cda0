"""Models in GGUF: the configuration and, bit for bit, the weights of the checkpoint that they were made from."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.families import load_config
from gptserve.weights.gguf.architectures import ARCHITECTURES
from gptserve.weights.inventory import stored_parts
from gptserve.weights.sharding import Share
from gptserve.weights.source import resolve_model
from tests.engine.runs import make_engine, make_request, ragged_prompts, run
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES
from tests.weights.gguf.written import write_gguf

_ROPE = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_HEAD = {"query_pre_attn_scalar": 24}  # that of the sizes: files have none
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: SHAPES[name]
        for name in (
            "GPT-2",
            "Llama",
            "Llama, biases, own head size, tied",
            "Qwen2",
            "Qwen3",
            "Gemma",
            "OLMo 2",
            "SmolLM3",
            "Arcee",
        )
    },
    "Llama 3.1": (
        "llama",
        {**SHAPES["Llama"][1], "rope_parameters": {**_ROPE, "original_max_position_embeddings": 8192}},
    ),
    "Phi-3": SHAPES["Phi-3, past its window"],
    "Phi-3, LongRoPE": SHAPES["Phi-3, LongRoPE"],
    "Phi-4 mini": (
        "phi3",
        {
            **SHAPES["Phi-3, LongRoPE"][1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    "StarCoder2": ("starcoder2", {**SHAPES["StarCoder2, past its window"][1], "sliding_window": 4096}),
    "Mixtral": ("mixtral", {**SHAPES["Mixtral, past its window"][1], "sliding_window": None}),
    "Qwen3 MoE": ("qwen3_moe", {**SHAPES["Qwen3 MoE, weights of all"][1], "norm_topk_prob": True}),
    "Gemma 2": ("gemma2", {**SHAPES["Gemma 2, past its window"][1], **_HEAD}),
    "Gemma 3": (
        "gemma3_text",
        {**SHAPES["Gemma 3, past its window"][1], **_HEAD, "num_hidden_layers": 7, "layer_types": None},
    ),
}
QUANTS = (GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.name)
@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_checkpoint_that_it_was_made_from(name: str, quant: GGMLQuantizationType, tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / f"{quant.name}.gguf"
    write_model(folder, *MODELS[name])
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    write_gguf(folder, path, quant, in_place=copy)

    found, expected = load_config(resolve_model(str(path))), load_config(copy)
    assert replace(found, eos_token_ids=()) == replace(expected, eos_token_ids=())
    for share in (Share(), Share(1, 2)):
        of_file, of_copy = (
            dict(Checkpoint(its, load_config(its), share).stream(dtype=torch.float32, device="cpu"))
            for its in (resolve_model(str(path)), copy)
        )
        assert of_file.keys() == of_copy.keys()
        differing = [key for key in of_file if not torch.equal(of_file[key], of_copy[key])]
        assert [key for key in differing if not key.endswith("norm.weight")] == []
        for key in differing:  # one was added and taken away
            assert (of_file[key] - of_copy[key]).abs().max() < 1e-6


def test_the_inventory_names_the_types_of_a_file(tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    write_model(folder, *MODELS["Mixtral"])
    write_gguf(folder, path, GGMLQuantizationType.Q4_1)
    its = resolve_model(str(path))
    parts = list(stored_parts(its, load_config(its)))

    experts = [part for part in parts if ".experts." in part.canonical]
    assert {part.type for part in experts} == {"GGUF's Q4_1"}
    assert sum(part.num_bytes for part in experts) * 8 == 5 * sum(part.num_weights for part in experts)
    assert {part.type for part in parts if part.canonical.endswith("norm.weight")} == {"GGUF's F32"}


def test_an_engine_gives_the_tokens_of_the_checkpoint(tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model-Q8_0.gguf"
    write_model(folder, *MODELS["Llama"])
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    write_gguf(folder, path, GGMLQuantizationType.Q8_0, in_place=copy)
    requests = [make_request(str(i), prompt, max_tokens=20) for i, prompt in enumerate(ragged_prompts(4, 60))]
    of_file, of_copy, of_float = (run(make_engine(its), requests) for its in (resolve_model(str(path)), copy, folder))
    assert of_file == of_copy != of_float


def test_all_architectures_are_tried() -> None:
    assert {its.model_type for its in ARCHITECTURES.values()} == {model_type for model_type, _ in MODELS.values()}
