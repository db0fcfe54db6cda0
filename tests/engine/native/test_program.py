"""The operations that compute row by row: AVX2 gives the bits of AVX-512, in widths of whole vectors and others."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int32
from typing import Literal

import pytest
import torch
from torch import Tensor

from gptserve.engine import native
from gptserve.engine.native.program import Norm, Program, Rotation, Table

ROWS, EPS = 5, 1e-5
WIDTHS = (1, 7, 8, 15, 16, 17, 31, 33, 64, 200)

Add = Callable[[Program, Tensor], None]
"""Appends an operation to "out", as wide as "y", from the "y" that it is given, or from "x", twice as wide."""


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


def table(kind: Literal["embed", "add_position"]) -> Add:
    def add(program: Program, y: Tensor) -> None:
        rows = torch.randn(y.shape).bfloat16()
        program.keep(rows)
        program.add(kind, "y", "out", Table(rows.data_ptr(), 1.3))

    return add


def gate(activation: str | None) -> Add:
    number = native.ACTIVATIONS.index(activation)
    return lambda program, y: program.add("gate", "x", "out", c_int32(number))


OPERATIONS: dict[str, Add] = {
    "layernorm": norm(1, centred=True, scaled=True),
    "layernorm without weights": norm(1, centred=True, scaled=False),
    "RMSNorm of heads": norm(3, centred=False, scaled=True),
    "rotary": rotate,
    "embedding": table("embed"),
    "positions": table("add_position"),
    "clamp": lambda program, y: program.add("clamp", "y", "out", c_float(0.7)),
    "sum": lambda program, y: program.add("add", "y", "out", residual="out"),
    **{f"gate by {name}": gate(name) for name in native.ACTIVATIONS},
}


def computed(operation: Add, width: int, variant: native.Variant) -> Tensor:
    """Return "out" [ROWS, width], as bits; nothing behind it may be written."""
    torch.manual_seed(width)
    sizes = {"x": 2 * width, "y": width, "out": width}
    program = Program(sizes, variant)
    tensors = {name: torch.randn(ROWS + 64, size).mul(4).bfloat16() for name, size in sizes.items()}
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
    program.run(ROWS, token_ids.data_ptr(), positions.data_ptr())
    assert torch.equal(tensors["out"][ROWS:], behind)
    return tensors["out"][:ROWS].view(torch.int16)


@pytest.mark.skipif("avx512" not in native.supported_variants(), reason="the library is not built, or no AVX-512 here")
@pytest.mark.parametrize("name", OPERATIONS)
def test_avx2_and_avx512_compute_the_same_bits(name: str) -> None:
    for width in WIDTHS:
        by_avx512 = computed(OPERATIONS[name], width, "avx512")
        assert torch.equal(computed(OPERATIONS[name], width, "avx2"), by_avx512), width
