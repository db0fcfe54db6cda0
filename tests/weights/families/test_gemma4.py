"""What Gemma 4's config.json says of each layer, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptserve.engine.runner.memory import kv_bytes_per_token, parameter_counts
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.config import ModelConfig
from gptserve.weights.errors import InvalidCheckpointError, InvalidConfigError, UnsupportedModelError
from gptserve.weights.families import load_config
from gptserve.weights.inventory import stored_parts
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES
from tests.weights.families.known import KNOWN
from tests.weights.quantized.formats import FORMATS
from tests.weights.quantized.packers import write_quantized

SMALL: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
}


def load(folder: Path, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(SMALL | fields))
    return load_config(folder)


def published(folder: Path, name: str) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(KNOWN[name][0]))
    return load_config(folder)


def test_heads_are_wider_and_fewer_where_no_window_is(tmp_path: Path) -> None:
    near, far = published(tmp_path, "gemma-4-31B").distinct_layers
    assert (near.window, near.head_size, near.num_kv_heads, near.keys_are_values) == (1024, 256, 16, False)
    assert (far.window, far.head_size, far.num_kv_heads, far.keys_are_values) == (None, 512, 4, True)
    assert near.rotary is not None
    assert far.rotary is not None
    assert near.rotary.inv_freqs[:2] == (1.0, 10_000.0 ** (-2 / 256))
    assert far.rotary.inv_freqs[:2] == (1.0, 1e6 ** (-2 / 512))
    assert (len(near.rotary.inv_freqs), len(far.rotary.inv_freqs)) == (128, 256)
    assert [freq > 0 for freq in far.rotary.inv_freqs] == [True] * 64 + [False] * 192


def test_the_last_layers_read_the_keys_of_the_last_layer_of_their_kind_before_them(tmp_path: Path) -> None:
    config = published(tmp_path, "gemma-4-E2B")
    own, shared = config.layers[:15], config.layers[15:]
    assert {layer.kv_layer for layer in own} == {None}
    assert [layer.kv_layer for layer in shared] == [13, 13, 13, 13, 14] * 4
    assert {layer.ffn_size for layer in own} == {6144}
    assert {layer.ffn_size for layer in shared} == {12_288}
    # Twelve layers with heads of 256 numbers and three of 512, each of keys and values of two bytes.
    assert kv_bytes_per_token(config, 2) == 2 * 2 * (12 * 256 + 3 * 512)


def test_a_key_that_is_the_value_counts_once(tmp_path: Path) -> None:
    counts = parameter_counts(load(tmp_path, attention_k_eq_v=True, num_global_key_value_heads=1, global_head_dim=32))
    near, far = 4 * 16 + 2 * 2 * 16 + 4 * 16, 4 * 32 + 32 + 4 * 32
    assert counts["attention"] == 2 * 64 * (near + far)


def test_layers_have_the_heads_that_transformers_writes_for_each(tmp_path: Path) -> None:
    config = load(tmp_path, per_layer_config={"01": {"head_dim": 8}, "3": {"num_key_value_heads": 4}})
    assert [(layer.head_size, layer.num_kv_heads) for layer in config.layers] == [(16, 2), (8, 2), (16, 2), (16, 4)]


def test_the_last_layer_has_no_window_whatever_its_kind(tmp_path: Path) -> None:
    config = load(tmp_path, layer_types=["sliding_attention"] * 4)
    assert [layer.window for layer in config.layers] == [512, 512, 512, None]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"use_bidirectional_attention": "all"},
            "config.json: use_bidirectional_attention must be \"vision\", got 'all': bidirectional attention cannot "
            "continue a text",
        ),
        (
            {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 95},
            "config.json: vocab_size_per_layer_input must be vocab_size (96), got 95: a token without an input of each "
            "layer is not computed",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}}},
            "config.json: rope_parameters: full_attention: partial_rotary_factor must be 1.0, got 0.25: transformers "
            "turns whole heads for this rope_type",
        ),
        (
            {"model_type": "gemma4_unified_text", "enable_moe_block": True},
            "config.json: enable_moe_block must be false, got True: transformers has no mixtures for this model_type",
        ),
        (
            {"model_type": "gemma4_unified_text", "hidden_size_per_layer_input": 256},
            "config.json: hidden_size_per_layer_input must be 0, got 256: transformers has no such inputs for this "
            "model_type",
        ),
        (
            {"per_layer_config": {"4": {"head_dim": 8}}},
            "config.json sets `per_layer_config: 4` to {'head_dim': 8}, which gptserve does not know and which may "
            "change what is computed; remove it from the file if you know that it changes nothing",
        ),
    ],
)
def test_what_is_not_computed_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        load(tmp_path, **fields)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"per_layer_config": None}, "config.json: per_layer_config must be an object, got None"),
        (
            {"num_kv_shared_layers": 3},
            "config.json: num_kv_shared_layers must be such that layers of each kind are before those that share, "
            "got 3",
        ),
        ({"num_kv_shared_layers": 4}, "config.json: num_kv_shared_layers must be an integer in [0, 3], got 4"),
        (
            {"num_kv_shared_layers": 2, "per_layer_config": {"3": {"head_dim": 8}}},
            "config.json: per_layer_config must be the same for layers 1 and 3, which shares, "
            "got {'3': {'head_dim': 8}}",
        ),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "config.json: per_layer_config: 1: num_key_value_heads must be a divisor of num_attention_heads (4), got 3",
        ),
        (
            {"enable_moe_block": True, "moe_intermediate_size": 32, "num_experts": 4, "top_k_experts": 5},
            "config.json: top_k_experts must be an integer in [1, 4], got 5",
        ),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
            "config.json: moe_intermediate_size must be an integer in [1, 1048576], but is missing",
        ),
    ],
)
def test_what_fits_no_layer_is_refused_with_its_rule(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        load(tmp_path, **fields)
    assert str(refused.value) == message


def test_keys_and_values_that_no_layer_computes_may_be_in_the_files(tmp_path: Path) -> None:
    """Published files have them for the layers that share, too."""
    write_model(tmp_path, *SHAPES["Gemma 4, inputs of layers and shared keys"])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for part in ("k_proj", "v_proj", "k_norm"):
        name = f"model.layers.5.self_attn.{part}.weight"
        assert name not in tensors
        tensors[name] = torch.ones(8)
    save_file(tensors, path)
    found = dict(Checkpoint(tmp_path, load_config(tmp_path)).stream(dtype=torch.float32, device="cpu"))
    assert found["blocks.5.qkv.weight"].shape == (4 * 32, 64)
    assert "blocks.5.k_norm.weight" not in found
    tensors["model.layers.5.self_attn.k_proj.bias"] = torch.ones(8)
    save_file(tensors, path)
    with pytest.raises(InvalidCheckpointError, match=r"1 unexpected \(.*layers\.5\.self_attn\.k_proj\.bias"):
        Checkpoint(tmp_path, load_config(tmp_path))


def unfused(tensors: dict[str, torch.Tensor], below: str) -> dict[str, torch.Tensor]:
    """Return the tensors with each expert's linears apart, below `layers.{i}.{below}`."""
    found = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        layer, _, kind = name.partition(".experts.")
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if names is None:
            found[name] = tensor
            continue
        for e, its in enumerate(tensor):
            for part, rows in zip(names, its.chunk(len(names)), strict=True):
                found[f"{layer}.{below}.{e}.{part}.weight"] = rows.contiguous()
    return found


@pytest.mark.parametrize("below", ["experts", "moe.experts"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 of modelopt", "fp8 of modelopt", None])
def test_experts_may_be_apart_and_quantized(name: str | None, below: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder, *SHAPES["Gemma 4 with experts"])
    whole = load_file(folder / "model.safetensors")
    save_file(unfused(whole, below), folder / "model.safetensors")
    if name is None:
        plain = tmp_path / "plain"
        plain.mkdir()
        (plain / "config.json").write_bytes((folder / "config.json").read_bytes())
        save_file(whole, plain / "model.safetensors")
    else:
        form = FORMATS[name]
        plain = write_quantized(folder, form.section, lambda module: form.of(module) if ".experts." in module else None)
    found, expected = (
        dict(Checkpoint(its, load_config(its)).stream(dtype=torch.float32, device="cpu")) for its in (folder, plain)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    up = "blocks.1.experts.{}.ffn_up.weight"
    assert not torch.equal(found[up.format(0)], found[up.format(1)])
    parts = list(stored_parts(folder, load_config(folder)))
    assert len([part for part in parts if ".experts." in part.canonical]) == 4 * 6 * 3
