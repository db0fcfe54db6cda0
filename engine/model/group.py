"""The group of all ranks: what they send each other while they compute a step.

Ranks 0 to size - 1 make the same calls in the same order, each in its process. ranks.py and worker.py make groups,
layers.py and decoder.py call them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import EngineError
from gptserve.engine.staging import Array
from gptserve.weights.sharding import Share

SumOrder = Literal["ranks", "library"]
"""How the terms of a sum are added: in the order of the ranks, or as the library of the device finds fast."""


_MEETING_LIMIT = timedelta(hours=2)
"""NCCL's ranks wait so long for the one that loads longest; torch's default is 5 minutes. A rank that dies ends the
others anyway. Gloo has a limit of its own, 30 minutes."""


class RankLostError(EngineError):
    """Another rank is gone, or too slow for the library."""


def choose_order(config: EngineConfig, device: torch.device) -> SumOrder:
    """Return the order that answers need which do not depend on the batch; a GPU gives such answers if asked to."""
    return "ranks" if device.type == "cpu" or config.batch_invariant else "library"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks find each other before they compute.

    On one machine that is the file `place`, which nobody has made before. With a port it is a TCP port of the host
    `place`, where the first rank answers the others.
    """

    place: str
    port: int | None = None
    address: str = "127.0.0.1"
    """Of this rank's machine, as the other ranks reach it."""
    listener: int | None = None
    """The descriptor of a socket that listens at the port, in the process of the first rank."""

    def store(self, size: int) -> Any:
        """Return the store in which size ranks tell each other their addresses."""
        if self.port is None:
            return dist.FileStore(self.place, size)  # type: ignore[attr-defined]
        return dist.TCPStore(  # type: ignore[attr-defined]
            self.place,
            self.port,
            is_master=self.listener is not None,
            timeout=_MEETING_LIMIT,
            wait_for_workers=False,
            master_listen_fd=None if self.listener is None else os.dup(self.listener),
            use_libuv=False,  # few ranks gain nothing by it, and it keeps a pipe for ever
        )


class Group:
    """Joins the ranks of a Meeting.

    In the order "ranks" each rank gathers the terms of a sum, adds them in fp32, and rounds once. So the bits of a row
    do not depend on the other rows. In that of a library they do: a ring begins the sum of each piece of a tensor at
    another rank, and NCCL chooses its algorithm by the size of the tensor.
    """

    def __init__(self, share: Share, meeting: Meeting, device: torch.device, order: SumOrder) -> None:
        self._share, self._meeting, self._device, self._order = share, meeting, device, order
        self._group: Any = None  # torch's stubs of its groups have no methods

    def meet(self) -> None:
        """Wait until all ranks have called this. Before, this rank is alone, and a sum is its term."""
        rank, size = self._share.rank, self._share.size
        with _lost():
            store = self._meeting.store(size)
            store.set_timeout(_MEETING_LIMIT)
            if self._device.type == "cuda":
                self._group = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
            else:
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._meeting.address)]
                self._group = dist.ProcessGroupGloo(store, rank, size, options)
        self.broadcast_(torch.zeros(1, device=self._device))  # NCCL connects at the first call of each kind
        self.sum(torch.zeros(1, device=self._device))

    def broadcast_(self, x: Tensor) -> None:
        """Overwrite x with that of rank 0."""
        if self._group is not None:
            with _lost():
                self._group.broadcast(x, 0).wait()

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x, contiguous, over all ranks; all get the same bits. May overwrite x."""
        if self._order == "ranks":
            return _in_order(self._gather(x))
        if self._group is not None:
            with _lost():
                self._group.allreduce(x).wait()
        return x

    def _gather(self, x: Tensor) -> Tensor:
        """Return the terms of all ranks, [ranks, *x.shape]; before they have met, zeros but for this one's."""
        shape = (self._share.size, *x.shape)
        if self._group is None:
            terms = x.new_zeros(shape)
            terms[self._share.rank] = x
            return terms
        terms = x.new_empty(shape)
        with _lost():
            self._group._allgather_base(terms.flatten(0, 1), x).wait()
        return terms


def _in_order(terms: Tensor) -> Tensor:
    """Return the sum over the first dimension, one term after the other; torch's sum may cut it up."""
    total = terms[0].to(torch.float32, copy=True)
    for term in terms[1:]:
        total += term
    return total.to(terms.dtype)


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"a rank of the engine is lost: {error}") from error


class OtherRanks(Protocol):
    """The ranks beyond this one, the first. Methods raise EngineDiedError once one of them is dead."""

    group: Group

    def least_memory(self, reserved_bytes: int) -> tuple[int, int]:
        """Wait until all have loaded; return the fewest free bytes, and how many of them a cache may take by default.

        Each rank reserves as much as this one.
        """

    def begin(self, num_blocks: int, max_model_len: int, *, has_graphs: bool) -> None:
        """Have all allocate their caches, and then record steps if there are graphs."""

    def agree(self, found: str | None) -> str | None:
        """Return what keeps this rank from graphs, or else another one, and tell them; None if nothing does."""

    def step(self, arrays: Sequence[Array], graph_size: int | None = None) -> AbstractContextManager[None]:
        """Have them compute these arrays while the caller does, by their graphs of this size if it is given."""

    def together(self) -> AbstractContextManager[None]:
        """Compute what they compute. If the caller raises, they can compute no more."""


class StartRanks(Protocol):
    """Starts the other ranks."""

    def __call__(self, config: EngineConfig, device: torch.device, warnings: Collection[str]) -> OtherRanks:
        """Return them; they do not repeat these warnings, which may grow while they load."""
