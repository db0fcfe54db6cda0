"""Seed-OSS: Llama with biases on query, key and value.

ByteDance Seed Team, "Seed-OSS Open-Source Models" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=8, head_dim=128)
    config = read_llama_config(raw, attention_bias=True)
    return replace(config, attn_out_bias=raw.boolean("attention_out_bias", default=False))


SEED_OSS = Family("seed_oss", _read_config, llama_sources, ignored=IGNORED, models="Seed-OSS")
