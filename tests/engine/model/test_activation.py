"""Activations: the bits of an element depend on it alone, not on its row, its neighbours or the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import exp, expm1, log1p
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gptserve.engine.model.activation import Xielu, activate, gate_heads
from gptserve.weights.config import Activation, AttentionGate

ROWS = 150
COUNTS = (1, 2, 3, 7, 100, ROWS)
THREADS = (1, 2, 3, 5, 6, 19)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


XIELU = Xielu.of(torch.tensor([0.3, 1.2, 0.5, -1e-6]))
COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: partial(activate, activation=name) for name in get_args(Activation)},
    "xielu": XIELU,
}


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", COMPUTED)
def test_no_bit_depends_on_other_rows_or_on_threads(activation: str, dtype: torch.dtype) -> None:
    compute = COMPUTED[activation]
    for width in (50, 720, 2880):
        x = (3 * torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0))).to(dtype)
        torch.set_num_threads(1)
        alone = torch.cat([compute(row) for row in x.split(1)])
        for num_threads in THREADS:
            torch.set_num_threads(num_threads)
            for count in COUNTS:
                assert torch.equal(compute(x[:count]), alone[:count]), (width, num_threads, count)


def test_the_comparison_sees_what_torch_leaves_to_other_code() -> None:
    x = torch.randn(ROWS, 50, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(functional.silu(x), torch.cat([functional.silu(row) for row in x.split(1)]))


def test_a_view_of_columns_is_activated_as_its_copy() -> None:
    x = torch.randn(6, 100)[:, ::2]
    assert torch.equal(activate(x, "silu"), activate(x.contiguous(), "silu"))
    assert activate(x, "silu").shape == x.shape
    assert activate(torch.empty(0, 50), "silu").shape == (0, 50)


def test_xielu_has_the_numbers_of_its_tensor_after_a_softplus() -> None:
    """x <= 0 has alpha_n + beta times what is curved: values of the definition in double precision."""
    alpha_p, alpha_n = log1p(exp(0.3)), 0.5 + log1p(exp(1.2))
    for x in (2.0, 0.1, 0.0, -1e-8, -0.3, -4.0):
        curved = alpha_p * x * x if x > 0 else alpha_n * (expm1(min(x, -1e-6)) - x)
        assert XIELU(torch.tensor([[x]])).item() == pytest.approx(curved + 0.5 * x, rel=2e-6, abs=1e-7)
    assert Xielu.of(torch.tensor([166.0, 40.75, 0.5, -1e-6])).numbers.tolist()[:2] == [166.0, 41.25]
    assert XIELU(torch.tensor([[2.0]], dtype=torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", get_args(AttentionGate))
def test_gates_of_heads_are_those_of_their_dimensions_and_depend_on_their_row(
    function: AttentionGate, dtype: torch.dtype
) -> None:
    heads, gates = torch.randn(9, 3, 5).to(dtype), torch.randn(9, 3).to(dtype)
    found = gate_heads(heads, gates, function)
    for row in range(9):
        assert torch.equal(found[row : row + 1], gate_heads(heads[row : row + 1], gates[row : row + 1], function))
    assert torch.equal(found, gate_heads(heads, gates.repeat_interleave(5, 1), function))
    of_one = {
        "sigmoid": lambda x: 1 / (1 + exp(-x)),
        "softplus": lambda x: log1p(exp(x)),
        "silu": lambda x: x / (1 + exp(-x)),
    }[function]
    factors = torch.tensor([of_one(gate) for gate in gates[0].tolist()])
    expected = (heads[0].float() * factors.unsqueeze(-1)).flatten()
    assert torch.allclose(found[0].float(), expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5)
