"""The cache's tensors, and the memory they may take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.model.kv_cache import KVCache, cache_memory_bytes
from tests.engine.model.small_shape import BLOCK_BYTES, MODEL


def test_what_attention_will_take_is_not_free_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptserve.engine.model.kv_cache.available_memory_bytes", lambda: 100)
    config, device = EngineConfig(model_dir=Path()), torch.device("cpu")

    assert cache_memory_bytes(config, device, 0) == (100, 40)
    assert cache_memory_bytes(config, device, 50) == (50, 20)
    assert cache_memory_bytes(config, device, 101) == (0, 0)


def test_tensors_that_cannot_be_allocated_are_one_sentence() -> None:
    with pytest.raises(InvalidConfigurationError, match=r"^num_blocks is .*, but memory for that many could not be"):
        KVCache(MODEL, 10**12, 16, torch.float32, torch.device("cpu"))


def test_the_tensors_take_the_bytes_that_were_planned() -> None:
    cache = KVCache(MODEL, 5, 16, torch.float32, torch.device("cpu"))
    assert [layer.shape for layer in cache.layers] == [(2, 5, 2, 16, 16)] * 3
    assert sum(layer.nbytes for layer in cache.layers) == 5 * BLOCK_BYTES
