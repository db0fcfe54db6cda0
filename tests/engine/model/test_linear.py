"""The packed linear against torch's, and its rows' independence of the batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from gptserve.engine.model.linear import MIN_ROWS, DenseLinear, PackedLinear, make_linear, rows_are_independent
from gptserve.weights.config import Activation

ACTIVATIONS: tuple[Activation | None, ...] = (None, "gelu", "gelu_tanh", "relu", "silu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_packed_equals_dense(activation: Activation | None, bias: bool) -> None:
    weight, x = torch.randn(48, 32), torch.randn(5, 32)
    b = torch.randn(48) if bias else None
    expected = DenseLinear(weight, b, activation)(x)
    torch.testing.assert_close(PackedLinear(weight, b, activation)(x), expected, atol=1e-5, rtol=1e-5)


def test_packed_adds_the_residual_and_leaves_it_unchanged() -> None:
    weight, bias, x, residual = torch.randn(48, 32), torch.randn(48), torch.randn(5, 32), torch.randn(5, 48)
    kept = residual.clone()
    expected = DenseLinear(weight, bias)(x, residual)
    torch.testing.assert_close(PackedLinear(weight, bias)(x, residual), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(768, 2304), (3072, 768), (640, 96)])
def test_a_row_has_the_same_bits_in_any_batch_of_at_least_two(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = torch.randn(shape[1], shape[0], dtype=dtype), torch.randn(shape[1], dtype=dtype)
    linear = PackedLinear(weight, bias)
    x, residual = torch.randn(64, shape[0], dtype=dtype), torch.randn(64, shape[1], dtype=dtype)
    plain, added = linear(x), linear(x, residual)
    for start, end in pairwise((0, 2, 5, 12, 28, 64)):
        assert torch.equal(linear(x[start:end]), plain[start:end])
        assert torch.equal(linear(x[start:end], residual[start:end]), added[start:end])
    order = torch.randperm(64)
    assert torch.equal(linear(x[order]), plain[order])


def test_sums_in_another_order_are_seen_by_the_comparison() -> None:
    """The negative control of the test above, in fp32, where no rounding of the result hides the order."""
    weight, bias, x = torch.randn(96, 640), torch.randn(96), torch.randn(64, 640)
    plain, mixed = PackedLinear(weight, bias)(x), torch.randperm(640)
    other = PackedLinear(weight[:, mixed], bias)(x[:, mixed])
    torch.testing.assert_close(other, plain, atol=1e-3, rtol=1e-3)
    assert not torch.equal(other, plain)


def test_a_single_row_is_refused() -> None:
    linear = PackedLinear(torch.randn(8, 8), None)
    with pytest.raises(AssertionError, match="single row"):
        linear(torch.randn(MIN_ROWS - 1, 8))


def test_the_cpu_gets_the_packed_linear() -> None:
    assert isinstance(make_linear(torch.randn(8, 8), None), PackedLinear)
    assert isinstance(make_linear(torch.randn(8, 8).half(), None), DenseLinear)


SHAPES = [(768, 2304), (3072, 768), (768, 768), (2048, 8192), (1024, 256)]


def test_whatever_the_cpu_rows_are_independent_in_bf16() -> None:
    assert rows_are_independent(SHAPES, torch.bfloat16)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX")
def test_calls_of_any_number_of_rows_would_depend_on_it_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptserve.engine.model.linear._AMX_ROWS", 1000)
    assert not rows_are_independent(SHAPES, torch.bfloat16)


@pytest.mark.parametrize("num_rows", [2, 32, 33, 65, 100])
def test_with_amx_no_call_has_more_rows_than_keep_their_bits_nor_a_single_one(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    linear = PackedLinear(torch.randn(48, 32).bfloat16(), None)
    multiply, calls = linear._multiply, list[int]()

    def counting(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        calls.append(len(x))
        return multiply(x, residual)

    monkeypatch.setattr(linear, "_multiply", counting)
    x, residual = torch.randn(num_rows, 32).bfloat16(), torch.randn(num_rows, 48).bfloat16()
    torch.testing.assert_close(linear(x, residual), multiply(x, residual))
    assert linear(x).shape == (num_rows, 48)
    assert sum(calls) == 2 * num_rows
    assert all(2 <= rows <= 32 for rows in calls)


def test_a_product_whose_rows_depend_on_their_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = PackedLinear.__call__

    def depending(self: PackedLinear, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return compute(self, x, residual) * (1.0 if len(x) != 33 else 1.01)

    assert rows_are_independent([(64, 32)], torch.float32)
    monkeypatch.setattr(PackedLinear, "__call__", depending)
    assert not rows_are_independent([(64, 32)], torch.float32)
