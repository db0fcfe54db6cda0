"""The sum over ranks: one order wherever an element stands, and an error once a rank is gone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, get_args

import pytest
import torch

from gptserve.engine.model.group import Group, Meeting, SumOrder, choose_order
from gptserve.weights.sharding import Share
from tests.engine.runs import make_config

T = TypeVar("T")
NUM_RANKS = 3
CPU = torch.device("cpu")


def on_all_ranks(folder: Path, compute: Callable[[Group, int], T], order: SumOrder = "ranks") -> list[T]:
    """Return what each rank computes; here the ranks are threads."""

    def of_rank(rank: int) -> T:
        group = Group(Share(rank, NUM_RANKS), Meeting(str(folder / "meeting")), CPU, order)
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


def test_in_the_order_of_a_library_a_row_has_another_sum_alone(tmp_path: Path) -> None:
    """Without this the test above might compare what depends on nothing."""
    terms = torch.randn(NUM_RANKS, 64, 33, generator=torch.Generator().manual_seed(0))

    def sums(group: Group, rank: int) -> list[torch.Tensor]:
        return [group.sum(terms[rank, n:].clone()) for n in (0, 63)]

    for whole, row in on_all_ranks(tmp_path, sums, "library"):
        assert not torch.equal(whole[63:], row)
        assert torch.allclose(whole[63:], row)


def test_a_rank_that_has_met_nobody_sums_its_term_alone(tmp_path: Path) -> None:
    """That is how the first one measures the memory of a step, with room for the terms of all."""
    x = torch.randn(4, 8).bfloat16()
    meeting = Meeting(str(tmp_path / "meeting"))
    groups = [Group(Share(1, NUM_RANKS), meeting, CPU, order) for order in get_args(SumOrder)]
    assert all(torch.equal(group.sum(x.clone()), x) for group in groups)
    assert groups[0]._gather(x).nbytes == NUM_RANKS * x.nbytes


def test_a_gpu_adds_in_the_order_of_the_ranks_where_answers_must_not_depend_on_the_batch(tiny_gpt2: Path) -> None:
    asked, plain = (make_config(tiny_gpt2, batch_invariant=value) for value in (True, False))
    assert choose_order(asked, torch.device("cuda")) == "ranks"
    assert choose_order(plain, torch.device("cuda")) == "library"
    assert choose_order(plain, CPU) == "ranks"


def test_all_ranks_get_the_first_ones_tensor(tmp_path: Path) -> None:
    def broadcast(group: Group, rank: int) -> torch.Tensor:
        x = torch.full((2, 3), float(rank + 7))
        group.broadcast_(x)
        return x

    assert all(torch.equal(x, torch.full((2, 3), 7.0)) for x in on_all_ranks(tmp_path, broadcast))
