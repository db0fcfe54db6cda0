"""The tensors that hold keys and values, sized before anything is allocated.

One tensor a layer, [2, num_blocks, kv_heads, block_size, head_size]; who owns which block is BlockPool's affair.
`plan_num_blocks` answers how many blocks fit; ModelRunner calls it once, then builds the KVCache.
"""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.errors import InvalidConfigurationError
from engine.host_memory import available_memory_bytes
from engine.memory import kv_bytes_per_token
from weights.config import ModelConfig

_CPU_MEMORY_FRACTION = 0.4
"""Of the memory free after loading; the rest is the operating system's file cache, activations and other processes."""


class KVCache:
    """The key and value blocks of every layer, uninitialised: a slot is read only after it was written.

    Raises InvalidConfigurationError when they cannot be allocated.
    """

    def __init__(
        self, model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (2, num_blocks, model.num_kv_heads, block_size, model.head_size)
        try:
            self.layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(model.num_layers)]
        except RuntimeError as error:
            raise InvalidConfigurationError(
                f"num_blocks is {num_blocks}, but memory for that many could not be allocated"
            ) from error


def plan_num_blocks(
    config: EngineConfig,
    model: ModelConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    scratch_bytes: int = 0,
) -> int:
    """Return how many blocks to allocate, at most what max_num_seqs sequences of full length can use.

    `scratch_bytes` is what attention will take; it counts as taken where the cache may use what is free.
    Raises InvalidConfigurationError when not even one sequence of max_model_len tokens fits.
    """
    block_bytes = config.block_size * kv_bytes_per_token(model, dtype.itemsize)
    needed = -(-max_model_len // config.block_size)
    if config.num_blocks is not None:
        num_blocks, source = config.num_blocks, f"num_blocks is {config.num_blocks}"
    else:
        budget = config.kv_cache_bytes
        if budget is None:
            budget = _free_bytes(config, device, scratch_bytes)
        num_blocks = min(budget // block_bytes, needed * config.max_num_seqs)
        source = f"{budget:,} bytes hold {num_blocks} blocks"
    if num_blocks < needed:
        shorter = f"lower max_model_len to {num_blocks * config.block_size} or " if num_blocks else ""
        raise InvalidConfigurationError(
            f"the KV cache is too small for one sequence of max_model_len {max_model_len}: {source}, {needed} blocks "
            f"of {config.block_size} tokens ({needed * block_bytes:,} bytes) are needed; {shorter}give the cache more "
            "memory"
        )
    return num_blocks


def _free_bytes(config: EngineConfig, device: torch.device, scratch_bytes: int) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - config.gpu_memory_utilization) * total) - scratch_bytes)
    return int(max(0, available_memory_bytes() - scratch_bytes) * _CPU_MEMORY_FRACTION)
