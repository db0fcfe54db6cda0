"""A mixture of experts in torch on a CPU; tests/parity compares it with transformers."""

from __future__ import annotations

import pytest
import torch

from gptserve.engine.model.experts import MixtureOfExperts
from gptserve.engine.model.linear import make_linear


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_active", [1, 2, 4, 8])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(num_active: int, dtype: torch.dtype, num_threads: int) -> None:
    router, *experts = (make_linear(torch.randn(out, 96, dtype=dtype), None) for out in (12, *[96] * 12))
    mixture, x = MixtureOfExperts(router, experts, num_active), torch.randn(33, 96, dtype=dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        whole = mixture(x, x)
        for num_rows in (1, 2, 3, 16):
            for last in range(num_rows, 34, num_rows):
                rows = x[last - num_rows : last]
                assert torch.equal(mixture(rows, rows), whole[last - num_rows : last])
    finally:
        torch.set_num_threads(before)
