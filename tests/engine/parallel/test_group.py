"""The sum over ranks: one order wherever an element stands, and an error once a rank is gone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from gptserve.engine.parallel.group import Group
from gptserve.weights.sharding import Share

T = TypeVar("T")
NUM_RANKS = 3


def on_all_ranks(folder: Path, compute: Callable[[Group, int], T]) -> list[T]:
    """Return what each rank computes; here the ranks are threads."""

    def of_rank(rank: int) -> T:
        group = Group(Share(rank, NUM_RANKS), str(folder / "meeting"), torch.device("cpu"))
        group.meet()
        return compute(group, rank)

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(of_rank, range(NUM_RANKS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_sum_alone_and_among_others(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(NUM_RANKS, 64, 33, generator=generator).to(dtype)

    sums = on_all_ranks(tmp_path, lambda group, rank: [group.sum(terms[rank, n:].clone()) for n in (0, 1, 31, 63)])

    for whole, *parts in sums:
        assert torch.equal(whole, (terms[0].float() + terms[1].float() + terms[2].float()).to(dtype))
        assert all(torch.equal(part, whole[-len(part) :]) for part in parts)
    assert not torch.equal(terms[0] + (terms[1] + terms[2]), (terms[0] + terms[1]) + terms[2])  # the order matters


def test_all_ranks_get_the_first_ones_tensor(tmp_path: Path) -> None:
    def broadcast(group: Group, rank: int) -> torch.Tensor:
        x = torch.full((2, 3), float(rank + 7))
        group.broadcast_(x)
        return x

    assert all(torch.equal(x, torch.full((2, 3), 7.0)) for x in on_all_ranks(tmp_path, broadcast))
