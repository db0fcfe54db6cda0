"""Memory from the system, in huge pages where it has them. Torch-free; huge_pages.py makes tensors of it.

The CPU keeps the addresses of the pages that it used last in its TLB. With pages of 2 MiB instead of 4 KiB these cover
512 times as much memory, so it waits less often for an address.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

HUGE_PAGE = 2**21


def map_memory(num_bytes: int) -> memoryview:
    """Return zeros, so many bytes in a mapping of their own from the begin of a huge page on.

    Memory is taken when it is written. What fills no huge page lies in small ones, and so does all where the system has
    no huge pages or keeps them from this process. Raises MemoryError if so much cannot be mapped.
    """
    try:
        mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes:,} bytes could not be mapped: {error.strerror}") from error
    memory = memoryview(mapping)
    start, size = -address_of(memory) % HUGE_PAGE, num_bytes // HUGE_PAGE * HUGE_PAGE
    if size > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # of a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE, start, size)
    return memory[start : start + num_bytes]


def address_of(memory: memoryview) -> int:
    """Return where it begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
