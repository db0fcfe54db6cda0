"""The cache's size: what the settings allow, what the sequences can use, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import InvalidConfigurationError
from engine.kv_cache import KVCache, plan_num_blocks
from weights.config import ModelConfig

MODEL = ModelConfig(
    model_type="test",
    vocab_size=10,
    hidden_size=64,
    num_layers=3,
    max_position=128,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    attention_scales=(0.25,) * 3,
    attention_windows=(None,) * 3,
    ffn_size=256,
)
BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4  # both of keys and values, layers, KV heads, head size, tokens, bytes


def plan(max_model_len: int = 128, **options: Any) -> int:
    config = EngineConfig(model_dir=Path(), **options)
    return plan_num_blocks(config, MODEL, max_model_len, torch.float32, torch.device("cpu"))


def test_bytes_are_turned_into_whole_blocks() -> None:
    assert plan(kv_cache_bytes=20 * BLOCK_BYTES + 1) == 20


def test_no_more_blocks_than_the_sequences_can_use() -> None:
    assert plan(kv_cache_bytes=10**12, max_num_seqs=5) == 5 * 8
    assert plan(max_num_seqs=2) == 16


def test_what_attention_will_take_is_not_free_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kv_cache.available_memory_bytes", lambda: 100 * BLOCK_BYTES)
    device = torch.device("cpu")

    def blocks(scratch_bytes: int, **options: Any) -> int:
        config = EngineConfig(model_dir=Path(), **options)
        return plan_num_blocks(config, MODEL, 128, torch.float32, device, scratch_bytes=scratch_bytes)

    assert blocks(0) == 40
    assert blocks(50 * BLOCK_BYTES) == 20
    assert blocks(50 * BLOCK_BYTES, kv_cache_bytes=30 * BLOCK_BYTES) == 30
    with pytest.raises(InvalidConfigurationError, match="too small"):
        blocks(101 * BLOCK_BYTES)


def test_a_number_of_blocks_is_taken_as_given() -> None:
    assert plan(num_blocks=9, kv_cache_bytes=1) == 9


def test_a_cache_that_cannot_hold_one_sequence_is_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidConfigurationError) as caught:
        plan(kv_cache_bytes=7 * BLOCK_BYTES)
    assert str(caught.value) == (
        f"the KV cache is too small for one sequence of max_model_len 128: {7 * BLOCK_BYTES:,} bytes hold 7 blocks, "
        f"8 blocks of 16 tokens ({8 * BLOCK_BYTES:,} bytes) are needed; lower max_model_len to 112 or give the cache "
        "more memory"
    )
    assert plan(max_model_len=112, kv_cache_bytes=7 * BLOCK_BYTES) == 7
    with pytest.raises(InvalidConfigurationError, match=r"are needed; give the cache more memory$"):
        plan(kv_cache_bytes=1)


def test_the_tensors_take_the_bytes_that_were_planned() -> None:
    cache = KVCache(MODEL, 5, 16, torch.float32, torch.device("cpu"))
    assert [layer.shape for layer in cache.layers] == [(2, 5, 2, 16, 16)] * 3
    assert sum(layer.nbytes for layer in cache.layers) == 5 * BLOCK_BYTES
