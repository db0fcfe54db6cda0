"""Qwen2 and 2.5: Llama with biases on query, key and value. Qwen3: without, but with normalised queries and keys.

Yang et al., "Qwen2 Technical Report" (2024) and "Qwen3 Technical Report" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families.family import Family, RawConfig, with_windows
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config


def _read_qwen2(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=32)
    config = _with_windows(raw, replace(read_llama_config(raw), qkv_bias=True, attn_out_bias=False))
    return replace(config, max_position=min(config.max_position, _first_chunk(raw, config.max_position)))


def read_qwen3_config(raw: RawConfig) -> ModelConfig:
    """Return the fields of Qwen3, which its mixtures share."""
    raw.default(head_dim=128, num_key_value_heads=32)
    return _with_windows(raw, replace(read_llama_config(raw), qk_norm="head"))


def _first_chunk(raw: RawConfig, max_position: int) -> int:
    """Return the context within which dual chunk attention (Qwen2.5-1M) is plain attention."""
    section = raw.section("dual_chunk_attention_config")
    chunk = section.size("chunk_size", default=max_position)
    local = section.size("local_size", default=0, limit=chunk - 1)
    section.skip("original_max_position_embeddings")
    return chunk - local


def _with_windows(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    if not raw.boolean("use_sliding_window", default=False):
        raw.skip("sliding_window", "max_window_layers", "layer_types")
        return config
    first = raw.size("max_window_layers", default=28)
    return with_windows(raw, config, lambda layer: layer >= first)


QWEN2 = Family("qwen2", _read_qwen2, llama_sources, ignored=IGNORED, models="Qwen2, Qwen2.5")
QWEN3 = Family("qwen3", read_qwen3_config, llama_sources, ignored=IGNORED, models="Qwen3")
