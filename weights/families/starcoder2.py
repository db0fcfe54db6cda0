"""StarCoder2: Llama's layout with LayerNorm, biases everywhere and a feed-forward without a gate.

Lozhkov et al., "StarCoder 2 and The Stack v2: The Next Generation" (2024).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, NAMES
from gptserve.weights.families.mistral import read_mistral_config

FFN = {"blocks.{}.ffn_up": "layers.{}.mlp.c_fc", "blocks.{}.ffn_down": "layers.{}.mlp.c_proj"}


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=2, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True)
    config, has_bias = read_mistral_config(raw), raw.boolean("use_bias", default=True)
    return replace(
        config,
        qkv_bias=has_bias,
        attn_out_bias=has_bias,
        gated_ffn=False,
        ffn_bias=has_bias,
        norm="layernorm",
        norm_eps=raw.positive("norm_epsilon", default=1e-5),
        norm_bias=True,
    )


STARCODER2 = Family("starcoder2", _read_config, layout.decoder({**NAMES, **FFN}), ignored=IGNORED, models="StarCoder2")
