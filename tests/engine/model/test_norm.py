"""torch's norms on a CPU: their formulas, and that a row has the same bits in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gptserve.engine.model.norm import Norm
from gptserve.weights import config


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1.0])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_rows_as_small_as_eps_have_the_norm_of_the_formula(kind: config.Norm, size: float) -> None:
    eps = 1e-6  # the square of one of the sizes
    x, weight = size * torch.randn(5, 64), torch.randn(64)
    centred = x.double() - (x.double().mean(-1, keepdim=True) if kind == "layernorm" else 0)
    expected = weight * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()

    assert torch.allclose(Norm(kind, weight, None, eps)(x).double(), expected, rtol=1e-4, atol=1e-5)


def first_difference(kind: config.Norm, dtype: torch.dtype, width: int) -> int | None:
    """Return in which number of rows the norm of one of them has other bits than in 33, or None."""
    dtype_of_weight = torch.float32 if kind == "rmsnorm" else dtype
    norm = Norm(kind, torch.randn(width, dtype=dtype_of_weight), None, 1e-5)
    x = torch.randn(33, width, dtype=dtype)
    whole = norm(x)
    for num_rows in (1, 2, 3, 16):
        for last in range(num_rows, 34, num_rows):
            if not torch.equal(norm(x[last - num_rows : last]), whole[last - num_rows : last]):
                return num_rows
    return None


@pytest.mark.some(4)
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(kind: config.Norm, dtype: torch.dtype) -> None:
    found = {width: first_difference(kind, dtype, width) for width in (1, 8, 100, 768, 2880, 16384)}
    assert set(found.values()) == {None}, found


def test_threads_that_share_the_sum_of_a_row_are_seen_by_the_comparison() -> None:
    """The negative control: torch shares the elements of a single row among threads if they are more than 32,768."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert first_difference("rmsnorm", torch.float32, 50_000) == 1
        torch.set_num_threads(1)
        assert first_difference("rmsnorm", torch.float32, 50_000) is None
    finally:
        torch.set_num_threads(before)
