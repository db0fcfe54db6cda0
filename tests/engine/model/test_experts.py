"""A mixture of experts in torch on a CPU; tests/parity compares it with transformers."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.linear import NativeLinear, PackedLinear, has_onednn
from gptserve.engine.model.experts import MixtureOfExperts, choose
from gptserve.engine.model.linear import Linear
from gptserve.weights.config import Experts
from tests.engine.backends.cpu import onednn

PAIRS = {
    (NativeLinear, 1, torch.float32, 2),
    (NativeLinear, 8, torch.bfloat16, 1),
    (PackedLinear, 1, torch.bfloat16, 1),
    (PackedLinear, 8, torch.float32, 2),
}
"""Each value beside each other one, but for the dtype and the threads; the slow tests have all combinations."""
CASES = [
    pytest.param(*case, marks=() if case in PAIRS else pytest.mark.slow)
    for case in product((NativeLinear, PackedLinear), (1, 2, 4, 8), (torch.float32, torch.bfloat16), (1, 2))
]


@pytest.mark.parametrize(("kind", "num_active", "dtype", "num_threads"), CASES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    kind: type[NativeLinear | PackedLinear], num_active: int, dtype: torch.dtype, num_threads: int
) -> None:
    if not (native.is_available() if kind is NativeLinear else has_onednn()):
        pytest.skip("the library is not built, or torch has no oneDNN")
    if kind is PackedLinear and dtype is torch.bfloat16 and not onednn.has_bf16:
        pytest.skip("oneDNN has no bf16 for this CPU")
    linears: list[Linear] = [kind(torch.randn(out, 96, dtype=dtype), None) for out in (12, *[96] * 12)]
    router, *experts = linears
    mixture, x = MixtureOfExperts(Experts(12, num_active), router, experts), torch.randn(33, 96, dtype=dtype)
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


def test_of_equal_logits_the_first_experts_are_chosen() -> None:
    """As many as torch sorts by other means than a few."""
    logits_TE = torch.zeros(3, 200).bfloat16()
    logits_TE[1, 150], logits_TE[2, 7] = 1, -1
    found_TK, experts_TK = choose(logits_TE, 4)
    assert experts_TK.tolist() == [[0, 1, 2, 3], [150, 0, 1, 2], [0, 1, 2, 3]]
    assert found_TK.dtype is torch.float32
    assert torch.equal(found_TK, logits_TE.float().gather(1, experts_TK))


def test_nan_is_chosen_before_all_numbers() -> None:
    found_TK, experts_TK = choose(torch.tensor([[1.0, torch.nan, torch.inf, 0.0]]), 2)
    assert experts_TK.tolist() == [[1, 2]]
    assert found_TK.softmax(-1).isnan().all()
