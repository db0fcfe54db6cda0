"""The tensors that hold keys and values: [2, num_blocks or more, kv_heads, block_size, elements of a row].

Each layer has one, but for those that read another one's. Layers may differ in kv_heads and head_size; a block has the
same number in all of them.

BlockPool knows which sequence owns which block; memory.py computes how many there are. ModelRunner builds the KVCache.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.model.kv_rows import row_size
from gptserve.engine.model.states import make_state
from gptserve.engine.runner.memory import CPU_MEMORY_SHARE, available_memory_bytes
from gptserve.weights.config import ModelConfig
from gptserve.weights.huge_pages import mapped
from gptserve.weights.mappings import HUGE_PAGE


class KVCache:
    """The key and value blocks of every layer, whatever they hold: a slot is read only after it was written.

    Rows are of `dtype`; in int8 they are codes with their scale (kv_rows.py). Raises InvalidConfigurationError if they
    cannot be allocated.
    """

    def __init__(
        self,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_states: int = 1,
    ) -> None:
        self.dtype = dtype
        self.states = [make_state(layer.recurrence, num_states, device) for layer in model.layers]
        self.num_states = num_states if model.has_states else 0
        size = dtype.itemsize
        own = [layer for layer in model.layers if layer.kv_layer is None]
        shapes = [(layer.num_kv_heads, block_size, row_size(layer.head_size, size)) for layer in own]
        self.num_bytes = 2 * num_blocks * sum(map(math.prod, shapes)) * size
        """Of the blocks; between those of two layers some more addresses may lie."""
        try:
            counts = Counter(shapes)  # layers of one shape lie side by side
            tensors = {shape: iter(_allocate(num, num_blocks, shape, dtype, device)) for shape, num in counts.items()}
            of_own = (next(tensors[shape]) for shape in shapes)
            self.layers: list[Tensor] = []
            """Of each layer; a layer that reads another one's keys and values has that one's tensor."""
            for layer in model.layers:
                self.layers.append(next(of_own) if layer.kv_layer is None else self.layers[layer.kv_layer])
        except (RuntimeError, MemoryError) as error:
            raise InvalidConfigurationError(
                f"num_blocks is {num_blocks}, but memory for that many could not be allocated"
            ) from error


def _allocate(
    num: int, num_blocks: int, block_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Iterable[Tensor]:
    """Return so many tensors, which take little memory before they are written; on a CPU in huge pages."""
    if device.type != "cpu" or not math.prod(block_shape):
        return [torch.empty(2, num_blocks, *block_shape, dtype=dtype, device=device) for _ in range(num)]
    block_bytes = math.prod(block_shape) * dtype.itemsize
    shape = (num, 2, _spread(num_blocks, block_bytes, 2 * num), *block_shape)
    layers = mapped(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    if native.is_available():  # all threads at once, as the first step would wait for one page after the other
        native.library().native_populate_first(layers.data_ptr(), 2 * num, layers[0, 0].nbytes)
    return layers


def _spread(num_blocks: int, block_bytes: int, num_arrays: int) -> int:
    """Return for how many blocks, some of them unused, arrays side by side have room so that they share the waiting.

    The step that first writes to a huge page waits until it is cleared (memory_ahead.py says how long). Were the arrays
    as long as a number of huge pages, the same block would be the first of a page in all of them.
    """
    if num_blocks * block_bytes < HUGE_PAGE:
        return num_blocks
    for num in range(num_blocks, num_blocks + HUGE_PAGE // block_bytes + 2):
        if 0 <= num * block_bytes % HUGE_PAGE - HUGE_PAGE // num_arrays < block_bytes:
            return num
    return num_blocks


def cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the cache of a model of this dtype."""
    return torch.int8 if config.kv_cache_dtype == "int8" else dtype


def cache_memory_bytes(config: EngineConfig, device: torch.device, scratch_bytes: int) -> tuple[int, int]:
    """Return a rank's free bytes, and how many of them its cache may take by default; attention takes scratch_bytes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what self-tests took and no tensor holds is free, too
        free, total = torch.cuda.mem_get_info(device)
        free = max(0, free - scratch_bytes)
        return free, max(0, int(free - (1 - config.gpu_memory_utilization) * total))
    free = max(0, available_memory_bytes() // config.num_local_ranks - scratch_bytes)
    return free, int(free * CPU_MEMORY_SHARE)
