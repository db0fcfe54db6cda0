"""A mixture of experts in torch on a CPU; tests/parity compares it with transformers."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.linear import NativeLinear, PackedLinear, has_onednn
from gptserve.engine.model.experts import MixtureOfExperts
from gptserve.engine.model.linear import Linear
from gptserve.engine.model.routing import choose, route
from gptserve.weights.config import Experts, Router
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


ROUTERS = {
    "softmax": Experts(12, 4),
    "softmax of all": Experts(12, 4, Router(renormalised=False), num_shared=2, has_shared_gate=True),
    "softmax, corrected": Experts(12, 4, Router(has_correction=True)),
    "sigmoid in groups": Experts(12, 4, Router("sigmoid", True, 3, 2, scale=2.5), num_shared=1),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_row_has_the_same_route_alone_and_in_any_batch(name: str) -> None:
    shape = ROUTERS[name]
    logits, correction = torch.randn(33, shape.num_logits), torch.randn(12)
    whole = route(shape, logits, correction if shape.router.has_correction else None)
    for first, last in ((0, 1), (32, 33), (5, 7), (2, 18), (1, 33)):
        part = route(shape, logits[first:last], correction if shape.router.has_correction else None)
        assert all(torch.equal(a, b[first:last]) for a, b in zip(part, whole, strict=True))


@pytest.mark.some(2)
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
    mixture, x = (
        MixtureOfExperts(lambda x: route(Experts(12, num_active), router(x)), experts),
        torch.randn(33, 96, dtype=dtype),
    )
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


def routed(shape: Experts, *logits: float, correction: Tensor | None = None) -> dict[int, float]:
    """Return the weights of one row, by expert, in the order of its choice."""
    chosen_TK, weights_TK = route(shape, torch.tensor([logits]), correction)
    return dict(zip(chosen_TK[0].tolist(), weights_TK[0].tolist(), strict=True))


def test_a_correction_takes_part_in_the_choice_alone() -> None:
    correction = torch.tensor([0.0, 0.0, 9.0])
    shape = Experts(3, 2, Router("sigmoid", has_correction=True, renormalised=False, scale=2.0))
    found = routed(shape, 0.0, 1.0, -1.0, correction=correction)
    assert found == pytest.approx({2: 2 / (1 + math.e), 1: 2 / (1 + 1 / math.e)})
    softmax = Experts(3, 2, Router(has_correction=True))
    found = routed(softmax, 0.0, 1.0, -1.0, correction=correction)
    assert found == pytest.approx({2: 1 / (1 + math.e**2), 1: 1 / (1 + math.e**-2)})


def test_weights_are_multiplied_by_a_number_of_their_expert_after_all_else() -> None:
    shape = Experts(3, 2, Router(has_factors=True, scale=2.0), num_shared=1)
    logits, factors = torch.tensor([[0.0, 1.0, -1.0]]), torch.tensor([0.5, 3.0, 100.0])
    chosen, weights = route(shape, logits, None, factors)
    assert chosen.tolist() == [[1, 0, 3]]
    first = 2 / (1 + 1 / math.e)
    assert weights[0].tolist() == pytest.approx([3 * first, 0.5 * (2 - first), 1.0])


def test_weights_are_divided_by_their_sum_or_by_the_least_one() -> None:
    shape = Experts(3, 2, Router("sigmoid", min_sum=0.5))
    assert routed(shape, 0.0, 0.0, -9.0) == {0: 0.5, 1: 0.5}
    found = routed(shape, -100.0, -100.0, -100.0)
    assert found == {0: pytest.approx(0), 1: pytest.approx(0)}
    shape = Experts(3, 2, Router("sigmoid", sum_offset=0.25))
    assert routed(shape, 0.0, 0.0, -9.0) == pytest.approx({0: 0.4, 1: 0.4})


def test_experts_are_chosen_within_the_best_groups_of_which_the_first_is_better() -> None:
    shape = Experts(6, 3, Router("sigmoid", num_groups=3, num_active_groups=2))
    assert list(routed(shape, 5.0, -9.0, 1.0, 1.0, 0.5, 0.5)) == [2, 3, 4]  # the single best one stands alone
    assert list(routed(shape, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0)) == [0, 2, 1]


def test_shared_experts_follow_the_chosen_with_their_own_weight() -> None:
    assert routed(Experts(3, 1, num_shared=2), 0.0, 1.0, 0.0) == {1: 1.0, 3: 1.0, 4: 1.0}
    assert routed(Experts(3, 1, num_shared=2, shared_weight=0.5), 0.0, 1.0, 0.0) == {1: 1.0, 3: 0.5, 4: 0.5}
    gated = Experts(3, 1, num_shared=1, has_shared_gate=True)
    assert routed(gated, 0.0, 1.0, 0.0, 2.0) == {1: 1.0, 3: pytest.approx(1 / (1 + math.exp(-2)))}
