"""The cache's tensors, and the memory they may take."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.runner.kv_cache import KVCache, cache_memory_bytes
from gptserve.engine.runner.memory import kv_bytes_per_token
from gptserve.weights.mappings import HUGE_PAGE
from tests.engine.model.small_shape import BLOCK_BYTES, MODEL


def test_what_attention_will_take_is_not_free_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptserve.engine.runner.kv_cache.available_memory_bytes", lambda: 100)
    config, device = EngineConfig(model_dir=Path()), torch.device("cpu")

    assert cache_memory_bytes(config, device, 0) == (100, 40)
    assert cache_memory_bytes(config, device, 50) == (50, 20)
    assert cache_memory_bytes(config, device, 101) == (0, 0)


def test_two_servers_that_see_the_same_free_memory_have_room_for_both_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptserve.engine.runner.kv_cache.available_memory_bytes", lambda: 10**9)
    config, device = EngineConfig(model_dir=Path()), torch.device("cpu")

    caches = [cache_memory_bytes(config, device, 0)[1] for _ in range(2)]

    assert min(caches) > 0
    assert sum(caches) < 10**9


def test_tensors_that_cannot_be_allocated_are_one_sentence() -> None:
    with pytest.raises(InvalidConfigurationError, match=r"^num_blocks is .*, but memory for that many could not be"):
        KVCache(MODEL, 10**12, 16, torch.float32, torch.device("cpu"))


def test_the_tensors_take_the_bytes_that_were_planned() -> None:
    cache = KVCache(MODEL, 5, 16, torch.float32, torch.device("cpu"))
    assert [layer.shape for layer in cache.layers] == [(2, 5, 2, 16, 16)] * 3
    assert sum(layer.nbytes for layer in cache.layers) == cache.num_bytes == 5 * BLOCK_BYTES


def test_a_layer_that_reads_the_keys_of_another_one_has_its_tensor_and_takes_no_memory() -> None:
    first, second, third = MODEL.layers
    model = replace(MODEL, layers=(first, replace(second, head_size=32), replace(third, kv_layer=0)))
    cache = KVCache(model, 5, 16, torch.float32, torch.device("cpu"))
    assert cache.layers[2] is cache.layers[0] is not cache.layers[1]
    assert sum(layer.nbytes for layer in cache.layers[:2]) == cache.num_bytes == 5 * 16 * kv_bytes_per_token(model, 4)


def test_in_int8_a_row_has_a_scale_behind_its_codes() -> None:
    cache = KVCache(MODEL, 5, 16, torch.int8, torch.device("cpu"))
    assert [layer.shape for layer in cache.layers] == [(2, 5, 2, 16, 20)] * 3
    assert sum(layer.nbytes for layer in cache.layers) == cache.num_bytes == 5 * 16 * kv_bytes_per_token(MODEL, 1)


@pytest.mark.some(2)
@pytest.mark.parametrize("num_blocks", [1024, 1000, 700])
@pytest.mark.parametrize(("num_layers", "num_kv_heads"), [(4, 6), (12, 12), (30, 3), (80, 8)])
def test_no_block_is_the_first_to_write_to_many_huge_pages(num_blocks: int, num_layers: int, num_kv_heads: int) -> None:
    layer = replace(MODEL.layers[0], num_kv_heads=num_kv_heads, head_size=64)
    model = replace(MODEL, layers=(layer,) * num_layers)
    cache = KVCache(model, num_blocks, 16, torch.bfloat16, torch.device("cpu"))

    block_bytes = cache.layers[0][0, 0].nbytes
    assert cache.num_bytes == 2 * num_layers * num_blocks * block_bytes
    first = Counter[int]()
    for array in (half for layer in cache.layers for half in layer):
        pages = [(array.data_ptr() + block * block_bytes) // HUGE_PAGE for block in range(num_blocks)]
        first.update(block for block in range(1, num_blocks) if pages[block] != pages[block - 1])
    assert sum(first.values()) >= 2 * num_layers * (num_blocks * block_bytes // HUGE_PAGE - 1), "negative control"
    assert max(first.values()) <= 1 + 2 * num_layers * block_bytes // HUGE_PAGE + 1
    assert all(num_blocks <= layer.shape[1] <= num_blocks + HUGE_PAGE // block_bytes + 1 for layer in cache.layers)
