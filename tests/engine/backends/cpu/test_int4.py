"""Weights that become codes while they load: how they are rounded, products with them, and rows of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gptserve.engine.backends.cpu import int4, native
from gptserve.engine.backends.cpu.int4 import NativeInt4Linear, RowsOfCodes, quantize_groups
from gptserve.engine.backends.cpu.program import Program, Table
from gptserve.weights.quantized.coded import GROUP, CodeFormat
from tests.engine.backends.cpu.coded import product

FORMATS = [CodeFormat(bits, kind) for bits in (4, 8) for kind in ("scales", "scales and leasts")]
LEASTS = [CodeFormat(bits, "scales and leasts", sub) for bits in (4, 5) for sub in (0, 32)]
FORMATS += [its for its in LEASTS if its not in FORMATS]
of_all = pytest.mark.parametrize("its", FORMATS, ids=lambda its: f"{its.bits}-{its.kind}-{its.sub_group}")
with_leasts = pytest.mark.parametrize("its", LEASTS, ids=lambda its: f"{its.bits}-{its.sub_group}")
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


def sum_of(values: np.ndarray) -> np.float32:
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return np.float32(values[0])


def fitted(group: np.ndarray, weights: np.ndarray, most: int) -> tuple[np.float32, np.float32]:
    """Return the scale and the least value of one group: the slow twin of what quantize_groups seeks."""
    one, tiny = np.float32(1), np.float32(1e-30)
    lowest = group.min()
    above, span = group - lowest, group.max() - lowest
    scale, least = span / np.float32(most + 1), span / np.float32(2 * most + 2)
    sum_w, sum_x = sum_of(weights), sum_of(weights * above)
    for _ in range(2):
        inverse = one / scale if scale > tiny else np.float32(0)
        codes = np.clip(np.round((above - least) * inverse), 0, most)
        q, qq, qx = sum_of(codes * weights), sum_of(codes * weights * codes), sum_of(codes * weights * above)
        spread = sum_w * qq - q * q
        if spread > tiny:
            scale, least = max((sum_w * qx - q * sum_x) / spread, np.float32(0)), (qq * sum_x - q * qx) / spread
    return scale, lowest + least


def rescaled(group: np.ndarray, weights: np.ndarray, most: int, scale: np.float32, least: np.float32) -> np.float32:
    """Return the scale that goes with a least value which was rounded."""
    above, tiny = group - least, np.float32(1e-30)
    codes = np.clip(np.round(above * (np.float32(1) / scale if scale > tiny else np.float32(0))), 0, most)
    qq, qx = sum_of(codes * weights * codes), sum_of(codes * weights * above)
    return max(qx / qq, np.float32(0)) if qq > tiny else scale


def rounded(numbers: list[np.float32], its: CodeFormat) -> list[np.float32]:
    """Return numbers of consecutive groups as they are stored: in fp16, or integers times one number in fp16."""
    if not its.sub_group:
        return [np.float32(np.float16(np.clip(its_own, -65504, 65504))) for its_own in numbers]
    found = []
    for start in range(0, len(numbers), 8):
        supers = numbers[start : start + 8]
        unit = np.float32(np.float16(np.clip(max(map(abs, supers)) / np.float32(127), -65504, 65504)))
        found += [np.clip(np.round(n / (unit if unit > 0 else np.float32(1))), -127, 127) * unit for n in supers]
    return found


@with_leasts
@np.errstate(all="ignore")
def test_what_is_sought_is_bit_for_bit_what_a_slow_twin_finds(its: CodeFormat) -> None:
    weight, squares = some_weights(8)
    coded, most = quantize_groups(weight, its, squares), (1 << its.bits) - 1
    values = coded.values(slice(0, 8)).view(8, -1, GROUP)
    inputs = (squares / squares.mean() + 0.03).view(-1, GROUP).numpy()
    for row in range(8):
        groups = weight[row].view(-1, GROUP)
        finite = groups.isfinite().all(1)
        limit = 2.0 * most * 65504
        exact = [(g if is_finite else g * 0).nan_to_num().numpy() for g, is_finite in zip(groups, finite, strict=True)]
        near = [np.clip(g, -limit, limit).astype(np.float32) for g in exact]
        fits = [fitted(g, w, most) for g, w in zip(near, inputs, strict=True)]
        leasts = rounded([least for _, least in fits], its)
        terms = zip(near, inputs, fits, leasts, strict=True)
        scales = rounded([rescaled(g, w, most, fit[0], least) for g, w, fit, least in terms], its)
        for i, (g, scale, least) in enumerate(zip(exact, scales, leasts, strict=True)):
            its_least = np.float32(0) if scale == 0 and g.max() > g.min() else least
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            codes = np.clip(np.round((g - its_least) * inverse), 0, most)
            is_finite = finite.view(-1, 8).all(1)[i // 8] if its.sub_group else finite[i]
            expected = torch.from_numpy(codes * scale + its_least) if is_finite else torch.full((GROUP,), torch.nan)
            assert torch.equal(values[row, i].nan_to_num(7e9), expected.nan_to_num(7e9)), (row, i)


@with_leasts
def test_products_have_far_smaller_errors_where_inputs_are_known(its: CodeFormat) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 512), torch.randn(256, 512) * torch.rand(512) ** 3
    squares, exact = x.square().mean(0), x @ weight.T
    errors = [
        (x @ quantize_groups(weight, its, known).values(slice(0, 64)).T - exact).norm()
        for known in (None, torch.zeros(512), squares)
    ]
    assert errors[1] < 0.99 * errors[0]
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


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [32, 96, 576])
def test_rows_are_those_of_the_codes(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    weight = torch.randn(70, width).to(dtype)
    weight[:, 1::7] *= 1e-6  # subnormal scales
    weight[40, :32] *= 1e-6
    linear = NativeInt4Linear(weight, RowsOfCodes.FORMAT, None)
    rows = linear.rows
    assert rows is not None
    assert (rows.dtype, rows.device) == (dtype, torch.device("cpu"))
    numbers = torch.tensor([0, 69, 31, 32, 40, 31])
    expected = quantize_groups(weight, RowsOfCodes.FORMAT).values(slice(0, 70)).to(dtype)
    assert torch.equal(rows[numbers], expected[numbers])
    assert NativeInt4Linear(weight, CodeFormat(4, "scales"), None).rows is None


@pytest.mark.parametrize("wide", [(), ("out",)])
@pytest.mark.parametrize(
    ("dtype", "variant"),
    [
        (dtype, its)
        for dtype in (torch.float32, torch.bfloat16)
        for its in native.supported_variants(8 * dtype.itemsize)
    ],
)
def test_a_program_embeds_by_codes_as_by_a_plain_table(
    dtype: torch.dtype, variant: native.Variant, wide: tuple[str, ...]
) -> None:
    linear, token_ids = (
        NativeInt4Linear(torch.randn(70, 96).to(dtype), RowsOfCodes.FORMAT, None),
        torch.tensor([69, 0, 33]),
    )
    rows = linear.rows
    assert rows is not None
    plain = rows[torch.arange(70)]
    found = []
    for table in (Table(rows.address, 1.3, RowsOfCodes.KIND), Table(plain.data_ptr(), 1.3)):
        out = torch.zeros(3, 96, dtype=torch.float32 if wide else dtype)
        program = Program({"out": 96}, dtype.itemsize, variant, wide)
        program.add("embed", "out", "out", table)
        program.place("out", out.data_ptr())
        program.run(3, token_ids.data_ptr())
        found.append(out)
    assert torch.equal(*found)
    assert found[0].any()
