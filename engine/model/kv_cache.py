"""The tensors that hold keys and values: one a layer, [2, num_blocks, kv_heads, block_size, head_size].

BlockPool knows which sequence owns which block; memory.py computes how many there are. ModelRunner builds the KVCache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.model.memory import available_memory_bytes
from gptserve.weights.config import ModelConfig
from gptserve.weights.huge_pages import HugePages

_CPU_MEMORY_FRACTION = 0.4
"""Of the memory free after loading; the rest is the operating system's file cache, activations and other processes."""


class KVCache:
    """The key and value blocks of every layer, whatever they hold: a slot is read only after it was written.

    Raises InvalidConfigurationError if they cannot be allocated.
    """

    def __init__(
        self, model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (2, num_blocks, model.num_kv_heads, block_size, model.head_size)
        try:
            self.layers = list(_allocate(model.num_layers, shape, dtype, device))
        except (RuntimeError, MemoryError) as error:
            raise InvalidConfigurationError(
                f"num_blocks is {num_blocks}, but memory for that many could not be allocated"
            ) from error


def _allocate(num: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """Yield so many tensors, which take no memory before they are written; on a CPU in huge pages."""
    memory = HugePages()
    for _ in range(num):
        if device.type == "cpu":
            yield memory.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        else:
            yield torch.empty(shape, dtype=dtype, device=device)


def cache_memory_bytes(config: EngineConfig, device: torch.device, scratch_bytes: int) -> tuple[int, int]:
    """Return a rank's free bytes, and how many of them its cache may take by default; attention takes scratch_bytes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what self-tests took and no tensor holds is free, too
        free, total = torch.cuda.mem_get_info(device)
        free = max(0, free - scratch_bytes)
        return free, max(0, int(free - (1 - config.gpu_memory_utilization) * total))
    free = max(0, available_memory_bytes() // config.tensor_parallel_size - scratch_bytes)
    return free, int(free * _CPU_MEMORY_FRACTION)
