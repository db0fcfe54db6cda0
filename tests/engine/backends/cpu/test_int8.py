"""Products in int8: the definition in torch, and the compiled kernels against it, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.int4 import NativeInt4Linear
from gptserve.engine.backends.cpu.int8 import (
    FORMAT,
    NUM_SCALES,
    REMAINDER_STEPS,
    DenseInt8Linear,
    add_remainders,
    group_sums,
    quantize_rows,
    quantize_weight,
    shares_of,
)
from gptserve.engine.backends.cpu.linear import PackedRows
from gptserve.engine.model.linear import Affine
from gptserve.engine.runner.products import build_of, make_linear, product_of
from gptserve.weights.config import Activation
from gptserve.weights.quantized.coded import GROUP
from tests.engine.backends.cpu.rounding import quantize_groups

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)
ODD_SIZES = [
    *((1, 1), (33, 17), (576, 33), (3000, 400)),
    *(pytest.param(*size, marks=pytest.mark.slow) for size in ((2, 3), (31, 16), (96, 32), (64, 95), (257, 300))),
]
"""(in, out) around the multiples that the layout pads to, and one that is quantized in two pieces."""


@pytest.fixture(params=native.VARIANTS[native.CODED_VARIANTS])
def variant(request: pytest.FixtureRequest) -> Iterator[native.Variant]:
    if request.param not in native.supported_variants(native.CODED_VARIANTS):
        pytest.skip(f"{request.param} is not built, or this CPU has none")
    yield request.param
    native.set_num_threads(1)


def with_outliers(x: Tensor) -> Tensor:
    """Return x with one column in 200 twenty times as large."""
    factors = torch.ones(x.shape[1])
    factors[torch.randperm(x.shape[1])[: -(-x.shape[1] // 200)]] = 20
    return x * factors


def rows_of_all_kinds(num_in: int, dtype: torch.dtype) -> Tensor:
    """Return 40 finite rows: outliers, zeros, equal elements, and the ends of the range of fp32."""
    x = with_outliers(torch.randn(40, num_in))
    x[1], x[2], x[3] = 0, 1, -x[3].abs()
    x[4] *= 1e-38
    x[5] *= 1e-30
    x[6] *= 1e35
    x[7, 1:] = 0
    x[8] = torch.randn(num_in).exp() ** 4
    return x.to(dtype)


def assert_same(y: Tensor, expected: Tensor) -> None:
    """Assert that all numbers are equal; the row at the end of the range may give infinities, and NaN in both."""
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_is_the_nearest_codes(dtype: torch.dtype) -> None:
    weight = with_outliers(torch.randn(50, 320)).to(dtype)
    weight[3], weight[4, 64:96], weight[5, 7] = 0, -weight[4, 64:96].abs(), torch.inf
    found, expected = quantize_weight(weight), quantize_groups(weight, FORMAT)
    assert torch.equal(found.codes, expected.codes)
    assert_same(found.scales, expected.scales)
    values, finite = found.values(slice(None)), weight.float().isfinite().all(1)
    largest = weight.float().unflatten(1, (-1, GROUP)).abs().amax(2, keepdim=True).expand(-1, -1, GROUP).flatten(1)
    # One step where the largest has the code -128 and this its negative, 127 at most; the scale is off by 2^-11 of it.
    assert ((values - weight.float()).abs() <= largest * (1 / 128 + 2**-11))[finite].all()
    assert values[5, :GROUP].isnan().all()


def test_scales_are_those_of_the_least_weighted_error_of_all_that_are_tried() -> None:
    torch.manual_seed(0)
    weight, shares = torch.randn(20, 64), shares_of(torch.rand(64) ** 6)
    groups, counts = weight.view(20, 2, GROUP), shares.view(2, GROUP)

    def errors(scales: Tensor) -> Tensor:
        codes = (groups / scales[..., None]).round().clamp(-128, 127)
        return ((groups - codes * scales[..., None]).square() * counts).sum(2)

    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))[..., 0]
    tried = [errors((largest / (i - 127)).half().float()) for i in range(NUM_SCALES)]
    found = errors(quantize_weight(weight, shares).scales.float())
    assert (found <= 1.02 * torch.stack(tried).amin(0)).all()
    assert found.sum() < 0.7 * tried[0].sum()


def test_a_row_is_its_codes_and_their_remainders_times_its_scales() -> None:
    x = rows_of_all_kinds(640, torch.float32)[7:]
    codes, rest, scales = quantize_rows(x)
    assert codes.abs().max() == rest.abs().max() == 127
    assert codes.abs().amax(2)[1:].min() == 127
    found = (codes + rest / REMAINDER_STEPS) * scales[..., None]
    largest = x.unflatten(1, (-1, GROUP)).abs().amax(2, keepdim=True)
    assert ((found - x.unflatten(1, (-1, GROUP))).abs() <= largest / 60_000).all()


def test_remainders_take_most_of_the_error_where_few_elements_are_large() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 768), torch.randn(8, 768)
    x[:, [5, 300]] *= 20
    coded = quantize_weight(weight)
    weights, factors = (coded.codes.float() - 128).unflatten(1, (-1, GROUP)), coded.scales.float()
    codes, _, scales = quantize_rows(x)
    exact, y = x @ coded.values(slice(None)).T, group_sums(codes, weights, scales, factors)
    without = (y - exact).norm()
    add_remainders(y, x, weights, factors)
    assert (y - exact).norm() < without / 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_in", "num_out"), ODD_SIZES)
def test_the_kernel_has_the_bits_of_the_definition(
    variant: native.Variant, dtype: torch.dtype, num_in: int, num_out: int
) -> None:
    torch.manual_seed(num_in)
    weight, x = with_outliers(torch.randn(num_out, num_in)).to(dtype), rows_of_all_kinds(num_in, dtype)
    bias, residual = torch.randn(num_out).to(dtype), torch.randn(len(x), num_out)
    for others, squares in (((None, None), None), ((bias, "relu"), torch.rand(num_in) ** 6)):
        for out_dtype in (None, torch.float32):
            linear = NativeInt4Linear(weight, FORMAT, *others, out_dtype, variant, squares=squares)
            dense = DenseInt8Linear(weight, *others, out_dtype, squares)
            assert_same(linear(x), dense(x))
            assert_same(linear(x, residual), dense(x, residual))
            numbers = torch.arange(0, num_out, 3)
            assert torch.equal(PackedRows(linear)[numbers], dense[numbers])


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
def test_the_kernel_activates(variant: native.Variant, activation: Activation | None) -> None:
    weight, x = torch.randn(70, 96), torch.randn(5, 96)
    found = NativeInt4Linear(weight, FORMAT, None, activation, variant=variant)(x)
    torch.testing.assert_close(found, DenseInt8Linear(weight, None, activation)(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_never_becomes_a_number(variant: native.Variant, dtype: torch.dtype, bad: float) -> None:
    weight, x = torch.randn(40, 96).to(dtype), torch.randn(4, 96).to(dtype)
    x[1, 50], weight[7, 3] = bad, bad
    y = NativeInt4Linear(weight, FORMAT, None, variant=variant)(x)
    assert y.isnan().any(1).all()
    assert y[1].isnan().all()
    assert y.isnan().all(0).tolist() == [i == 7 for i in range(40)]


@pytest.mark.parametrize("seed", range(2))
def test_a_row_of_the_kernel_has_the_same_bits_among_any_others(variant: native.Variant, seed: int) -> None:
    draw, num_out = random.Random(seed), 100
    torch.manual_seed(seed)
    linear = NativeInt4Linear(torch.randn(num_out, 544), FORMAT, None, variant=variant)
    x = with_outliers(torch.randn(90, 544))
    native.set_num_threads(3)
    plain = linear(x)
    for num_threads in (1, 2):
        native.set_num_threads(num_threads)
        for num_rows in (*range(1, 18), 33, 64):
            some = torch.tensor(draw.sample(range(90), num_rows))
            assert torch.equal(linear(x[some]), plain[some]), num_rows
    assert linear(x[:0]).shape == (0, num_out)


def test_the_codes_at_their_ends_do_not_overflow(variant: native.Variant) -> None:
    x = functional.pad(torch.full((2, 2048), 1 - 1 / 254), (0, GROUP), value=1.0)  # remainders of 127, too
    x[1] *= -1
    x[:, ::GROUP] = 1
    weight = torch.full((3, x.shape[1]), -1.0)
    assert quantize_rows(x)[1].abs().max() > 100
    assert_same(NativeInt4Linear(weight, FORMAT, None, variant=variant)(x), DenseInt8Linear(weight, None)(x))


def test_without_the_kernel_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(40, 64), torch.randn(3, 64)
    best = make_linear(Affine(weight), "int8")
    name = build_of(product_of(CPU, torch.float32, "int8"), torch.float32)
    monkeypatch.setattr(native, "is_available", lambda: False)
    slow = make_linear(Affine(weight), "int8")
    assert isinstance(slow, DenseInt8Linear)
    assert torch.equal(slow(x), best(x))
    assert build_of(product_of(CPU, torch.float32, "int8"), torch.float32) == "torch_coded"
    assert (name == "torch_coded") == isinstance(best, DenseInt8Linear)
