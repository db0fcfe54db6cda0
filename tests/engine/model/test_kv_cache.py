"""The cache's size: what the settings allow, what the sequences can use, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.model.kv_cache import KVCache, plan_cache
from gptserve.weights.config import ModelConfig

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


FREE = 100_000 * BLOCK_BYTES


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptserve.engine.model.kv_cache.available_memory_bytes", lambda: FREE)


def plan(**options: Any) -> tuple[int, int]:
    """Return the number of blocks and the longest sequence."""
    return plan_cache(EngineConfig(model_dir=Path(), **options), MODEL, torch.float32, torch.device("cpu"))


def test_bytes_are_turned_into_whole_blocks() -> None:
    assert plan(kv_cache_bytes=20 * BLOCK_BYTES + 1) == (20, 128)


def test_what_is_asked_for_is_taken_exactly_however_few_sequences_there_are() -> None:
    assert plan(kv_cache_bytes=1000 * BLOCK_BYTES, max_num_seqs=1) == (1000, 128)
    assert plan(num_blocks=1000, max_num_seqs=1) == (1000, 128)


def test_what_attention_will_take_is_not_free_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptserve.engine.model.kv_cache.available_memory_bytes", lambda: 100 * BLOCK_BYTES)
    device = torch.device("cpu")

    def blocks(scratch_bytes: int, **options: Any) -> int:
        config = EngineConfig(model_dir=Path(), **options)
        return plan_cache(config, MODEL, torch.float32, device, scratch_bytes=scratch_bytes)[0]

    assert blocks(0) == 40
    assert blocks(50 * BLOCK_BYTES) == 20
    assert blocks(50 * BLOCK_BYTES, kv_cache_bytes=30 * BLOCK_BYTES) == 30
    with pytest.raises(InvalidConfigurationError, match="too small"):
        blocks(101 * BLOCK_BYTES)


def test_a_number_of_blocks_is_taken_as_given() -> None:
    assert plan(num_blocks=9, kv_cache_bytes=1) == (9, 128)


def test_by_default_there_are_two_contexts_for_each_sequence_if_they_fit_a_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert plan(max_num_seqs=3) == (2 * 3 * 8, 128)
    monkeypatch.setattr("gptserve.engine.model.kv_cache.available_memory_bytes", lambda: 100 * BLOCK_BYTES)
    assert plan(max_num_seqs=64) == (40, 128)


@pytest.mark.parametrize(
    ("options", "asked"),
    [({"kv_cache_bytes": FREE + 1}, "kv_cache_bytes"), ({"num_blocks": 100_001}, "num_blocks 100001")],
)
def test_more_than_is_free_is_refused_with_both_numbers(options: dict[str, Any], asked: str) -> None:
    wanted = options.get("kv_cache_bytes", 100_001 * BLOCK_BYTES)
    with pytest.raises(InvalidConfigurationError) as caught:
        plan(**options)
    assert str(caught.value) == (
        f"{asked} asks for {wanted:,} bytes of KV cache, but only {FREE:,} bytes of memory are free"
    )
    assert plan(kv_cache_bytes=FREE) == (100_000, 128)


def test_a_context_that_does_not_fit_is_shortened_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert plan(kv_cache_bytes=8 * BLOCK_BYTES) == (8, 128)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert plan(kv_cache_bytes=7 * BLOCK_BYTES) == (7, 112)
    assert "max_model_len is 112 tokens instead of the model's context of 128, because " in caplog.text
    assert plan(num_blocks=1) == (1, 16)
    with pytest.raises(InvalidConfigurationError, match="too small for one sequence"):
        plan(kv_cache_bytes=1)


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidConfigurationError) as caught:
        plan(max_model_len=128, kv_cache_bytes=7 * BLOCK_BYTES)
    assert str(caught.value) == (
        f"the KV cache is too small for one sequence of max_model_len 128: {7 * BLOCK_BYTES:,} bytes hold 7 blocks, "
        f"8 blocks of 16 tokens ({8 * BLOCK_BYTES:,} bytes) are needed; lower max_model_len to 112 or give the cache "
        "more memory"
    )
    assert plan(max_model_len=112, kv_cache_bytes=7 * BLOCK_BYTES) == (7, 112)
    with pytest.raises(InvalidConfigurationError, match=r"are needed; give the cache more memory$"):
        plan(max_model_len=128, kv_cache_bytes=1)


def test_tensors_that_cannot_be_allocated_are_one_sentence() -> None:
    with pytest.raises(InvalidConfigurationError, match=r"^num_blocks is .*, but memory for that many could not be"):
        KVCache(MODEL, 10**12, 16, torch.float32, torch.device("cpu"))


def test_the_tensors_take_the_bytes_that_were_planned() -> None:
    cache = KVCache(MODEL, 5, 16, torch.float32, torch.device("cpu"))
    assert [layer.shape for layer in cache.layers] == [(2, 5, 2, 16, 16)] * 3
    assert sum(layer.nbytes for layer in cache.layers) == 5 * BLOCK_BYTES
