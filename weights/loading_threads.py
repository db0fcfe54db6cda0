"""The threads that load weights: each computes pieces with torch by itself, and whoever waits for one sleeps.

torch's own threads meet after each operation, and wait by spinning: beside other busy processes a thread that waits
takes the CPU from the one that it waits for, and loading takes ten times as long. ModelRunner and the ranks beyond the
first load within `loading_threads`; checkpoint.py, pinned_ring.py and engine/model/ compute pieces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from gptserve.weights.torch_threads import torch_threads

PIECE_ELEMENTS = 2**20
"""About as many elements of a tensor make a piece: converting them takes longer than handing them out."""

MAX_THREADS = 16
"""Each holds some megabytes, and so few read all that memory gives."""

_pool: ContextVar[ThreadPoolExecutor | None] = ContextVar("_pool", default=None)
"""Of the thread that loads."""

Result = TypeVar("Result")


@contextmanager
def loading_threads(num_threads: int) -> Iterator[None]:
    """Within it, torch computes each operation in the thread that calls it, and at most so many compute pieces."""
    # torch has this number for each thread; a thread of a pool keeps what it was given.
    threads = ThreadPoolExecutor(min(num_threads, MAX_THREADS), "gptserve-loading", torch.set_num_threads, (1,))
    token = _pool.set(threads if num_threads > 1 else None)
    try:
        with torch_threads(1):
            yield
    finally:
        _pool.reset(token)
        threads.shutdown(cancel_futures=True)
        _give_back_memory()


def _give_back_memory() -> None:
    """Give the system what malloc has kept of each thread; only glibc keeps any and has this."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def map_pieces(compute: Callable[..., Result], *pieces: Sequence[Any]) -> Iterator[Result]:
    """Yield compute(*pieces) for the pieces at each index, in order; outside `loading_threads` in the calling thread.

    The pieces are computed at once, so they must not write to the same memory.
    """
    pool = _pool.get()
    if pool is None or len(pieces[0]) < 2:
        yield from map(compute, *pieces)
        return
    is_inference = torch.is_inference_mode_enabled()

    def compute_one(*its_pieces: Any) -> Result:
        with torch.inference_mode(is_inference):  # of each thread, too
            return compute(*its_pieces)

    yield from pool.map(compute_one, *pieces)
