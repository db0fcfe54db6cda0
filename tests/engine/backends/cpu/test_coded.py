"""Products with codes in groups, by each set of instructions, and rows of them: against their definition, by bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.linear import NativeCodedLinear, PackedRows
from gptserve.engine.backends.cpu.program import Program, Table
from gptserve.weights.quantized.coded import (
    CodedWeight,
    CodeFormat,
    JoinedFormat,
    JoinedWeight,
    joined_format,
    merged_names,
)
from tests.engine.backends.cpu.coded import product, random_weight
from tests.engine.backends.cpu.test_int8 import assert_same, rows_of_all_kinds

FORMATS = native.CODE_FORMATS
of_all = pytest.mark.parametrize(
    "its", FORMATS, ids=lambda its: f"{its.bits}-{its.kind}-{its.sub_group}{'-table' * its.has_table}"
)


@pytest.fixture(params=native.VARIANTS[native.CODED_VARIANTS])
def variant(request: pytest.FixtureRequest) -> Iterator[native.Variant]:
    if request.param not in native.supported_variants(native.CODED_VARIANTS):
        pytest.skip(f"{request.param} is not built, or this CPU has none")
    yield request.param
    native.set_num_threads(1)


@pytest.mark.some(52)
@of_all
@pytest.mark.parametrize("num_out", [1, 33, 200])
def test_all_instructions_give_the_bits_of_the_definition(
    its: CodeFormat, num_out: int, variant: native.Variant
) -> None:
    torch.manual_seed(num_out)
    num_in = 512 if its.sub_group else 416
    weight = random_weight(its, num_out, num_in)
    x = rows_of_all_kinds(num_in, torch.float32)
    assert_same(NativeCodedLinear(weight, None, variant=variant)(x), product(x, weight))


@of_all
def test_codes_at_their_ends_do_not_overflow(its: CodeFormat, variant: native.Variant) -> None:
    weight = random_weight(its, 32, 256)
    weight.codes[::2], weight.codes[1::2] = (1 << its.bits) - 1, 0
    if weight.sub_scales is not None:
        weight.sub_scales[:16] = -128
    x = torch.ones(2, 256)
    x[1] = -1
    assert_same(NativeCodedLinear(weight, None, variant=variant)(x), product(x, weight))


@pytest.mark.some(26)
@of_all
def test_a_row_has_its_bits_among_any_others(its: CodeFormat, variant: native.Variant) -> None:
    torch.manual_seed(3)
    linear = NativeCodedLinear(random_weight(its, 300, 512), None, variant=variant)
    x = torch.randn(37, 512)
    native.set_num_threads(2)
    together = linear(x)
    native.set_num_threads(1)
    assert all(torch.equal(linear(x[i : i + 1])[0], together[i]) for i in range(len(x)))
    for num in range(1, 14):
        assert torch.equal(linear(x[:num]), together[:num])


@pytest.mark.some(39)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@of_all
def test_a_row_that_is_not_finite_gives_nan(its: CodeFormat, bad: float, variant: native.Variant) -> None:
    x = torch.randn(9, 256)
    x[3, 70] = bad
    y = NativeCodedLinear(random_weight(its, 40, 256), None, variant=variant)(x)
    assert y[3].isnan().all()
    assert y[[0, 1, 2, 4, 5, 6, 7, 8]].isfinite().all()


def test_numbers_in_fp16_widen_as_torch_widens_them(variant: native.Variant) -> None:
    scales = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)[:, None]
    codes = torch.full((len(scales), 32), 9, dtype=torch.uint8)
    weight = CodedWeight(CodeFormat(4, "scales"), torch.float32, codes, scales)
    x = torch.zeros(1, 32)
    x[0, 5] = 127
    y = NativeCodedLinear(weight, None, variant=variant)(x)[0]
    assert_same(y, scales[:, 0].float() * 127)


@of_all
def test_bias_activation_and_residual_come_last(its: CodeFormat) -> None:
    weight, bias, residual = random_weight(its, 70, 256, torch.bfloat16), torch.randn(70), torch.randn(5, 70)
    x = torch.randn(5, 256).bfloat16()
    plain = NativeCodedLinear(weight, None, out_dtype=torch.float32)(x)
    assert_same(plain, product(x.float(), weight))
    y = NativeCodedLinear(weight, bias, "relu", torch.float32)(x, residual)
    assert_same(y, (plain + bias).relu() + residual)
    assert_same(NativeCodedLinear(weight, bias, "relu")(x, residual), y.bfloat16())


@of_all
def test_rows_that_are_joined_keep_their_numbers(its: CodeFormat) -> None:
    for other in FORMATS:
        joined = joined_format([(3, its), (3, other)], in_order=True)
        if joined is None:
            kinds = {it.kind for it in (its, other)} - {"scales"}
            assert len(kinds) == 2 or its.sub_group or other.sub_group or its.has_table or other.has_table
            continue
        assert isinstance(joined, CodeFormat)
        parts = [random_weight(one, 3, 256) for one in (its, other)]
        whole = random_weight(joined, 6, 256)
        for start, part in zip((0, 3), parts, strict=True):
            whole.set_rows(slice(start, start + 3), part)
        assert torch.equal(whole.values(slice(0, 6)), torch.cat([part.values(slice(0, 3)) for part in parts]))


def test_rows_of_several_formats_are_products_of_each(variant: native.Variant) -> None:
    parts = [random_weight(its, 64 if i % 2 else 32, 256) for i, its in enumerate(FORMATS)]
    formats = joined_format([(len(part.codes), part.format) for part in parts], in_order=True)
    assert isinstance(formats, JoinedFormat)
    assert formats.num_bytes((0, 256)) == sum(part.format.num_bytes(part.shape) for part in parts)
    x, bias = torch.randn(7, 256), torch.randn(sum(len(part.codes) for part in parts))
    joined = NativeCodedLinear(JoinedWeight(tuple(parts)), bias, variant=variant)
    assert_same(joined(x), torch.cat([product(x, part) for part in parts], 1) + bias)


@of_all
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_out", [1, 32, 70])
def test_rows_are_those_that_a_weight_is_unpacked_to(its: CodeFormat, num_out: int, dtype: torch.dtype) -> None:
    for num_in in (256, 768) if its.sub_group else (32, 96, 576):
        weight = random_weight(its, num_out, num_in, dtype)
        weight.codes[0, :16], weight.codes[-1, 16:32] = (1 << its.bits) - 1, 0
        weight.scales[num_out // 2, -1] = torch.inf
        rows, numbers = PackedRows.of(NativeCodedLinear(weight, None)), torch.arange(num_out)
        assert rows is not None
        assert (rows.dtype, rows.device) == (dtype, torch.device("cpu"))
        expected = weight.values(slice(None)).to(dtype)
        bits = torch.int32 if dtype is torch.float32 else torch.int16
        for some in (numbers, numbers.flip(0)[::3], numbers[[0, -1, 0]], numbers[:0]):
            is_number = ~expected[some].isnan()
            assert torch.equal(rows[some].isnan(), ~is_number)
            assert torch.equal(rows[some].view(bits)[is_number], expected[some].view(bits)[is_number])


def test_a_weight_of_several_formats_gives_no_rows() -> None:
    parts = random_weight(FORMATS[0], 32, 256), random_weight(FORMATS[3], 32, 256)
    assert PackedRows.of(NativeCodedLinear(JoinedWeight(parts), None)) is None


@of_all
@pytest.mark.parametrize("wide", [(), ("out",)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_program_embeds_by_codes_as_by_a_plain_table(
    its: CodeFormat, dtype: torch.dtype, wide: tuple[str, ...]
) -> None:
    width, token_ids = 256 if its.sub_group else 96, torch.tensor([69, 0, 33])
    weight = random_weight(its, 70, width, dtype)
    rows, plain = PackedRows.of(NativeCodedLinear(weight, None)), weight.values(slice(None)).to(dtype)
    assert rows is not None
    for variant in native.supported_variants(8 * dtype.itemsize):
        found = []
        for table in (Table(rows.address, 1.3, rows.kind), Table(plain.data_ptr(), 1.3)):
            out = torch.zeros(3, width, dtype=torch.float32 if wide else dtype)
            program = Program({"out": width}, dtype.itemsize, variant, wide)
            program.add("embed", "out", "out", table)
            program.place("out", out.data_ptr())
            program.run(3, token_ids.data_ptr())
            found.append(out)
        assert torch.equal(*found)
        assert found[0].any()


def test_formats_that_no_weight_can_have_together_are_not_joined() -> None:
    small, large = CodeFormat(4, "scales and leasts", 32), CodeFormat(6, "scales", 16)
    assert joined_format([(33, small), (32, large)], in_order=True) is None
    assert joined_format([(32, small), (32, large)], in_order=False) is None
    assert joined_format([(32, small), (32, None)], in_order=True) is None
    assert joined_format([(33, small), (32, small)], in_order=False) == small
    merged = joined_format([(16, small), (16, small), (1, large)], in_order=True)
    assert merged == JoinedFormat(((32, small), (1, large)))
    assert merged.name == "4/6-bit codes"


def test_a_report_names_codes_once() -> None:
    assert merged_names(["4/6-bit codes", "bfloat16", "5-bit codes", "4-bit codes"]) == ["bfloat16", "4/5/6-bit codes"]
    assert merged_names(["int8", "int5"]) == ["int8", "int5"]
