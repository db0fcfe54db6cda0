"""Activations: the bits of an element depend on it alone, not on its row, its neighbours or the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from torch.nn import functional

from gptserve.engine.model.activation import activate
from gptserve.weights.config import Activation

ROWS = 150
COUNTS = (1, 2, 3, 7, 100, ROWS)
THREADS = (1, 2, 3, 5, 6, 19)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_no_bit_depends_on_other_rows_or_on_threads(activation: Activation, dtype: torch.dtype) -> None:
    for width in (50, 720, 2880):
        x = (3 * torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0))).to(dtype)
        torch.set_num_threads(1)
        alone = torch.cat([activate(row, activation) for row in x.split(1)])
        for num_threads in THREADS:
            torch.set_num_threads(num_threads)
            for count in COUNTS:
                assert torch.equal(activate(x[:count], activation), alone[:count]), (width, num_threads, count)


def test_the_comparison_sees_what_torch_leaves_to_other_code() -> None:
    x = torch.randn(ROWS, 50, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(functional.silu(x), torch.cat([functional.silu(row) for row in x.split(1)]))


def test_a_view_of_columns_is_activated_as_its_copy() -> None:
    x = torch.randn(6, 100)[:, ::2]
    assert torch.equal(activate(x, "silu"), activate(x.contiguous(), "silu"))
    assert activate(x, "silu").shape == x.shape
    assert activate(torch.empty(0, 50), "silu").shape == (0, 50)
