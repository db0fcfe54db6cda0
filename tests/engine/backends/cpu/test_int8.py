"""Products in int8 and int10: the definitions in torch, and the compiled kernels against them, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.int8 import (
    DenseInt8Linear,
    column_factors,
    exact_outputs,
    exact_product,
    integer_product,
    large_channels,
    quantize_rows,
    quantize_weight,
)
from gptserve.engine.backends.cpu.linear import NativeInt8Linear, NativeInt10Linear
from gptserve.engine.model.linear import Affine
from gptserve.engine.model.loading import StreamedTensors, take_linear
from gptserve.engine.runner.products import Linears, build_of, make_linear, product_of
from gptserve.weights.config import Activation
from tests.engine.backends.cpu import int10
from tests.engine.backends.cpu.int10 import DenseInt10Linear

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)
ODD_SIZES = [
    *((1, 1), (33, 17), (100, 33), (3000, 400)),
    *(pytest.param(*size, marks=pytest.mark.slow) for size in ((2, 3), (31, 16), (96, 32), (64, 95), (257, 300))),
]
"""(in, out) around the multiples that the layout pads to, and one that is quantized in two pieces."""


class Kind(NamedTuple):
    """A type of weights: its kernel, its definition, and a variant of the kernel."""

    bits: int
    variant: native.Variant
    native: type[NativeInt8Linear]
    dense: type[DenseInt8Linear]


KINDS = [
    *(Kind(8, variant, NativeInt8Linear, DenseInt8Linear) for variant in native.VARIANTS[8]),
    *(Kind(10, variant, NativeInt10Linear, DenseInt10Linear) for variant in native.VARIANTS[10]),
]


@pytest.fixture(params=KINDS, ids=lambda kind: f"int{kind.bits}-{kind.variant}")
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    if request.param.variant not in native.supported_variants(request.param.bits):
        pytest.skip(f"{request.param.variant} is not built, or this CPU has none")
    yield request.param
    native.set_num_threads(1)


of_both = pytest.mark.parametrize("bits", [8, 10])


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


def with_large_outputs(weight: Tensor) -> Tensor:
    """Return a weight with one output in 200 twenty times as large."""
    return with_outliers(weight.T).T.contiguous()


@pytest.mark.parametrize("num_in", [1, 2, 127, 129, 1025, 3000])
def test_integer_sums_are_exact(num_in: int) -> None:
    multiples = torch.randint(-127, 128, (3, num_in)).float()
    multiples[0] = 127
    values = torch.randint(-127, 128, (1030, num_in), dtype=torch.int8)
    values[0] = 127
    exact = multiples.long() @ values.long().T
    assert torch.equal(integer_product(multiples, values), exact.float())


def test_a_row_is_its_multiples_times_its_scale() -> None:
    x = rows_of_all_kinds(768, torch.float32)
    near, far, scale = quantize_rows(x)
    assert ((scale * (near + 128 * far) - x).abs() <= scale * 0.501).all()
    assert ((far != 0) <= (x.abs() >= scale * 127)).all()
    assert (far != 0).sum(1).max() <= 6
    assert near.abs().max() <= 127
    assert 30 < far.abs().max() <= 64


def test_outliers_do_not_make_the_others_coarse() -> None:
    x = torch.randn(80, 768)
    outlying = with_outliers(x)
    plain, scale = quantize_rows(x)[2], quantize_rows(outlying)[2]
    assert (scale < 1.5 * plain).all()
    assert outlying.abs().amax(1).median() / 127 > 4 * plain.median()


def test_large_and_small_columns_of_weights_get_a_factor() -> None:
    weight = torch.randn(300, 200).clamp(-2, 2)
    assert column_factors(weight) is None
    weight[:, 7] *= 20
    weight[:, 8] /= 20
    weight[:, 9] = 0
    weight[5, 10] = 15.0  # alone, it makes one scale coarse; a factor would do so to the whole column
    factors = column_factors(weight)
    assert factors is not None
    assert factors[7:9].tolist() == [16, 1 / 16]
    assert (factors != 1).sum() == 2
    pieces: dict[int, torch.Tensor] = {}
    scales = quantize_weight(weight, factors, keep=pieces.__setitem__)
    values = torch.cat([pieces[start] for start in sorted(pieces)])
    error = (values * scales[:, None] * factors - weight).abs() / factors
    assert (error <= 0.501 * scales[:, None]).all()
    assert column_factors(torch.zeros(3, 4)) is None


def test_a_column_that_makes_no_scale_coarse_gets_no_factor() -> None:
    """In trained models its element of x can be by far the largest, and a factor would make its weights coarse."""
    weight, x = torch.randn(400, 576), torch.randn(20, 576)
    weight[:, 7] *= 4
    assert column_factors(weight) is None
    x[:, 7] *= 50
    expected = x @ weight.T
    error = (DenseInt8Linear(weight, None)(x) - expected).square().mean() / expected.square().mean()
    assert error.sqrt() < 0.004  # with a factor of 4 it is 0.0075


def test_large_outputs_do_not_make_the_others_coarse() -> None:
    """They write to the few large channels of the residual stream, as in GPT-2."""
    weight = torch.randn(300, 200).clamp(-2, 2)
    weight[:4] *= 20
    assert column_factors(weight) is None


def test_by_far_the_largest_outputs_are_not_quantized() -> None:
    """They write to the few large channels of the residual stream, as in GPT-2."""
    weight, x = torch.randn(768, 300), torch.randn(8, 300)
    weight[torch.tensor([700, 5, 37])] *= 20
    weight[9] *= 3
    weight[10] = torch.nan
    linear = DenseInt8Linear(weight, None)
    errors = (linear(x) - x @ weight.T).abs().amax(0)
    assert (errors < 1e-3).nonzero().flatten().tolist() == [5, 37, 700]
    weight[:20] *= 20
    assert exact_outputs(weight.nan_to_num().abs().amax(1)).numel() == 6
    assert exact_outputs(torch.zeros(3)).numel() == 0


def test_large_channels_are_those_of_the_embedding_and_of_the_positions() -> None:
    embedding, positions = torch.randn(1000, 300), torch.randn(70, 300)
    embedding[:, 7] *= 20
    embedding[3] *= 3
    assert large_channels(embedding.bfloat16(), positions).tolist() == [7]
    positions[:, 2] *= 20
    assert large_channels(embedding, positions).tolist() == [2, 7]
    assert large_channels(embedding, None).tolist() == [7]
    embedding[:, 100:150] *= 20
    assert len(large_channels(embedding, None)) == 3
    assert large_channels(torch.zeros(5, 4), None).tolist() == []


def test_exact_inputs_and_their_weights_are_not_quantized() -> None:
    weight, x = torch.randn(96, 768), torch.randn(8, 768)
    inputs = torch.tensor([3, 700])
    others = torch.ones(768).index_fill(0, inputs, 0)
    linear = DenseInt8Linear(weight, None, exact_inputs=inputs)
    rest = linear(x * others)
    assert torch.equal(rest, DenseInt8Linear(weight * others, None)(x * others))
    assert torch.equal(linear(x), rest + x[:, 3:4] * weight[:, 3] + x[:, 700:701] * weight[:, 700])


def test_products_of_the_residual_stream_do_not_quantize_its_large_channels() -> None:
    weight, x = torch.randn(96, 64), torch.zeros(2, 64)
    x[:, 3] = torch.randn(2)
    of_stream = ("blocks.9.qkv", "blocks.9.ffn_up", "head")
    for name in (*of_stream, "blocks.9.ffn_down"):
        linears = Linears("int8", num_layers=12)
        linears.begin(torch.ones(5, 64).index_fill(1, torch.tensor([3]), 100.0), None)
        source = StreamedTensors(iter([(f"{name}.weight", weight)]), linears)
        assert torch.equal(take_linear(source, name, bias=False)(x), x @ weight.T) == (name in of_stream)


@pytest.mark.parametrize("fastest", native.VARIANTS[8])
def test_int10_is_fast_but_by_amx_and_by_any_cpus_instructions(
    fastest: native.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "is_available", lambda: True)
    monkeypatch.setattr(native, "supported_variants", lambda bits: ("generic", fastest))
    assert native.has_fast_int10() == (fastest not in ("generic", "amx"))
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert not native.has_fast_int10()


@pytest.mark.parametrize("has_int10", [False, True])
def test_the_weights_of_the_first_layers_are_in_int10_or_keep_their_dtype(
    has_int10: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_int10 and not native.is_available():
        pytest.skip("the library is not built")
    monkeypatch.setattr(native, "has_fast_int10", lambda: has_int10)
    weight, x = torch.randn(96, 640), torch.randn(2, 640)
    relative = list[float]()
    for layer in (2, 3):
        name = f"blocks.{layer}.ffn_down"
        source = StreamedTensors(iter([(f"{name}.weight", weight)]), Linears("int8", num_layers=12))
        y = take_linear(source, name, bias=False)(x)
        relative.append(float((y - x @ weight.T).norm() / y.norm()))
    assert relative[0] < 0.003
    assert (relative[0] > 1e-5) == has_int10
    assert 0.004 < relative[1] < 0.02


@pytest.mark.parametrize("num_in", [1, 31, 65])
def test_exact_products_are_those_of_fp32(num_in: int) -> None:
    x, weight = torch.randn(5, num_in), torch.randn(3, num_in)
    torch.testing.assert_close(exact_product(x, weight), x @ weight.T, atol=1e-5, rtol=1e-5)


def test_int8_is_near_the_product() -> None:
    weight, bias, x, residual = torch.randn(96, 768), torch.randn(96), torch.randn(8, 768), torch.randn(8, 96)
    for w, rows in ((weight, x), (with_outliers(weight), x), (weight, with_outliers(x))):
        exact = rows @ w.T
        y = DenseInt8Linear(w, None)(rows)
        assert (y - exact).norm() < 0.015 * exact.norm()
    linear = DenseInt8Linear(weight, bias, "relu")
    expected = (DenseInt8Linear(weight, None)(x) + bias).relu() + residual
    assert torch.equal(linear(x, residual), expected)


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_in", "num_out"), ODD_SIZES)
def test_the_kernel_has_the_bits_of_the_definition(kind: Kind, dtype: torch.dtype, num_in: int, num_out: int) -> None:
    weight = with_large_outputs(with_outliers(torch.randn(num_out, num_in))).to(dtype)
    weight[num_out // 2] = 0
    bias, residual = torch.randn(num_out).to(dtype), torch.randn(40, num_out).to(dtype)
    x, inputs = rows_of_all_kinds(num_in, dtype), torch.arange(0, num_in, 100)
    for activation, exact_inputs in ((None, None), (None, inputs), ("relu", inputs)):
        for out_dtype in (dtype, torch.float32):
            options: tuple[Any, ...] = (weight, bias, activation, out_dtype)
            y = kind.native(*options, kind.variant, exact_inputs)
            expected = kind.dense(*options, exact_inputs)
            assert_same(y(x), expected(x))
            assert_same(y(x, residual), expected(x, residual))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_the_kernel_has_the_bits_of_the_definition_whatever_the_shape(kind: Kind, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    num_in, num_out, num_rows = draw.randint(1, 3000), draw.randint(1, 700), draw.randint(1, 100)
    dtype = draw.choice(DTYPES)
    x = (torch.randn(num_rows, num_in) * torch.randn(num_in).exp() ** draw.choice((0, 1, 3))).to(dtype)
    weight = (torch.randn(num_out, num_in) * torch.randn(num_in).exp() ** draw.choice((0, 1, 3))).to(dtype)
    weight *= torch.randn(num_out, 1).exp() ** draw.choice((0, 1))
    native.set_num_threads(draw.randint(1, 4))
    inputs = torch.tensor(sorted(draw.sample(range(num_in), min(num_in, draw.randint(0, 9)))), dtype=torch.int64)
    y = kind.native(weight, None, None, torch.float32, kind.variant, inputs)(x)
    assert torch.equal(y, kind.dense(weight, None, None, torch.float32, inputs)(x))


@pytest.mark.some(24)
@pytest.mark.parametrize("activation", native.ACTIVATIONS)
def test_the_kernel_activates(kind: Kind, activation: Activation | None) -> None:
    weight, bias, x = torch.randn(70, 96), torch.randn(70), torch.randn(40, 96)
    expected = kind.dense(weight, bias, activation)(x)
    y = kind.native(weight, bias, activation, variant=kind.variant)(x)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.some(6)
@of_both
@pytest.mark.parametrize("activation", native.ACTIVATIONS)
def test_all_variants_give_the_same_bits(activation: Activation | None, bits: int) -> None:
    """Any CPU's sums and scales, too; its activations differ where they fuse products and sums."""
    supported = native.supported_variants(bits) or pytest.skip("no variant is built")
    product = NativeInt8Linear if bits == 8 else NativeInt10Linear
    is_fused = activation not in (None, "relu", "relu2")
    first, *others = [variant for variant in supported if not (is_fused and variant == "generic")] or supported
    if not others:
        pytest.skip("this CPU has one variant")
    for dtype in DTYPES:
        weight = with_large_outputs(with_outliers(torch.randn(300, 257))).to(dtype)
        x, residual = rows_of_all_kinds(257, dtype), torch.randn(40, 300).to(dtype)
        options: tuple[Any, ...] = (weight, torch.randn(300), activation, torch.float32)
        expected = product(*options, first)(x, residual).view(torch.int32)
        for variant in others:
            linear = product(*options, variant)
            for num_rows in (*range(1, 20), 40):
                y = linear(x[:num_rows], residual[:num_rows]).view(torch.int32)
                assert torch.equal(y, expected[:num_rows]), (variant, num_rows)


@pytest.mark.some(14)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_never_becomes_a_number(kind: Kind, dtype: torch.dtype, bad: float) -> None:
    """Neither in a row of x nor in a weight, and it stays in its row."""
    weight, x = torch.randn(40, 100).to(dtype), torch.randn(20, 100).to(dtype)
    weight[2] *= 20
    before = kind.native(weight, None, variant=kind.variant)(x)
    spoilt = x.clone()
    spoilt[3, 99] = bad
    others = torch.arange(20) != 3
    inputs = torch.tensor([1, 99])
    for linear in (
        kind.native(weight, None, variant=kind.variant, exact_inputs=inputs),
        kind.dense(weight, None, exact_inputs=inputs),
    ):
        assert linear(spoilt)[3].isnan().all()
    for linear in (kind.native(weight, None, variant=kind.variant), kind.dense(weight, None)):
        assert linear(spoilt)[3].isnan().all()
        assert torch.equal(linear(spoilt)[others], before[others])
    weight[7, 5] = bad
    for linear in (kind.native(weight, None, variant=kind.variant), kind.dense(weight, None)):
        assert linear(x)[:, 7].isnan().all()
        assert linear(x)[:, 8:].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed else ()) for seed in range(10)])
def test_a_row_of_the_kernel_has_the_same_bits_among_any_others(kind: Kind, seed: int) -> None:
    draw = random.Random(seed)
    num_in, num_out = draw.choice([7, 64, 300, 768, 3072]), draw.choice([5, 96, 250, 1000])
    weight, activation = with_large_outputs(torch.randn(num_out, num_in)), draw.choice(native.ACTIVATIONS)
    inputs = torch.arange(0, num_in, 150)
    linear = kind.native(weight.bfloat16(), torch.randn(num_out), activation, None, kind.variant, inputs)
    x, residual = with_outliers(torch.randn(300, num_in)).bfloat16(), torch.randn(300, num_out).bfloat16()
    plain, added = linear(x), linear(x, residual)
    for num_threads in (1, 2, 3, 7):
        native.set_num_threads(num_threads)
        for num_rows in (1, 2, *draw.sample(range(3, 300), 10), 300):
            assert torch.equal(linear(x[:num_rows]), plain[:num_rows]), num_rows
            some = torch.tensor(draw.sample(range(300), num_rows))
            assert torch.equal(linear(x[some], residual[some]), added[some]), num_rows
    assert linear(x[:0]).shape == (0, num_out)


def test_the_largest_sums_fit(kind: Kind) -> None:
    weight, x = torch.ones(3, native.MAX_INT8_DEPTH), torch.ones(2, native.MAX_INT8_DEPTH)
    x[1] *= -1
    expected = torch.tensor([[1.0], [-1.0]]).expand(2, 3) * native.MAX_INT8_DEPTH
    torch.testing.assert_close(kind.native(weight, None, variant=kind.variant)(x), expected, atol=0, rtol=0.01)


def test_without_the_kernel_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(40, 64), torch.randn(3, 64)
    best = make_linear(Affine(weight), "int8")
    name = build_of(product_of(CPU, torch.float32, "int8"), torch.float32)
    monkeypatch.setattr(native, "is_available", lambda: False)
    slow = make_linear(Affine(weight), "int8")
    assert isinstance(slow, DenseInt8Linear)
    assert torch.equal(slow(x), best(x))
    assert build_of(product_of(CPU, torch.float32, "int8"), torch.float32) == "torch_int8"
    assert (name == "torch_int8") == isinstance(best, DenseInt8Linear)


def test_int10_has_far_smaller_errors_than_int8() -> None:
    weight, x = with_outliers(torch.randn(96, 768)), with_outliers(torch.randn(8, 768))
    exact = x @ weight.T
    errors = [(dense(weight, None)(x) - exact).norm() for dense in (DenseInt8Linear, DenseInt10Linear)]
    assert errors[1] < errors[0] / 3


@pytest.mark.some(15)
@pytest.mark.parametrize("num_in", [2047, 2048, 2049, 4100, 9000])
def test_long_rows_in_int10_are_summed_in_segments(kind: Kind, num_in: int) -> None:
    if kind.bits == 8:
        pytest.skip("int8 sums a row at once")
    weight, x = torch.randn(40, num_in), with_outliers(torch.randn(11, num_in))
    assert torch.equal(kind.native(weight, None, variant=kind.variant)(x), DenseInt10Linear(weight, None)(x))


def test_the_largest_sums_of_a_segment_fit(kind: Kind) -> None:
    """As many outliers as there may be, the largest there may be, in one segment, of one sign."""
    x = torch.full((3, native.MAX_INT8_DEPTH // 2), 1.1249)  # a row's bound is 1.125
    x[1:, : int10.MAX_FAR] = 32 * 1.1249
    x[2] *= -1
    weight = torch.ones(5, x.shape[1])
    if kind.bits == 10:
        whole = int10.quantize_rows(x)[0]
        largest = whole[:, : int10.SEGMENT].abs().sum(1).max() * 511
        assert 0.98 * 2**31 < largest < 2**31
    assert torch.equal(kind.native(weight, None, variant=kind.variant)(x), kind.dense(weight, None)(x))
