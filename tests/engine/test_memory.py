"""The sizes of known models, from their shape alone."""

from __future__ import annotations

import dataclasses

from engine.memory import CacheCapacity, cache_capacity, kv_bytes_per_token, parameter_counts
from weights.config import ModelConfig

GPT2_124M = ModelConfig(
    model_type="gpt2",
    vocab_size=50257,
    hidden_size=768,
    num_layers=12,
    max_position=1024,
    num_heads=12,
    num_kv_heads=12,
    head_size=64,
    attention_scales=(0.125,) * 12,
    attention_windows=(None,) * 12,
    attention_bias=True,
    ffn_size=3072,
)
LLAMA3_8B = ModelConfig(
    model_type="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    max_position=8192,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    attention_scales=(128**-0.5,) * 32,
    attention_windows=(None,) * 32,
    attention_bias=False,
    ffn_size=14336,
    ffn_bias=False,
    activation="silu",
    gated_ffn=True,
    norm="rmsnorm",
    norm_bias=False,
    position="rotary",
    tied_head=False,
)


def test_gpt2_has_its_published_number_of_parameters() -> None:
    counts = parameter_counts(GPT2_124M)

    assert sum(counts.values()) == 124_439_808
    assert counts["embedding"] == 50257 * 768
    assert counts["position"] == 1024 * 768
    assert counts["head"] == 0


def test_llama3_8b_has_its_published_number_of_parameters() -> None:
    counts = parameter_counts(LLAMA3_8B)

    assert sum(counts.values()) == 8_030_261_248
    assert counts["position"] == 0


def test_untying_the_head_adds_one_embedding() -> None:
    untied = dataclasses.replace(GPT2_124M, tied_head=False)

    assert sum(parameter_counts(untied).values()) == 124_439_808 + 50257 * 768


def test_gpt_oss_20b_has_its_published_number_of_parameters() -> None:
    gpt_oss = dataclasses.replace(
        LLAMA3_8B,
        vocab_size=201088,
        hidden_size=2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_size=64,
        attention_bias=True,
        attention_sinks=True,
        ffn_size=2880,
        ffn_bias=True,
        num_experts=32,
    )

    assert round(sum(parameter_counts(gpt_oss).values()) / 1e9, 2) == 20.91


def test_kv_cache_of_a_7b_shape_is_one_gib_at_2048_tokens() -> None:
    shape = dataclasses.replace(LLAMA3_8B, num_kv_heads=32)

    assert kv_bytes_per_token(shape, 2) * 2048 == 2**30


def test_grouped_heads_divide_the_kv_cache() -> None:
    assert kv_bytes_per_token(LLAMA3_8B, 2) == 128 * 1024


def test_capacity_counts_whole_blocks_and_sequences_of_whole_blocks() -> None:
    block_bytes = 16 * kv_bytes_per_token(GPT2_124M, 2)

    assert cache_capacity(GPT2_124M, 13 * block_bytes - 1, 2, block_size=16, max_model_len=33) == CacheCapacity(
        num_blocks=12, num_tokens=192, num_full_sequences=4
    )


def test_nothing_fits_into_less_than_nothing() -> None:
    assert cache_capacity(GPT2_124M, -1, 2, block_size=16, max_model_len=1024) == CacheCapacity(0, 0, 0)
