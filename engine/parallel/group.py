"""The group of all ranks: what they send each other while they compute a step.

Ranks 0 to size - 1 make the same calls in the same order, each in its process. ranks.py and worker.py make groups,
layers.py and decoder.py call them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptserve.engine.errors import EngineError
from gptserve.weights.sharding import Share


class RankLostError(EngineError):
    """Another rank is gone, or too slow for the library."""


class Group:
    """Joins ranks that meet at `path`, a file that nobody has made before.

    On a CPU the terms of a sum are added in the order of the ranks, in fp32, and rounded once. So the bits of a row do
    not depend on the other rows: a ring begins the sum of each piece of a tensor at another rank. On a GPU NCCL sums.
    """

    def __init__(self, share: Share, path: str, device: torch.device) -> None:
        self._share, self._path, self._device = share, path, device
        self._group: Any = None  # torch's stubs of its groups have no methods

    def meet(self) -> None:
        """Wait until all ranks have called this. Before, this rank is alone, and a sum is its term."""
        rank, size = self._share.rank, self._share.size
        with _lost():
            store = dist.FileStore(self._path, size)  # type: ignore[attr-defined]
            if self._device.type == "cuda":
                self._group = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
            else:
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
                self._group = dist.ProcessGroupGloo(store, rank, size, options)
        self.broadcast_(torch.zeros(1, device=self._device))  # NCCL connects at its first call

    def broadcast_(self, x: Tensor) -> None:
        """Overwrite x with that of rank 0."""
        if self._group is not None:
            with _lost():
                self._group.broadcast(x, 0).wait()

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks; all get the same bits. May overwrite x."""
        if self._group is None:
            return x
        with _lost():
            if self._device.type == "cuda":
                self._group.allreduce(x).wait()
                return x
            terms = [torch.empty_like(x) for _ in range(self._share.size)]
            self._group.allgather(terms, x).wait()
        total = terms[0].float()
        for term in terms[1:]:
            total = total + term
        return total.to(x.dtype)


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"a rank of the engine is lost: {error}") from error
