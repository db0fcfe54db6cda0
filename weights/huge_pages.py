"""Memory apart from malloc's for tensors, in huge pages: for weights, and what else steps on a CPU read.

Weights that come, are packed and go fragment malloc's memory, as small tensors that stay take what they leave; a
mapping is given back whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptserve.weights.mappings import map_memory

MAPPING = 2**26  # for small pieces; what is not taken of it is only addresses, unless the system counts those as memory
_ALIGNMENT = 64


class HugePages:
    """Gives pieces of mappings, one after the other, first of `memory`; large ones that do not fit get their own.

    A mapping is freed once none of its pieces is left.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self._rest = _tensor_of(memory) if memory else torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return zeros, uint8 [num_bytes], at a multiple of 64 bytes. Raises MemoryError if there is no memory."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if len(self._rest) < size:
            if size > MAPPING // 4:
                return mapped(num_bytes)
            self._rest = mapped(MAPPING)
        piece, self._rest = self._rest[:num_bytes], self._rest[size:]
        return piece


def mapped(num_bytes: int) -> Tensor:
    """Return zeros, uint8 [num_bytes], in a mapping of their own. Raises MemoryError if so much cannot be mapped."""
    return _tensor_of(map_memory(num_bytes))


def _tensor_of(memory: memoryview) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
