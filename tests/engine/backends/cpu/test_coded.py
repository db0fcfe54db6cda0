"""Products with codes in groups: the kernels of each set of instructions against their definition, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.linear import NativeCodedLinear
from gptserve.weights.quantized.coded import CodedWeight, CodeFormat
from tests.engine.backends.cpu.coded import product, random_weight
from tests.engine.backends.cpu.test_int8 import assert_same, rows_of_all_kinds

FORMATS = [CodeFormat(bits, kind) for bits in (4, 8) for kind in ("scales", "scales and leasts", "scales and zeros")]
of_all = pytest.mark.parametrize("its", FORMATS, ids=lambda its: f"{its.bits}-{its.kind}")


@pytest.fixture(params=native.VARIANTS[native.CODED_VARIANTS])
def variant(request: pytest.FixtureRequest) -> Iterator[native.Variant]:
    if request.param not in native.supported_variants(native.CODED_VARIANTS):
        pytest.skip(f"{request.param} is not built, or this CPU has none")
    yield request.param
    native.set_num_threads(1)


@of_all
@pytest.mark.parametrize("num_out", [1, 33, 200])
def test_all_instructions_give_the_bits_of_the_definition(
    its: CodeFormat, num_out: int, variant: native.Variant
) -> None:
    torch.manual_seed(num_out)
    weight = random_weight(its, num_out, 416)
    x = rows_of_all_kinds(416, torch.float32)
    assert_same(NativeCodedLinear(weight, None, variant=variant)(x), product(x, weight))


@of_all
def test_codes_at_their_ends_do_not_overflow(its: CodeFormat, variant: native.Variant) -> None:
    weight = random_weight(its, 32, 64)
    weight.codes[::2], weight.codes[1::2] = (1 << its.bits) - 1, 0
    x = torch.ones(2, 64)
    x[1] = -1
    assert_same(NativeCodedLinear(weight, None, variant=variant)(x), product(x, weight))


@of_all
def test_a_row_has_its_bits_among_any_others(its: CodeFormat, variant: native.Variant) -> None:
    torch.manual_seed(3)
    linear = NativeCodedLinear(random_weight(its, 300, 320), None, variant=variant)
    x = torch.randn(37, 320)
    native.set_num_threads(2)
    together = linear(x)
    native.set_num_threads(1)
    assert all(torch.equal(linear(x[i : i + 1])[0], together[i]) for i in range(len(x)))
    for num in range(1, 14):
        assert torch.equal(linear(x[:num]), together[:num])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@of_all
def test_a_row_that_is_not_finite_gives_nan(its: CodeFormat, bad: float, variant: native.Variant) -> None:
    x = torch.randn(9, 96)
    x[3, 70] = bad
    y = NativeCodedLinear(random_weight(its, 40, 96), None, variant=variant)(x)
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
    weight, bias, residual = random_weight(its, 70, 64, torch.bfloat16), torch.randn(70), torch.randn(5, 70)
    x = torch.randn(5, 64).bfloat16()
    plain = NativeCodedLinear(weight, None, out_dtype=torch.float32)(x)
    assert_same(plain, product(x.float(), weight))
    y = NativeCodedLinear(weight, bias, "relu", torch.float32)(x, residual)
    assert_same(y, (plain + bias).relu() + residual)
    assert_same(NativeCodedLinear(weight, bias, "relu")(x, residual), y.bfloat16())


@of_all
def test_rows_that_are_joined_keep_their_numbers(its: CodeFormat) -> None:
    from gptserve.weights.quantized.coded import joined_format

    for other in FORMATS:
        joined = joined_format([its, other])
        if joined is None:
            assert {its.kind, other.kind} == {"scales and leasts", "scales and zeros"}
            continue
        parts = [random_weight(one, 3, 64) for one in (its, other)]
        whole = random_weight(joined, 6, 64)
        for start, part in zip((0, 3), parts, strict=True):
            whole.set_rows(slice(start, start + 3), part)
        assert torch.equal(whole.values(slice(0, 6)), torch.cat([part.values(slice(0, 3)) for part in parts]))
