"""Weights that become codes while they load: how they are rounded, and products with them."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from gptserve.engine.backends.cpu import int4, native
from gptserve.engine.backends.cpu.int4 import NativeInt4Linear
from gptserve.engine.backends.cpu.linear import NativeCodedLinear
from gptserve.weights.quantized.coded import GROUP, CodeFormat
from tests.engine.backends.cpu.coded import product
from tests.engine.backends.cpu.rounding import quantize_groups

FORMATS = [CodeFormat(bits, kind) for bits in (4, 8) for kind in ("scales", "scales and leasts")]
LEASTS = [CodeFormat(bits, "scales and leasts", sub) for bits in (4, 5) for sub in (0, 32)]
FORMATS += [*(its for its in LEASTS if its not in FORMATS), CodeFormat(6, "scales", 16)]
of_all = pytest.mark.parametrize("its", FORMATS, ids=lambda its: f"{its.bits}-{its.kind}-{its.sub_group}")
needs_library = pytest.mark.skipif(not native.is_available(), reason="the compiled library is missing")


@of_all
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_weight_is_the_nearest_that_its_group_has(its: CodeFormat, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(40, 256) * torch.logspace(-3, 1, 40)[:, None] + 0.1).to(dtype)
    coded = quantize_groups(weight, its)
    assert (coded.format, coded.dtype, coded.shape) == (its, dtype, (40, 256))
    values, codes = coded.values(slice(0, 40)), coded.codes.int()
    errors = []
    for by in (-1, 0, 1):
        moved = replace(coded, codes=(codes + by).clamp(0, (1 << its.bits) - 1).to(torch.uint8))
        errors.append((moved.values(slice(0, 40)) - weight.float()).abs())
    # No code beside it is nearer, but for the rounding of what both are measured by.
    slack = 1e-3 * values.view(40, 8, GROUP).abs().amax(2, keepdim=True).expand(-1, -1, GROUP).flatten(1)
    assert (errors[1] <= torch.minimum(errors[0], errors[2]) + slack).all()
    relative = (errors[1] / weight.float().view(40, 8, GROUP).abs().amax(2).repeat_interleave(GROUP, 1)).amax()
    assert relative < (0.01 if its.bits == 8 else 0.15)


@of_all
def test_groups_of_zeros_small_large_and_no_numbers(its: CodeFormat) -> None:
    weight = torch.ones(5, 512)
    weight[0, :32], weight[1], weight[2], weight[3, 300], weight[4, 1] = 0, 1e-12, 1e30, torch.inf, torch.nan
    coded = quantize_groups(weight, its)
    values = coded.values(slice(0, 5))
    assert (values[0, :32] == 0).all()
    assert (values[1].abs() < 1e-7).all()
    assert values[2].isfinite().all()
    assert values[3, 288:320].isnan().all()
    assert values[4, :32].isnan().all()
    assert (values[[0, 3, 4], [300, 0, 256]] - 1).abs().max() < 2**-9


@of_all
def test_weights_too_close_for_a_scale_are_nearly_zeros(its: CodeFormat) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 256) * torch.logspace(-7, -4, 8)[:, None]
    values = quantize_groups(weight, its).values(slice(0, 8))
    assert (((values - weight).norm(dim=1) / weight.norm(dim=1)) < 1.001).all()


def some_weights(num_rows: int, width: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and squares of inputs, some of which are no numbers, equal, tiny, huge or zero."""
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(num_rows, width, generator=generator) * torch.logspace(-4, 2, num_rows)[:, None] + 0.03
    weight[0, :32], weight[1], weight[2, 40], weight[3, 64:96], weight[4, :300] = 0.5, 1e-12, 1e30, 0, 1e-33
    weight[5, 7] = torch.nan
    squares = torch.rand(width, generator=generator) ** 6
    squares[96:128], squares[130:140] = 0, 0
    return weight, squares


def packed(linear: NativeCodedLinear) -> bytes:
    """Return what a linear of one part holds."""
    (part,), its = linear.weight.parts[:1], linear.weight
    size = native.library().native_grouped_size(its.num_in, its.num_out, part.format)
    return ctypes.string_at(part.weight, size)


@needs_library
@of_all
@pytest.mark.parametrize("variant", native.supported_variants(native.CODED_VARIANTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_packed_is_bit_for_bit_what_a_slow_twin_finds(
    its: CodeFormat, variant: native.Variant, dtype: torch.dtype
) -> None:
    for num_rows, width in ((8, 512), (49, 256), (32, 768 if its.sub_group else 96)):
        weight, squares = some_weights(num_rows, width)
        for known in (None, squares, torch.zeros(width), torch.where(squares > 0.5, torch.inf, squares)):
            found = NativeInt4Linear(weight.to(dtype), its, None, variant=variant, squares=known)
            twin = quantize_groups(weight.to(dtype), its, known)
            assert packed(found) == packed(NativeCodedLinear(twin, None))


@of_all
def test_products_have_far_smaller_errors_where_inputs_are_known(its: CodeFormat) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 512), torch.randn(256, 512) * torch.rand(512) ** 3
    squares, exact = x.square().mean(0), x @ weight.T
    errors = [
        (x @ quantize_groups(weight, its, known).values(slice(0, 64)).T - exact).norm()
        for known in (None, torch.zeros(512), squares)
    ]
    assert errors[1] < (0.99 if its in LEASTS else 1) * errors[0]
    assert errors[2] < 0.9 * errors[1]


@needs_library
@of_all
@pytest.mark.parametrize("num_out", [1, 33, 200])
def test_products_are_those_with_the_codes(its: CodeFormat, num_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4, "_PIECE_ELEMENTS", 64 * 256)  # pieces of 64 rows
    torch.manual_seed(num_out)
    weight, bias, x = torch.randn(num_out, 256), torch.randn(num_out), torch.randn(7, 256)
    for squares in (None, torch.rand(256)):
        y = NativeInt4Linear(weight, its, bias, "relu", squares=squares)(x)
        assert torch.equal(y, (product(x, quantize_groups(weight, its, squares)) + bias).relu())
