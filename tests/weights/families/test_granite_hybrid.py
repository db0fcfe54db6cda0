"""Granite 4's config.json: which layers attend, sizes of mixers, and values that are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gptserve.weights.config import Experts, ModelConfig, StateSpace
from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError
from gptserve.weights.families import load_config

FIELDS = {
    "model_type": "granitemoehybrid",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "max_position_embeddings": 128,
}


def load(folder: Path, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(FIELDS | fields), encoding="utf-8")
    return load_config(folder)


def test_layers_attend_by_either_name_of_their_kinds(tmp_path: Path) -> None:
    for name in ("layer_types", "layers_block_type"):
        for kinds in (["mamba", "attention", "mamba"], ["linear_attention", "full_attention", "linear_attention"]):
            config = load(tmp_path, **{"layer_types": None, name: kinds})
            assert [layer.recurrence is None for layer in config.layers] == [False, True, False]
            assert [layer.num_heads for layer in config.layers] == [0, 4, 0]


def test_a_mixer_has_the_sizes_that_the_file_says_or_else_those_of_transformers(tmp_path: Path) -> None:
    (space,) = {layer.recurrence for layer in load(tmp_path).layers} - {None}
    assert space == StateSpace(1, 8, 256, 16, 4, norm_eps=1e-6, step_limits=(0.0, math.inf))
    sizes = {"mamba_n_groups": 2, "mamba_d_state": 24, "mamba_expand": 3, "mamba_d_head": 24, "mamba_d_conv": 2}
    others = {"mamba_conv_bias": False, "rms_norm_eps": 0.01, "residual_multiplier": 0.5, "time_step_limit": [0.5, 2]}
    (space,) = {layer.recurrence for layer in load(tmp_path, **sizes, **others).layers} - {None}
    assert space == StateSpace(2, 8, 24, 24, 2, norm_eps=0.01, step_limits=(0.5, 2.0), has_conv_bias=False)


@pytest.mark.parametrize("limit", [math.inf, {"__float__": "Infinity"}])
def test_an_infinite_step_is_read_as_files_have_it(limit: object, tmp_path: Path) -> None:
    (space,) = {layer.recurrence for layer in load(tmp_path, time_step_limit=[0.25, limit]).layers} - {None}
    assert isinstance(space, StateSpace)
    assert space.step_limits == (0.25, math.inf)


def test_layers_have_experts_and_a_shared_one_or_that_alone(tmp_path: Path) -> None:
    config = load(tmp_path, num_local_experts=4, num_experts_per_tok=2, intermediate_size=32)
    assert {(layer.ffn_size, layer.experts) for layer in config.layers} == {(32, Experts(4, 2, num_shared=3))}
    assert all(layer.ffn_size == 96 and layer.experts is None for layer in load(tmp_path).layers)


def test_shared_experts_that_would_fill_memory_are_refused(tmp_path: Path) -> None:
    fields = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 1}
    assert load(tmp_path, **fields, shared_intermediate_size=21_845).layers[0].experts == Experts(
        2, 1, num_shared=21_845
    )
    with pytest.raises(InvalidConfigError, match=r"^config.json: layers have more than 65536 shared experts in all$"):
        load(tmp_path, **fields, shared_intermediate_size=21_846)


LIMITS = "a list of two numbers, of which the first is at least 0 and the second no less"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mamba_n_heads": 7}, "mamba_n_heads must be a multiple of mamba_n_groups (1) and a divisor of 128, got 7"),
        (
            {"mamba_n_groups": 3},
            "mamba_n_heads must be a multiple of mamba_n_groups (3) and a divisor of 128, got 8",
        ),
        (
            {"mamba_expand": 2**20},
            "mamba_n_heads must be such that convolutions have at most 4194304 factors, not 268437504, got 8",
        ),
        ({"residual_multiplier": 1e200}, "residual_multiplier must be a number from 1e-6 to 1e6, got 1e+200"),
        ({"residual_multiplier": 1e-200}, "residual_multiplier must be a number from 1e-6 to 1e6, got 1e-200"),
        ({"mamba_d_head": 32}, 'mamba_d_head must be "auto" or 16, got 32'),
        ({"time_step_limit": [1.0, 0.5]}, f"time_step_limit must be {LIMITS}, got [1.0, 0.5]"),
        ({"time_step_limit": [-1, 0.5]}, f"time_step_limit must be {LIMITS}, got [-1, 0.5]"),
        ({"time_step_limit": [0.0]}, f"time_step_limit must be {LIMITS}, got [0.0]"),
        ({"time_step_limit": 3}, f"time_step_limit must be {LIMITS}, got 3"),
        ({"time_step_limit": [0, math.nan]}, f"time_step_limit must be {LIMITS}, got [0, nan]"),
        (
            {"layer_types": ["mamba", "attention", "conv"]},
            "layer_types must be a list of 3, each one of attention, full_attention, mamba, linear_attention, got "
            "['mamba', 'attention', 'conv']",
        ),
        (
            {"num_local_experts": 4, "intermediate_size": 64},
            "shared_intermediate_size must be a multiple of intermediate_size (64), got 96",
        ),
    ],
)
def test_values_that_make_no_model_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError) as error:
        load(tmp_path, **fields)
    assert str(error.value) == f"config.json: {message}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"mamba_proj_bias": True},
            "config.json: mamba_proj_bias must be false, got True: projections of Mamba-2 with biases are not computed",
        ),
        (
            {"hidden_act": "gelu"},
            "config.json: hidden_act must be \"silu\", got 'gelu': convolutions of Mamba-2 have no other here",
        ),
        (
            {"normalization_function": "layernorm"},
            "config.json: normalization_function must be \"rmsnorm\", got 'layernorm': transformers has no other",
        ),
        ({"layer_types": None}, "config.json: no layer attends to tokens, and states alone are not computed"),
    ],
)
def test_choices_that_are_not_computed_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        load(tmp_path, **fields)
    assert str(error.value) == message
