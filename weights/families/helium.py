"""Helium: Llama with rotary positions of neighbouring pairs.

Kyutai, "Helium 1: a modular and multilingual LLM" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, NAMES, read_llama_config


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=20, head_dim=128, rms_norm_eps=1e-8, rope_theta=100_000.0)
    return replace(read_llama_config(raw), attn_out_bias=False)


HELIUM = Family(
    "helium", _read_config, layout.decoder(NAMES, qkv_order=layout.halves_apart), ignored=IGNORED, models="Helium"
)
