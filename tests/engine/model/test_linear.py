"""The packed linears against torch's, and their rows' independence of the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.linear import NativeLinear, PackedLinear, PackedRows
from gptserve.engine.model.activation import activate
from gptserve.engine.model.linear import Affine, DenseLinear, with_aligned_rows
from gptserve.engine.runner.products import build_of, make_linear, product_of
from gptserve.weights.config import Activation
from tests.engine.backends.cpu import onednn

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
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


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", onednn.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(768, 2304), (3072, 768), (640, 96)])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = torch.randn(shape[1], shape[0], dtype=dtype), torch.randn(shape[1], dtype=dtype)
    linear = PackedLinear(weight, bias)
    x, residual = torch.randn(64, shape[0], dtype=dtype), torch.randn(64, shape[1], dtype=dtype)
    plain, added = linear(x), linear(x, residual)
    for start, end in pairwise((0, 1, 2, 4, 7, 12, 28, 63, 64)):
        assert torch.equal(linear(x[start:end]), plain[start:end])
        assert torch.equal(linear(x[start:end], residual[start:end]), added[start:end])
    order = torch.randperm(64)
    assert torch.equal(linear(x[order]), plain[order])


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN may sum a single row in the same order here"
)
def test_a_single_row_would_have_other_bits_in_a_call_of_its_own() -> None:
    """Why the test above can fail: in fp32, where no rounding of the result hides the order."""
    linear, x = PackedLinear(torch.randn(768, 3072), None), torch.randn(64, 3072)
    alone = torch.cat([linear._multiply(row[None], None) for row in x])
    assert not torch.equal(alone, linear(x))


def test_sums_in_another_order_are_seen_by_the_comparison() -> None:
    """The negative control of the test above, in fp32, where no rounding of the result hides the order."""
    weight, bias, x = torch.randn(96, 640), torch.randn(96), torch.randn(64, 640)
    plain, mixed = PackedLinear(weight, bias)(x), torch.randperm(640)
    other = PackedLinear(weight[:, mixed], bias)(x[:, mixed])
    torch.testing.assert_close(other, plain, atol=1e-3, rtol=1e-3)
    assert not torch.equal(other, plain)


def test_the_cpu_gets_our_own_linear_if_it_is_built() -> None:
    for dtype in DTYPES:
        expected = NativeLinear if native.is_available() else PackedLinear
        assert isinstance(make_linear(Affine(torch.randn(8, 8, dtype=dtype))), expected)
    assert isinstance(make_linear(Affine(torch.randn(8, 8).half())), DenseLinear)


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without a compiler."""
    monkeypatch.setattr(native, "is_available", lambda: False)


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("dtype", onednn.DTYPES, ids=str)
def test_without_the_library_onednn_multiplies(dtype: torch.dtype) -> None:
    assert isinstance(make_linear(Affine(torch.randn(8, 8, dtype=dtype))), PackedLinear)
    assert build_of(product_of(CPU, dtype), dtype) == "onednn"


@onednn.needs_bf16
@pytest.mark.parametrize("num_rows", [1, 2, 32, 33, 65, 100])
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
    assert sum(calls) == 2 * max(2, num_rows)
    assert all(2 <= rows <= 32 for rows in calls)


@dataclass(frozen=True)
class Kind:
    """Our products of one dtype by one variant."""

    dtype: torch.dtype
    variant: native.Variant

    def rows(self, *shape: int) -> Tensor:
        return torch.randn(*shape).to(self.dtype)

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: Activation | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> NativeLinear:
        return NativeLinear(weight, bias, activation, out_dtype, self.variant)


@pytest.fixture(
    params=[Kind(dtype, variant) for dtype in DTYPES for variant in native.VARIANTS[8 * dtype.itemsize]],
    ids=lambda kind: f"{kind.dtype} {kind.variant}",
)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    found: Kind = request.param
    if found.variant not in native.supported_variants(8 * found.dtype.itemsize):
        pytest.skip(f"{found.variant} is not built, or this CPU has none")
    yield found
    native.set_num_threads(1)


needs_avx512 = pytest.mark.skipif(
    "avx512" not in native.supported_variants(16), reason="no AVX-512 here, or the library is not built"
)

ODD_SIZES = [(1, 1), (2, 3), (31, 16), (33, 17), (96, 32), (100, 33), (64, 95), (257, 300)]
"""(in, out) around the multiples that the layout pads to."""


@pytest.mark.some(43)
@pytest.mark.parametrize(("num_in", "num_out"), ODD_SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_native_is_the_product_rounded_once(kind: Kind, num_in: int, num_out: int, bias: bool) -> None:
    weight, x, residual = kind.rows(num_out, num_in), kind.rows(21, num_in), kind.rows(21, num_out)
    b = kind.rows(num_out) if bias else None
    wide = kind.linear(weight, b, out_dtype=torch.float32)
    exact = DenseLinear(weight.double(), b.double() if b is not None else None)(x.double(), residual.double())
    torch.testing.assert_close(wide(x, residual).double(), exact, atol=num_in * 2e-6, rtol=1e-6)

    narrow = kind.linear(weight, b)
    assert narrow(x, residual).dtype is kind.dtype
    assert torch.equal(narrow(x, residual), wide(x, residual).to(kind.dtype))
    assert torch.equal(narrow(x), wide(x).to(kind.dtype))
    assert torch.equal(wide(x, residual.float()), wide(x, residual))
    added = torch.randn(residual.shape)  # in fp32
    torch.testing.assert_close(
        wide(x, added).double(), exact - residual.double() + added, atol=num_in * 2e-6, rtol=1e-6
    )
    for few in range(1, 7):  # each number of rows has a loop of its own
        assert torch.equal(wide(x[:few], residual[:few]), wide(x, residual)[:few])


@pytest.mark.some(19)
@pytest.mark.parametrize("activation", native.ACTIVATIONS[1:])
def test_native_activates_as_torch_does_in_fp64(kind: Kind, activation: Activation) -> None:
    x = torch.cat([torch.linspace(-20, 20, 32 * 500), torch.logspace(-30, 2, 32 * 20), torch.zeros(32)])
    x = x.view(-1, 32).to(kind.dtype)
    y = kind.linear(torch.eye(32).to(kind.dtype), None, activation, torch.float32)(x)
    torch.testing.assert_close(y.double(), activate(x.double(), activation), atol=1e-7, rtol=2e-6)


@pytest.mark.some(22)
@pytest.mark.parametrize("activation", native.ACTIVATIONS)
def test_native_equals_dense(kind: Kind, activation: Activation | None) -> None:
    weight, bias, x, residual = kind.rows(70, 96), kind.rows(70), kind.rows(40, 96), kind.rows(40, 70)
    kept = residual.clone()
    expected = DenseLinear(weight.float(), bias.float(), activation)(x.float(), residual.float()).to(kind.dtype)
    y = kind.linear(weight, bias, activation)(x, residual)
    if kind.dtype is torch.float32:
        torch.testing.assert_close(y, expected, atol=2e-4, rtol=1e-5)
    else:  # where fp32 differs at a border: one step of bf16
        torch.testing.assert_close(y, expected, atol=2e-4, rtol=2**-7)
        assert (y != expected).float().mean() < 0.02
    assert torch.equal(residual, kept)


@needs_avx512
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_avx2_and_avx512_compute_the_same_bits(dtype: torch.dtype) -> None:
    by_avx2, by_avx512 = Kind(dtype, "avx2"), Kind(dtype, "avx512")
    for activation in native.ACTIVATIONS:
        for num_in, num_out in ODD_SIZES:
            weight, bias = by_avx2.rows(num_out, num_in), by_avx2.rows(num_out)
            x, residual = by_avx2.rows(21, num_in), by_avx2.rows(21, num_out)
            for out_dtype in {torch.float32, dtype}:
                one, other = (k.linear(weight, bias, activation, out_dtype) for k in (by_avx2, by_avx512))
                for num_rows in range(1, 22):
                    arguments = x[:num_rows], residual[:num_rows]
                    assert torch.equal(one(*arguments), other(*arguments)), (activation, num_in, num_rows)


@needs_avx512
@pytest.mark.parametrize("activation", native.ACTIVATIONS)
def test_avx2_and_avx512_activate_every_number_of_bf16_alike(activation: Activation | None) -> None:
    x = torch.zeros(2**16, 32).bfloat16()
    x[:, 0] = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    kinds = Kind(torch.bfloat16, "avx2"), Kind(torch.bfloat16, "avx512")
    by_avx2, by_avx512 = (kind.linear(torch.eye(32).bfloat16(), None, activation, torch.float32)(x) for kind in kinds)
    # Which of two operands that are not a number goes on, is up to the compiler, who may swap them.
    assert torch.equal(by_avx2.isnan(), by_avx512.isnan())
    by_avx2, by_avx512 = (y.nan_to_num(0.0, torch.inf, -torch.inf) for y in (by_avx2, by_avx512))
    assert torch.equal(by_avx2.view(torch.int32), by_avx512.view(torch.int32))


def test_not_a_number_stays_in_its_row(kind: Kind) -> None:
    for activation in native.ACTIVATIONS:
        linear, x = kind.linear(kind.rows(40, 64), None, activation), kind.rows(20, 64)
        x[3, 5] = torch.nan
        is_nan = linear(x).isnan()
        assert is_nan[3].all()
        assert is_nan.sum() == 40


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_row_of_native_has_the_same_bits_among_any_others(kind: Kind, seed: int) -> None:
    draw = random.Random(seed)
    num_in, num_out = draw.choice([7, 64, 300, 768, 3072]), draw.choice([5, 96, 250, 1000])
    linear = kind.linear(kind.rows(num_out, num_in), kind.rows(num_out), draw.choice(native.ACTIVATIONS))
    x, residual = kind.rows(300, num_in), kind.rows(300, num_out)
    native.set_num_threads(1)
    plain, added = linear(x), linear(x, residual)
    for num_threads in (1, 2, 3, 7):
        native.set_num_threads(num_threads)
        for num_rows in (1, 2, *draw.sample(range(3, 300), 20 if seed else 8), 300):
            assert torch.equal(linear(x[:num_rows]), plain[:num_rows]), num_rows
            some = torch.tensor(draw.sample(range(300), num_rows))
            assert torch.equal(linear(x[some], residual[some]), added[some]), num_rows


@pytest.mark.slow
@pytest.mark.parametrize(("num_in", "num_out"), [(768, 96), (1100, 64)])
def test_a_row_of_native_has_the_same_bits_in_every_number_of_rows(kind: Kind, num_in: int, num_out: int) -> None:
    linear, x = kind.linear(kind.rows(num_out, num_in), kind.rows(num_out)), kind.rows(300, num_in)
    whole = linear(x)
    for num_rows in range(1, 301):
        assert torch.equal(linear(x[:num_rows]), whole[:num_rows])
        assert torch.equal(linear(x[-num_rows:]), whole[-num_rows:])


def test_native_sums_in_another_order_are_seen_by_the_comparison(kind: Kind) -> None:
    """The negative control of the tests above, without the rounding that hides the order."""
    weight, x, mixed = kind.rows(96, 640), kind.rows(64, 640), torch.randperm(640)
    plain = kind.linear(weight, out_dtype=torch.float32)(x)
    other = kind.linear(weight[:, mixed], out_dtype=torch.float32)(x[:, mixed])
    torch.testing.assert_close(other, plain, atol=1e-3, rtol=1e-3)
    assert not torch.equal(other, plain)


def test_long_sums_in_fp32_round_off_little(kind: Kind) -> None:
    """As pieces are summed from 0: one sum of all products would be off by 1.2e-6."""
    if kind.dtype is not torch.float32:
        pytest.skip("rows in bf16 may be summed otherwise")
    weight, x = torch.rand(64, 8192), torch.rand(24, 8192)
    exact = x.double() @ weight.double().T
    error = (kind.linear(weight)(x) / exact - 1).square().mean().sqrt()
    assert error < 4e-7


def test_one_changed_element_changes_its_row_and_no_other(kind: Kind) -> None:
    linear, x = kind.linear(kind.rows(48, 768)), kind.rows(40, 768)
    before = linear(x)
    x[33, 700] += 4
    assert (linear(x) != before).any(1).nonzero().tolist() == [[33]]


def test_native_refuses_what_is_not_laid_out_as_it_reads(kind: Kind) -> None:
    linear, x = kind.linear(kind.rows(8, 64)), kind.rows(4, 64)
    for wrong in (kind.rows(4, 128)[:, ::2], x.half(), kind.rows(4, 32), kind.rows(64)):
        with pytest.raises(AssertionError):
            linear(wrong)
    for wrong in (kind.rows(8, 4).T, kind.rows(4, 9), kind.rows(4, 8).half(), kind.rows(1, 8)):
        with pytest.raises(AssertionError):
            linear(x, wrong)
    assert linear(x[:0]).shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_fingerprint_knows_the_variant(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if len(supported := native.supported_variants(8 * dtype.itemsize)) < 2:
        pytest.skip("this CPU has one variant")
    *_, other, fastest = supported
    assert build_of(product_of(CPU, dtype), dtype).startswith(f"native {fastest} ")
    monkeypatch.setattr(native, "supported_variants", lambda element_bits: (other,))
    assert build_of(product_of(CPU, dtype), dtype).startswith(f"native {other} ")


@pytest.mark.skipif(not native.is_available(), reason="the library is not built")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_in", [1, 2, 3, 31, 32, 33, 96, 200])
def test_rows_of_a_packed_weight_have_its_bits(num_in: int, dtype: torch.dtype) -> None:
    integers = torch.int32 if dtype is torch.float32 else torch.int16
    limits = torch.iinfo(integers)
    bits = torch.randint(limits.min, limits.max, (70, num_in), dtype=integers)  # numbers that are not finite, too
    rows = PackedRows(NativeLinear(bits.view(dtype), None))

    for numbers in ([], [0], [69, 0, 31, 32, 63, 64, 31], list(range(70))):
        numbers_R = torch.tensor(numbers, dtype=torch.int64)
        assert rows[numbers_R].dtype is rows.dtype is dtype
        assert torch.equal(rows[numbers_R].view(integers), bits[numbers_R])
    assert torch.equal(rows[torch.arange(70)[::3]].view(integers), bits[::3])


def test_a_weight_with_fp32_results_gets_rows_of_zeros_that_nobody_sees() -> None:
    weight = torch.randn(13, 4, dtype=torch.bfloat16)
    aligned = with_aligned_rows(weight)
    assert torch.equal(aligned[:13], weight)
    assert torch.equal(aligned[13:], torch.zeros(3, 4, dtype=torch.bfloat16))
    assert with_aligned_rows(aligned) is aligned
    head = DenseLinear(weight.to("meta"), None, out_dtype=torch.float32)
    assert head.copied_rows is not None
    assert head.copied_rows.shape == (13, 4)
    logits = head(torch.empty(2, 4, dtype=torch.bfloat16, device="meta"))
    assert (logits.shape, logits.stride(), logits.dtype) == ((2, 13), (16, 1), torch.float32)


@pytest.mark.parametrize(("num_rows", "device"), [(13, "cpu"), (16, "meta")])
def test_a_weight_that_needs_no_rows_of_zeros_is_not_copied(num_rows: int, device: str) -> None:
    weight = torch.empty(num_rows, 4, dtype=torch.bfloat16, device=device)
    assert DenseLinear(weight, None, out_dtype=torch.float32).copied_rows is None
