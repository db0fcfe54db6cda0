"""ERNIE 4.5, dense: Llama with rotary positions of neighbouring pairs.

Baidu ERNIE Team, "ERNIE 4.5 Technical Report" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, NAMES, read_llama_config


def read_ernie_config(raw: RawConfig) -> ModelConfig:
    """Return the fields that the dense model and the mixtures share."""
    raw.default(rms_norm_eps=1e-5, rope_theta=500_000.0, tie_word_embeddings=True)
    config, has_bias = read_llama_config(raw), raw.boolean("use_bias", default=False)
    return replace(config, qkv_bias=has_bias, attn_out_bias=has_bias, ffn_bias=has_bias)


def _read_dense(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=2, head_dim=128)
    return read_ernie_config(raw)


ERNIE4_5 = Family(
    "ernie4_5",
    _read_dense,
    layout.decoder(NAMES, qkv_order=layout.halves_apart),
    ignored=IGNORED,
    models="ERNIE 4.5",
)
