"""What mixtures of Qwen3.5 and Qwen3-Next say of their experts, and how files have these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.config import Experts, ModelConfig, Router
from gptserve.weights.errors import InvalidCheckpointError, InvalidConfigError, UnsupportedModelError
from gptserve.weights.families import load_config
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES
from tests.weights.families.known import KNOWN


def load(folder: Path, name: str, **fields: Any) -> ModelConfig:
    model_type, its = SHAPES[name]
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **its, **fields}))
    return load_config(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(Checkpoint(folder, load_config(folder)).stream(dtype=torch.float32, device="cpu"))


@pytest.mark.parametrize("name", ["Qwen3.5 with experts", "Qwen3-Next"])
def test_each_layer_mixes_experts_and_has_shared_ones_with_a_gate(name: str, tmp_path: Path) -> None:
    config = load(tmp_path, name)
    experts = Experts(5, 2, Router(renormalised=True), num_shared=2, has_shared_gate=True)
    assert [layer.experts for layer in config.layers] == [experts] * 2
    assert [layer.ffn_size for layer in config.layers] == [32] * 2
    assert [layer.recurrence is None for layer in config.layers] == [False, True]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"norm_topk_prob": False},
            UnsupportedModelError,
            "config.json: norm_topk_prob must be true, got False: transformers has no other for this model_type",
        ),
        (
            {"mlp_only_layers": [0]},
            UnsupportedModelError,
            "config.json: mlp_only_layers must be [], got [0]: transformers has no other for this model_type",
        ),
        (
            {"attn_output_gate": False},
            UnsupportedModelError,
            "config.json: attn_output_gate must be true, got False: transformers has no other for this model_type",
        ),
        (
            {"output_gate_type": "sigmoid"},
            UnsupportedModelError,
            "config.json: output_gate_type must be \"swish\", got 'sigmoid': transformers has no other for this "
            "model_type",
        ),
        (
            {"shared_expert_intermediate_size": 48},
            InvalidConfigError,
            "config.json: shared_expert_intermediate_size must be a multiple of moe_intermediate_size (32), got 48",
        ),
        (
            {"num_experts_per_tok": 6},
            InvalidConfigError,
            "config.json: num_experts_per_tok must be an integer in [1, 5], got 6",
        ),
        (
            {"num_experts": 32_769},
            InvalidConfigError,
            "config.json: num_experts must be an integer in [1, 32768], got 32769",
        ),
    ],
)
def test_mixtures_that_are_not_computed_are_refused(
    fields: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as refused:
        load(tmp_path, "Qwen3.5 with experts", **fields)
    assert str(refused.value) == message


@pytest.mark.parametrize("name", ["Qwen3.5 with experts", "Qwen3.5 with experts that sees", "Qwen3-Next"])
def test_experts_are_read_apart_and_in_one_tensor(name: str, tmp_path: Path) -> None:
    """transformers writes each apart, as files in FP8 have them; the published ones in BF16 have one tensor of all."""
    write_model(tmp_path, *SHAPES[name])
    expected = weights(tmp_path)
    put_experts_together(tmp_path)
    found = weights(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], its) for key, its in expected.items())
    up = "blocks.1.experts.{}.ffn_up.weight"
    assert not torch.equal(found[up.format(0)], found[up.format(1)])


def put_experts_together(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    stems = sorted({key.partition(".experts.")[0] for key in tensors if ".experts." in key})
    assert len(stems) == load_config(folder).num_layers
    for stem in stems:
        gates, ups, downs = (
            torch.stack([tensors.pop(f"{stem}.experts.{e}.{part}_proj.weight") for e in range(5)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{stem}.experts.gate_up_proj": torch.cat((gates, ups), 1), f"{stem}.experts.down_proj": downs}
    save_file(tensors, path)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES["Qwen3.5 with experts"])
    put_experts_together(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.down_proj"]
    save_file(tensors, path)
    with pytest.raises(InvalidCheckpointError, match=r"1 missing \(layers\.1\.mlp\.experts\.down_proj\)"):
        weights(tmp_path)


@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "Qwen3.6-35B-A3B", "Qwen3.5-122B-A10B"])
def test_all_keys_of_published_files_are_known(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN[name][0]))
    config = load_config(tmp_path, "refuse")
    assert [layer.recurrence is None for layer in config.layers[:4]] == [False] * 3 + [True]
    assert config.layers[3].rotary is not None
    assert config.layers[3].rotary.inv_freqs[:2] == (1.0, 1e7 ** (-2 / 64))
    assert config.eos_token_ids == (248_044,)


def test_a_layer_of_qwen3_next_may_be_dense(tmp_path: Path) -> None:
    config = load(tmp_path, "Qwen3-Next, a dense layer, weights of all")
    first, last = config.layers
    assert first.experts is not None
    assert (first.experts.router, first.ffn_size) == (Router(renormalised=False), 32)
    assert (last.experts, last.ffn_size) == (None, 96)
