"""Falcon-H1's config.json: sizes, factors of linears, and values that are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.config import ModelConfig, StateSpace
from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError
from gptserve.weights.families import load_config
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES

FIELDS = {
    "model_type": "falcon_h1",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "max_position_embeddings": 128,
}
MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.75,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.5,
    "key_multiplier": 3.0,
    "mlp_multipliers": [0.25, 4.0],
    "ssm_in_multiplier": 2.0,
    "ssm_out_multiplier": 0.125,
    "ssm_multipliers": [1.5, 2.5, 3.5, 4.5, 5.5],
}


def load(folder: Path, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(FIELDS | fields), encoding="utf-8")
    return load_config(folder)


def test_every_layer_attends_and_keeps_a_state(tmp_path: Path) -> None:
    config = load(tmp_path)
    space = StateSpace(1, 8, 256, 16, 4, norm_eps=1e-5, step_limits=(0.0, math.inf), has_norm=False)
    assert {(layer.num_heads, layer.num_kv_heads, layer.recurrence) for layer in config.layers} == {(4, 2, space)}


def test_a_mixer_is_as_wide_as_the_file_says_or_as_a_factor_of_the_stream(tmp_path: Path) -> None:
    sizes = {"mamba_d_ssm": None, "mamba_expand": 3, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 24}
    others = {"mamba_d_conv": 2, "mamba_conv_bias": False, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
    (space,) = {layer.recurrence for layer in load(tmp_path, **sizes, **others, time_step_limit=[0.5, 2]).layers}
    assert space == StateSpace(2, 8, 24, 24, 2, norm_eps=1e-5, step_limits=(0.5, 2.0), has_conv_bias=False)


def test_factors_are_those_of_scores_of_the_stream_and_of_weights(tmp_path: Path) -> None:
    plain, config = load(tmp_path), load(tmp_path, **MULTIPLIERS)
    assert (config.embed_scale, config.logit_scale) == (2.0, 0.75)
    assert config.layers[0].attention_scale == plain.layers[0].attention_scale * 1.5**2 * 3.0
    assert dict(config.weight_factors) == {
        "attn_out": (1.5 * 0.5,),
        "ffn_up": (0.25, 1.0),
        "ffn_down": (4.0,),
        "memory_gate": (3.0,),
        "memory_conv": (9.0, 7.0, 5.0),
        "memory_rates": (11.0,),
        "memory_out": (0.125,),
    }
    assert {factor for _, factors in plain.weight_factors for factor in factors} == {1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_multiplied_as_they_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    model_type, fields = SHAPES["Falcon-H1"]
    write_model(tmp_path, model_type, fields)
    config = load_config(tmp_path)
    found = dict(Checkpoint(tmp_path, config).stream(dtype=dtype, device="cpu"))
    fields = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    fields = {name: value for name, value in fields.items() if "multiplier" not in name}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    stored = dict(Checkpoint(tmp_path, load_config(tmp_path)).stream(dtype=dtype, device="cpu"))

    factors, changed = dict(config.weight_factors), set[str]()
    for name, tensor in found.items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if torch.equal(tensor, stored[name]):
            continue
        changed.add(kind)
        values = stored[name].float() if dtype == torch.bfloat16 else stored[name]
        if kind == "ffn_up":
            gate, up = values.chunk(2)
            expected = torch.cat([gate * factors[kind][0], up])
        elif kind == "memory_conv":
            sizes = [24 * 2 * 4, 24 * 2 * 4, 96 * 4]
            its = torch.cat([torch.full((size,), of) for size, of in zip(sizes, factors[kind], strict=True)])
            expected = (values.flatten() * its).view_as(values)
        else:
            expected = values * factors[kind][0]
        assert torch.equal(tensor, expected.to(tensor.dtype)), name
    assert changed == set(factors)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mamba_n_heads": 7}, "mamba_n_heads must be a multiple of mamba_n_groups (1) and a divisor of 128, got 7"),
        ({"mamba_n_groups": 3}, "mamba_n_heads must be a multiple of mamba_n_groups (3) and a divisor of 128, got 8"),
        ({"mamba_d_head": 32}, 'mamba_d_head must be "auto" or 16, got 32'),
        ({"mlp_multipliers": [1.0]}, "mlp_multipliers must be a list of 2 finite numbers above 0, got [1.0]"),
        ({"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers must be a list of 5 finite numbers above 0, got [1.0, 2.0]"),
        (
            {"ssm_multipliers": [1, 1, 1e7, 1, 1]},
            "ssm_multipliers must be from 1e-6 to 1e6, got [1, 1, 10000000.0, 1, 1]",
        ),
        ({"attention_in_multiplier": 1e300}, "attention_in_multiplier must be from 1e-6 to 1e6, got 1e+300"),
        (
            {"mamba_d_ssm": 2**20, "mamba_n_heads": 2**20},
            f"mamba_n_heads must be such that convolutions have at most {2**22} factors, not {4 * (2**20 + 512)}, got "
            f"{2**20}",
        ),
        ({"key_multiplier": 0}, "key_multiplier must be a finite number above 0, got 0"),
    ],
)
def test_values_that_make_no_model_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError) as error:
        load(tmp_path, **fields)
    assert str(error.value) == f"config.json: {message}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({name: True}, f"{name} must be false, got True: factors of linears with biases are not computed")
            for name in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")
        ),
        (
            {"hidden_act": "gelu"},
            "hidden_act must be \"silu\", got 'gelu': convolutions of Mamba-2 have no other here",
        ),
        ({"attn_layer_indices": [0]}, "attn_layer_indices must be null, got [0]: transformers has no other"),
        ({"mamba_use_mlp": False}, "mamba_use_mlp must be true, got False: transformers has no other"),
        (
            {"mamba_rms_norm": True},
            "mamba_norm_before_gate must be false, got True: a norm before the gates is not computed",
        ),
    ],
)
def test_choices_that_are_not_computed_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        load(tmp_path, **fields)
    assert str(error.value) == f"config.json: {message}"
