"""Memory apart from malloc's, in huge pages where the system has them: for weights, and what else steps on a CPU read.

The CPU keeps the addresses of the pages that it used last in its TLB. With pages of 2 MiB instead of 4 KiB these cover
512 times as much memory, so it waits less often for an address. And weights that come, are packed and go fragment
malloc's memory, as small tensors that stay take what they leave; a mapping is given back whole.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2**21
MAPPING = 2**26  # for small pieces; what is not taken of it is only addresses, unless the system counts those as memory
_ALIGNMENT = 64


class HugePages:
    """Gives pieces of mappings, small ones one after the other. A mapping is freed once none of its pieces is left."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return zeros, uint8 [num_bytes], at a multiple of 64 bytes. Raises MemoryError if there is no memory."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > MAPPING // 4:
            return mapped(num_bytes)
        if len(self._rest) < size:
            self._rest = mapped(MAPPING)
        piece, self._rest = self._rest[:num_bytes], self._rest[size:]
        return piece


def mapped(num_bytes: int) -> Tensor:
    """Return zeros, uint8 [num_bytes], in a mapping of their own from the begin of a huge page on.

    Memory is taken when it is written. What fills no huge page lies in small ones, and so does all where the system has
    no huge pages or keeps them from this process. Raises MemoryError if so much cannot be mapped.
    """
    try:
        mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes:,} bytes could not be mapped: {error.strerror}") from error
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start, size = -whole.data_ptr() % HUGE_PAGE, num_bytes // HUGE_PAGE * HUGE_PAGE
    if size > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # of a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE, start, size)
    return whole[start : start + num_bytes]
