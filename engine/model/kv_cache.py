"""The tensors that hold keys and values, sized before anything is allocated.

One tensor a layer, [2, num_blocks, kv_heads, block_size, head_size]; who owns which block is BlockPool's affair.
`plan_cache` answers how many blocks fit and how long a sequence may be; ModelRunner calls it once, then builds the
KVCache.
"""

from __future__ import annotations

import logging

import torch

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.model.host_memory import available_memory_bytes
from gptserve.engine.model.memory import kv_bytes_per_token
from gptserve.weights.config import ModelConfig

_CPU_MEMORY_FRACTION = 0.4
"""Of the memory free after loading; the rest is the operating system's file cache, activations and other processes."""

_CONTEXTS_PER_SEQUENCE = 2
"""How many full contexts for each of max_num_seqs sequences the cache holds by default, if they fit: one to compute
with, one for prefixes of what has ended. A tiny model would otherwise take memory that it never needs."""

_SHORTEST_CONTEXT = 2
"""A token of a prompt and one after it."""

logger = logging.getLogger(__name__)


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


def plan_cache(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, *, scratch_bytes: int = 0
) -> tuple[int, int]:
    """Return how many blocks to allocate and the longest sequence in tokens.

    `scratch_bytes` is what attention will take of the free memory.

    num_blocks and kv_cache_bytes are taken exactly. Without them it is the share of the free memory that the
    configuration grants, up to _CONTEXTS_PER_SEQUENCE full contexts for each of max_num_seqs sequences. A model whose
    whole context does not fit gets the longest that fits, with a warning, unless max_model_len was given.
    Raises InvalidConfigurationError when that does not fit, or when there is not as much memory as was asked for.
    """
    block_bytes = config.block_size * kv_bytes_per_token(model, dtype.itemsize)
    max_model_len = config.max_model_len or model.max_position
    needed = -(-max_model_len // config.block_size)
    free, budget = _memory_bytes(config, device, scratch_bytes)
    num_blocks, source = _choose_num_blocks(config, free, budget, block_bytes, needed)
    if num_blocks >= needed:
        return num_blocks, max_model_len
    longest = num_blocks * config.block_size
    if config.max_model_len is None and longest >= _SHORTEST_CONTEXT:
        logger.warning(
            "max_model_len is %d tokens instead of the model's context of %d, because %s; give the KV cache more "
            "memory for longer sequences",
            *(longest, max_model_len, source),
        )
        return num_blocks, longest
    shorter = f"lower max_model_len to {longest} or " if longest >= _SHORTEST_CONTEXT else ""
    raise InvalidConfigurationError(
        f"the KV cache is too small for one sequence of max_model_len {max_model_len}: {source}, {needed} blocks "
        f"of {config.block_size} tokens ({needed * block_bytes:,} bytes) are needed; {shorter}give the cache more "
        "memory"
    )


def _choose_num_blocks(
    config: EngineConfig, free: int, budget: int, block_bytes: int, blocks_per_context: int
) -> tuple[int, str]:
    """Return the number of blocks and, for messages, why it is that one."""
    if config.num_blocks is not None:
        num_blocks, wanted = config.num_blocks, config.num_blocks * block_bytes
        source, asked = f"num_blocks is {num_blocks}", f"num_blocks {num_blocks}"
    elif config.kv_cache_bytes is not None:
        num_blocks, wanted = config.kv_cache_bytes // block_bytes, config.kv_cache_bytes
        source, asked = f"{wanted:,} bytes hold {num_blocks} blocks", "kv_cache_bytes"
    else:
        num_blocks = min(budget // block_bytes, _CONTEXTS_PER_SEQUENCE * config.max_num_seqs * blocks_per_context)
        return num_blocks, f"{budget:,} bytes hold {num_blocks} blocks"
    if wanted > free:
        raise InvalidConfigurationError(
            f"{asked} asks for {wanted:,} bytes of KV cache, but only {free:,} bytes of memory are free"
        )
    return num_blocks, source


def _memory_bytes(config: EngineConfig, device: torch.device, scratch_bytes: int) -> tuple[int, int]:
    """Return how much is free, and how much of it the cache may take by default."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free = max(0, free - scratch_bytes)
        return free, max(0, int(free - (1 - config.gpu_memory_utilization) * total))
    free = max(0, available_memory_bytes() - scratch_bytes)
    return free, int(free * _CPU_MEMORY_FRACTION)
