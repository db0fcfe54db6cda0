"""Nemotron-H's config.json: the kinds of its blocks by three names, and values that are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gptserve.weights.config import Experts, ModelConfig, Router, StateSpace
from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError
from gptserve.weights.families import load_config

FIELDS = {
    "model_type": "nemotron_h",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 96,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
}


def load(folder: Path, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(FIELDS | fields), encoding="utf-8")
    return load_config(folder)


def test_a_feed_forward_is_a_part_of_the_layer_before_it(tmp_path: Path) -> None:
    kinds = ["mamba", "mamba", "mlp", "attention", "mlp", "attention"]
    for fields in (
        {"layers_block_type": kinds, "num_hidden_layers": 52},
        {"layer_types": [{"mamba": "linear_attention", "attention": "full_attention"}.get(its, its) for its in kinds]},
        {"hybrid_override_pattern": "MM-*-*"},
    ):
        config = load(tmp_path, **fields)
        assert [(layer.recurrence is None, layer.ffn_size) for layer in config.layers] == [
            *((False, 0), (False, 96)),
            *((True, 96), (True, 0)),
        ]
        assert config.layers[0].recurrence == StateSpace(
            2, 8, 24, 16, 4, norm_eps=1e-5, step_limits=(0.0, math.inf), has_conv_bias=True
        )


def test_mixtures_are_those_of_deepseek_with_a_shared_expert_of_a_width_of_its_own(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64, "n_routed_experts": 16}
    of_router = {"num_experts_per_tok": 3, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2}
    config = load(tmp_path, hybrid_override_pattern="ME*E", **sizes, **of_router)
    router = Router("sigmoid", True, 4, 2, min_sum=1e-20, scale=2.5)
    assert {(layer.ffn_size, layer.experts) for layer in config.layers} == {
        (32, Experts(16, 3, router, num_shared=2)),
    }


def test_a_feed_forward_that_follows_none_is_a_layer(tmp_path: Path) -> None:
    """Nemotron-H-47B has three in a row, as layers between them were taken out."""
    layers = load(tmp_path, hybrid_override_pattern="-M--*").layers
    assert [(layer.mixes, layer.num_heads, layer.ffn_size) for layer in layers] == [
        *((False, 0, 96), (True, 0, 96)),
        *((False, 0, 96), (True, 4, 0)),
    ]


def test_steps_are_limited_as_the_makers_code_does_it(tmp_path: Path) -> None:
    config = load(tmp_path, hybrid_override_pattern="M*", time_step_min=0.001, time_step_limit=[0.25, 4.0])
    space = config.layers[0].recurrence
    assert isinstance(space, StateSpace)
    assert space.step_limits == (0.25, 4.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"hybrid_override_pattern": "MX*"},
            "hybrid_override_pattern must be letters, at most 4096, each one of M, *, -, E, got 'MX*'",
        ),
        (
            {"layers_block_type": ["mamba", "conv"]},
            "layers_block_type must be a list, at most 4096, each one of linear_attention, full_attention, mamba, "
            "attention, mlp, moe, got ['mamba', 'conv']",
        ),
        (
            {"layers_block_type": [[]]},
            "layers_block_type must be a list, at most 4096, each one of linear_attention, full_attention, mamba, "
            "attention, mlp, moe, got [[]]",
        ),
        (
            {"hybrid_override_pattern": "M" * 4096 + "*"},
            f"hybrid_override_pattern must be letters, at most 4096, each one of M, *, -, E, got '{'M' * 76}...",
        ),
        (
            {"hybrid_override_pattern": "M*", "mamba_num_heads": 10**9},
            "mamba_num_heads must be such that convolutions have at most 4194304 factors, not 64000000384, got "
            "1000000000",
        ),
        (
            {"hybrid_override_pattern": "M*", "n_groups": 3},
            "mamba_num_heads must be a multiple of n_groups (3), got 8",
        ),
        (
            {"hybrid_override_pattern": "ME*", "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 64},
            "moe_shared_expert_intermediate_size must be a multiple of moe_intermediate_size (48), got 64",
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
            {"hybrid_override_pattern": "M-M"},
            "config.json: no layer attends to tokens, and states alone are not computed",
        ),
        *(
            ({name: True}, f"config.json: {name} must be false, got True: no model with biases is published")
            for name in ("attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias")
        ),
        (
            {"mamba_hidden_act": "gelu"},
            "config.json: mamba_hidden_act must be \"silu\", got 'gelu': convolutions of Mamba-2 have no other here",
        ),
        (
            {"sliding_window": 128},
            "config.json: sliding_window must be null, got 128: transformers has none for this model_type",
        ),
        (
            {"moe_latent_size": 32},
            "config.json: moe_latent_size must be null, got 32: experts that read latents are not computed",
        ),
        (
            {"attention_head_dim": 32},
            "config.json: attention_head_dim must be 24, got 32: it must be what the other name says",
        ),
        *(
            ({name: 0.5}, f"config.json: {name} must be 1e-05, got 0.5: it must be what the other name says")
            for name in ("norm_eps", "rms_norm_eps")
        ),
    ],
)
def test_choices_that_are_not_computed_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        load(tmp_path, **fields)
    assert str(error.value) == message
