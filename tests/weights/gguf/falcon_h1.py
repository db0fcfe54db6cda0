"""Falcon-H1 as llama.cpp's conversion writes it: all factors of its config.json are in the weights."""

from __future__ import annotations

from typing import Any

import numpy as np

Values = dict[str, np.ndarray]


def with_factors(config: dict[str, Any], values: Values) -> Values:
    """Return the tensors times their factors."""
    inputs = config["attention_in_multiplier"]
    of_gates, of_outputs = config["mlp_multipliers"]
    factors = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "self_attn.q_proj": inputs,
        "self_attn.k_proj": inputs * config["key_multiplier"],
        "self_attn.v_proj": inputs,
        "self_attn.o_proj": config["attention_out_multiplier"],
        "feed_forward.gate_proj": of_gates,
        "feed_forward.down_proj": of_outputs,
        "mamba.in_proj": config["ssm_in_multiplier"] * _of_rows(config)[:, None],
        "mamba.out_proj": config["ssm_out_multiplier"],
    }
    found = dict(values)
    for name, value in values.items():
        for part, factor in factors.items():
            if name.endswith(f"{part}.weight"):
                found[name] = (value * factor).astype(value.dtype)
    return found


def _of_rows(config: dict[str, Any]) -> np.ndarray:
    """Return the factors of gates, x, B, C and steps, for each of their rows."""
    width, of_groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    return np.repeat(config["ssm_multipliers"], [width, width, of_groups, of_groups, config["mamba_n_heads"]])
