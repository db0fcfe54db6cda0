"""The operations that compute row by row: all variants agree, in widths of whole vectors and others."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64
from typing import Literal

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.linear import NativeLinear
from gptserve.engine.backends.cpu.program import HEAD_GATES, Gate, Kind, Norm, Program, Rotation, Table
from gptserve.engine.model.activation import Xielu, gate_heads, gated
from gptserve.weights.config import Activation, AttentionGate

DTYPES = (torch.float32, torch.bfloat16)
ROWS, EPS = 5, 1e-5
WIDTHS = (1, 7, 8, 15, 16, 17, 31, 33, 64, 200)

Add = Callable[[Program, Tensor], None]
"""Appends an operation to "out", as wide as "y", from the "y" that it is given, from "x", twice as wide, or "gates"."""


def norm(count: int, *, centred: bool, scaled: bool) -> Add:
    def add(program: Program, y: Tensor) -> None:
        first, size = y.shape[1] % count, y.shape[1] // count
        vectors = y.float()[0, first : first + size] - y[0, first : first + size].float().mean() * centred
        weight, bias = torch.ones(size), -vectors / (vectors.square().mean() + EPS).sqrt()  # leaves the last bits
        program.keep((weight, bias))
        addresses = (weight.data_ptr(), bias.data_ptr()) if scaled else (None, None)
        program.add("norm", "y", "out", Norm(*addresses, first, count, size, EPS, centred))

    return add


def rotate(program: Program, y: Tensor) -> None:
    width = y.shape[1]
    waves = torch.randn(ROWS, 2, width // 4)
    program.keep(waves)
    program.add("rotate", "out", "out", Rotation(waves.data_ptr(), 2, width // 2, width // 4))


def table(kind: Literal["embed", "add_position"], precision: torch.dtype = torch.float32) -> Add:
    def add(program: Program, y: Tensor) -> None:
        rows = torch.randn(y.shape).to(precision).to({4: torch.float32, 2: torch.bfloat16}[program._element_bytes])
        program.keep(rows)
        program.add(kind, "y", "out", Table(rows.data_ptr(), 1.3))

    return add


def gate(activation: str | None, limit: float = 0.0) -> Add:
    number = native.ACTIVATIONS.index(activation)
    return lambda program, y: program.add("gate", "x", "out", Gate(limit, number))


def head_gates(source: Literal["y", "gates"], function: AttentionGate) -> Add:
    return lambda program, y: program.add("gate_heads", source, "out", c_int32(HEAD_GATES.index(function)))


def packed_table(program: Program, y: Tensor) -> None:
    """The same as table("embed"), of a weight that is packed."""
    rows = torch.randn(y.shape).to({4: torch.float32, 2: torch.bfloat16}[program._element_bytes])
    linear = NativeLinear(torch.cat([rows, torch.full((70, y.shape[1]), torch.nan, dtype=rows.dtype)]), None)
    program.keep(linear)
    program.add("embed", "y", "out", Table(linear.weight.weight, 1.3, native.PACKED_ROWS))


TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2**-6}
"""Of what has exponentials or fused sums, which differ in the last bits."""

by_variant = pytest.mark.parametrize(
    ("dtype", "variant"),
    [(dtype, variant) for dtype in DTYPES for variant in native.supported_variants(8 * dtype.itemsize)],
)

XIELU = Xielu.of(torch.tensor([1.5, 30.0, 0.5, -1e-3]))
OPERATIONS: dict[str, Add] = {
    "layernorm": norm(1, centred=True, scaled=True),
    "layernorm without weights": norm(1, centred=True, scaled=False),
    "RMSNorm of heads": norm(3, centred=False, scaled=True),
    "rotary": rotate,
    "embedding": table("embed"),
    "positions": table("add_position"),
    "clamp": lambda program, y: program.add("clamp", "y", "out", c_float(0.7)),
    "sum": lambda program, y: program.add("add", "y", "out", residual="out"),
    "copy": lambda program, y: program.add("copy", "y", "out"),
    "taken rows": lambda program, y: program.add("take", "y", "out"),
    **{f"gate by {name}": gate(name) for name in native.ACTIVATIONS},
    "limited gate": gate("gelu_sigmoid", 2.5),
    **{f"gates of elements by {function}": head_gates("y", function) for function in HEAD_GATES},
    **{f"gates of heads by {function}": head_gates("gates", function) for function in HEAD_GATES},
    "xIELU": lambda program, y: program.add("xielu", "out", "out", (c_float * 4)(*XIELU.numbers.tolist())),
}


def gated_by_program(x: Tensor, gate: Gate, variant: native.Variant, *, in_bf16: bool = False) -> Tensor:
    """Return the gate of x; with `in_bf16` a program of bf16 computes it, x being fp32."""
    out = torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype)
    wide = ("x", "out") if in_bf16 else ()
    program = Program({"x": x.shape[1], "out": out.shape[1]}, 2 if in_bf16 else x.itemsize, variant, wide)
    program.add("gate", "x", "out", gate)
    program.place("x", x.data_ptr())
    program.place("out", out.data_ptr())
    program.run(len(x))
    return out


@pytest.mark.some(9)
@by_variant
@pytest.mark.parametrize("limit", [None, 2.0, 0.7])  # 0.7 is no number of bf16
def test_a_gate_is_what_torch_computes(limit: float | None, dtype: torch.dtype, variant: native.Variant) -> None:
    rounded = torch.tensor(limit or 0.0).to(dtype).item()
    activation: Activation
    for activation, tolerance in (("relu", 0.0), ("silu", TOLERANCES[dtype])):
        gate = Gate(rounded, native.ACTIVATIONS.index(activation))
        for width in WIDTHS:
            x = torch.randn(ROWS, 2 * width, generator=torch.Generator().manual_seed(width)).mul(3).to(dtype)
            x[0, -1], x[1, 0], x[2, :2], x[3, -1] = torch.nan, torch.nan, torch.inf, -torch.inf
            found, expected = gated_by_program(x, gate, variant), gated(x, activation, limit)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("variant", native.supported_variants(32))
@pytest.mark.parametrize("limit", [0.0, 2.0])
def test_a_wide_gate_of_a_program_in_bf16_is_that_of_one_in_fp32(limit: float, variant: native.Variant) -> None:
    gate = Gate(limit, native.ACTIVATIONS.index("silu"))
    for width in WIDTHS:
        x = torch.randn(ROWS, 2 * width)
        assert torch.equal(gated_by_program(x, gate, variant, in_bf16=True), gated_by_program(x, gate, variant))


def test_a_gate_has_wide_buffers_on_both_sides_or_on_none() -> None:
    for wide in ("x", "out"):
        program = Program({"x": 64, "out": 32}, 2, wide=(wide,))
        with pytest.raises(AssertionError, match="it has one width"):
            program.add("gate", "x", "out", Gate(0.0, 0))


@by_variant
@pytest.mark.parametrize("function", HEAD_GATES)
@pytest.mark.parametrize("of_heads", [False, True])
def test_gates_of_attention_are_what_torch_computes(
    function: AttentionGate, dtype: torch.dtype, variant: native.Variant, *, of_heads: bool
) -> None:
    for num_heads, size in ((1, 1), (1, 40), (5, 16), (17, 7), (33, 24)):
        torch.manual_seed(num_heads)
        heads = torch.randn(ROWS, num_heads, size).to(dtype)
        gates = torch.randn(ROWS, num_heads if of_heads else num_heads * size).mul(6).to(dtype)
        gates[0, -1], gates[1, 0], gates[2, -1], gates[3, 0], gates[4, 0] = torch.nan, torch.inf, -torch.inf, 60, -60
        found = heads.flatten(1).clone()
        program = Program({"gates": gates.shape[1], "heads": found.shape[1]}, dtype.itemsize, variant)
        program.add("gate_heads", "gates", "heads", c_int32(HEAD_GATES.index(function)))
        program.place("gates", gates.data_ptr())
        program.place("heads", found.data_ptr())
        program.run(ROWS)
        expected = gate_heads(heads, gates, function)
        torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=0, equal_nan=True)


@by_variant
@pytest.mark.parametrize("first", [0, 5, 40])
def test_a_product_is_of_the_elements_from_the_first_one_on(
    first: int, dtype: torch.dtype, variant: native.Variant
) -> None:
    for width in WIDTHS:
        torch.manual_seed(width)
        factors, x = torch.randn(ROWS, width + 40).to(dtype), torch.randn(ROWS, width).to(dtype)
        found = x.clone()
        program = Program({"factors": width + 40, "x": width}, dtype.itemsize, variant)
        program.add("multiply", "factors", "x", c_int64(first))
        program.place("factors", factors.data_ptr())
        program.place("x", found.data_ptr())
        program.run(ROWS)
        assert torch.equal(found, x * factors[:, first : first + width])


@by_variant
def test_a_factor_scales_whole_rows_in_wide_buffers_and_others(dtype: torch.dtype, variant: native.Variant) -> None:
    for width in WIDTHS:
        for wide in (("x",), ()):
            x = torch.randn(ROWS, width).to(torch.float32 if wide else dtype)
            found = x.clone()
            program = Program({"x": width}, dtype.itemsize, variant, wide)
            program.add("scale", "x", "x", c_float(0.3))
            program.place("x", found.data_ptr())
            program.run(ROWS)
            assert torch.equal(found, x * torch.tensor(0.3).item())


def xielu_by_program(x: Tensor, numbers: Tensor, variant: native.Variant, *, in_bf16: bool = False) -> Tensor:
    out = x.clone()
    program = Program({"x": x.shape[1]}, 2 if in_bf16 else x.itemsize, variant, ("x",) if in_bf16 else ())
    program.add("xielu", "x", "x", (c_float * 4)(*numbers.tolist()))
    program.place("x", out.data_ptr())
    program.run(len(x))
    return out


@by_variant
@pytest.mark.parametrize("stored", [(0.2, -0.1, 0.5, -1e-6), (166.0, 40.75, 0.5, -1e-6), (-3.0, 2.0, 1.5, -0.8)])
def test_xielu_is_what_torch_computes(stored: tuple[float, ...], dtype: torch.dtype, variant: native.Variant) -> None:
    xielu = Xielu.of(torch.tensor(stored))
    for width in WIDTHS:
        x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(width)).mul(3).to(dtype)
        x[0, -1], x[1, 0], x[2, -1], x[3, 0], x[4, :2] = torch.nan, torch.inf, -200, 0, -1e-7
        x = torch.cat([x, x / 16, x / 1024], dim=1)
        found, expected = xielu_by_program(x, xielu.numbers, variant), xielu(x)
        # e^x - 1 - x of torch has an error that is that of x, times alpha_n.
        close = 2**-22 * (1 + xielu.numbers[1].item()) if dtype is torch.float32 else 2**-12
        torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=close, equal_nan=True)


@pytest.mark.parametrize("variant", native.supported_variants(32))
def test_a_wide_xielu_of_a_program_in_bf16_is_that_of_one_in_fp32(variant: native.Variant) -> None:
    x = torch.randn(ROWS, 50)
    wide = xielu_by_program(x, XIELU.numbers, variant, in_bf16=True)
    assert torch.equal(wide, xielu_by_program(x, XIELU.numbers, variant))


def computed(
    operation: Add,
    width: int,
    dtype: torch.dtype,
    variant: native.Variant,
    wide: tuple[str, ...] = (),
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Return "out" [ROWS, width]; nothing behind it may be written. The inputs are numbers of `precision`."""
    torch.manual_seed(width)
    num_gates = max(num for num in range(1, 9) if width % num == 0)
    sizes = {"x": 2 * width, "y": width, "gates": num_gates, "out": width}
    program = Program(sizes, dtype.itemsize, variant, wide)
    tensors = {
        name: torch.randn(ROWS + 64, size).mul(4).to(precision).to(torch.float32 if name in wide else dtype)
        for name, size in sizes.items()
    }
    tensors["y"][1, width // 2], tensors["y"][2, width // 3], tensors["x"][3, width // 2] = (
        torch.inf,
        torch.nan,
        torch.nan,
    )
    for name, tensor in tensors.items():
        program.place(name, tensor.data_ptr())
    behind = tensors["out"][ROWS:].clone()
    operation(program, tensors["y"][:ROWS])
    token_ids, positions = torch.tensor([3, 1, 4, 1, 0]), torch.tensor([0, 1, 2, 4, 3])
    program.run(ROWS, token_ids.data_ptr(), positions.data_ptr(), num_taken=ROWS, taken=positions.data_ptr())
    assert torch.equal(tensors["out"][ROWS:], behind)
    return tensors["out"][:ROWS]


@pytest.mark.some(4)
@pytest.mark.skipif(
    "avx512" not in native.supported_variants(16), reason="the library is not built, or no AVX-512 here"
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_avx2_and_avx512_compute_the_same_bits(name: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        by_avx2, by_avx512 = (computed(OPERATIONS[name], width, dtype, variant) for variant in ("avx2", "avx512"))
        assert torch.equal(by_avx2.view(torch.int16), by_avx512.view(torch.int16)), width


@pytest.mark.some(4)
@pytest.mark.skipif("avx2" not in native.supported_variants(16), reason="the library is not built, or no AVX2 here")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_instructions_of_any_cpu_compute_the_same_but_for_fused_sums(name: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        by_any, by_avx2 = (computed(OPERATIONS[name], width, dtype, variant) for variant in ("generic", "avx2"))
        torch.testing.assert_close(by_any, by_avx2, atol=1e-5, rtol=TOLERANCES[dtype], equal_nan=True)


@pytest.mark.some(3)
@by_variant
def test_a_packed_table_embeds_as_a_plain_one(dtype: torch.dtype, variant: native.Variant) -> None:
    for width in WIDTHS:
        for wide in ((), ("out",)):
            expected = computed(OPERATIONS["embedding"], width, dtype, variant, wide)
            assert torch.equal(computed(packed_table, width, dtype, variant, wide), expected), width
            assert not torch.equal(expected, expected.roll(1, 0))


OF_THE_STREAM: dict[str, Add] = {
    **{name: OPERATIONS[name] for name in ("layernorm", "layernorm without weights", "RMSNorm of heads")},
    **{name: OPERATIONS[name] for name in ("sum", "copy", "taken rows")},
    "embedding": table("embed", torch.bfloat16),
    "positions": table("add_position", torch.bfloat16),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("variant", native.supported_variants(32))
@pytest.mark.parametrize("name", OF_THE_STREAM)
def test_wide_buffers_of_a_program_in_bf16_have_what_one_in_fp32_computes(name: str, variant: native.Variant) -> None:
    def found(width: int, dtype: torch.dtype, *wide: str, precision: torch.dtype = torch.bfloat16) -> Tensor:
        return computed(OF_THE_STREAM[name], width, dtype, variant, wide, precision).nan_to_num(7.0, 8.0, 9.0)

    for width in WIDTHS:
        exact = found(width, torch.float32, precision=torch.float32)
        assert torch.equal(found(width, torch.bfloat16, "y", "out", precision=torch.float32), exact)
        assert width == 1 or not torch.equal(exact.bfloat16().float(), exact)

        exact = found(width, torch.float32)
        assert torch.equal(found(width, torch.bfloat16, "out"), exact)
        for wide in ((), ("y",)):
            assert torch.equal(found(width, torch.bfloat16, *wide), exact.bfloat16())


@pytest.mark.parametrize("kind", ["clamp", "multiply", "rotate", "linear", "experts", "attend"])
def test_operations_that_cannot_read_wide_buffers_are_refused(kind: Kind) -> None:
    program = Program({"x": 32, "out": 32}, 2, wide=("x",))
    with pytest.raises(AssertionError, match="it reads a wide buffer"):
        program.add(kind, "x", "out", native.PackedWeight(element_bits=16))
