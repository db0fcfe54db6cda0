"""The operations of programs on streams, and of gates that are cut: they compute what torch does, by all variants."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.program import Factors, Kind, Mixing, Program, Table
from gptserve.engine.model.activation import cut_gates
from gptserve.engine.model.stream_mixer import StreamMixer, with_length_of

DTYPES = (torch.float32, torch.bfloat16)
ROWS = 5
WIDTHS = (1, 7, 16, 33, 200)
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2**-6}

by_variant = pytest.mark.parametrize(
    ("dtype", "variant"),
    [(dtype, variant) for dtype in DTYPES for variant in native.supported_variants(8 * dtype.itemsize)],
)


def mixer(num: int, width: int) -> StreamMixer:
    return StreamMixer.of(torch.randn(num * num, num), torch.randn(num, num), torch.randn(width))


def mixed(
    numbers: StreamMixer, streams_TNH: Tensor, y_TH: Tensor, logits_TN: Tensor, variant: native.Variant, size: int = 4
) -> tuple[Tensor, Tensor]:
    """Return what a program of elements of `size` bytes predicts, and how it corrects that by y."""
    num, width = streams_TNH.shape[1:]
    streams = [stream.contiguous() for stream in streams_TNH.clone().unbind(1)]
    tensors = {f"stream {i}": stream for i, stream in enumerate(streams)} | {"x": y_TH, "logits": logits_TN}
    widths = {name: tensor.shape[1] for name, tensor in tensors.items()}
    found = list[Tensor]()
    steps: tuple[tuple[Kind, str, Tensor], ...] = (
        ("predict", "logits", numbers.predict_NNN),
        ("correct", "x", numbers.correct_NN),
    )
    for kind, source, factors in steps:
        program = Program(widths, size, variant, tuple(tensors))
        data = Mixing(factors.data_ptr(), num, program.number("logits"))
        program.add(kind, source, "stream 0", data)
        for name, tensor in tensors.items():
            program.place(name, tensor.data_ptr())
        program.run(len(streams_TNH))
        found.append(torch.stack(streams, dim=1))
    assert found[0].shape == (len(streams_TNH), num, width)
    return found[0], found[1]


@by_variant
@pytest.mark.parametrize("num", [1, 2, 4, 16])
def test_streams_are_predicted_and_corrected_as_by_torch(num: int, dtype: torch.dtype, variant: native.Variant) -> None:
    """In fp32 whatever the elements of a program: streams are wide."""
    for width in WIDTHS:
        torch.manual_seed(width)
        numbers, streams = mixer(num, width), torch.randn(ROWS, num, width)
        y, logits = torch.randn(ROWS, width), torch.randn(ROWS, num)
        predicted, corrected = mixed(numbers, streams, y, logits, variant, dtype.itemsize)
        torch.testing.assert_close(predicted, numbers.predict(streams, logits), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(corrected, numbers.correct(predicted, y, logits), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(predicted, streams, atol=1e-2)
        assert not torch.allclose(corrected, predicted, atol=1e-2)
        for row in range(ROWS):
            alone = (its[row : row + 1] for its in (streams, y, logits))
            assert torch.equal(mixed(numbers, *alone, variant, dtype.itemsize)[1], corrected[row : row + 1])


def in_place(
    kind: Kind, data: object, x: Tensor, variant: native.Variant, size: int, like: Tensor | None = None
) -> Tensor:
    """Return x after one operation; it is wide if its elements have more bytes than those of the program."""
    found = x.clone()
    program = Program({"x": x.shape[1], "y": x.shape[1]}, size, variant, ("x", "y") if x.itemsize > size else ())
    program.add(kind, "x" if like is None else "y", "x", data)
    program.place("x", found.data_ptr())
    if like is not None:
        program.place("y", like.data_ptr())
    program.run(len(x))
    return found


@by_variant
@pytest.mark.parametrize("is_wide", [False, True])
def test_a_vector_scales_each_element(is_wide: bool, dtype: torch.dtype, variant: native.Variant) -> None:
    for width in WIDTHS:
        x, factors = torch.randn(ROWS, width).to(torch.float32 if is_wide else dtype), torch.randn(width)
        found = in_place("scale_each", Factors(factors.data_ptr()), x, variant, dtype.itemsize)
        assert torch.equal(found, (x.float() * factors).to(x.dtype))


@by_variant
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("cut", [-0.5, 0.7, 1.6])
def test_gates_are_cut_as_by_torch(cut: float, is_wide: bool, dtype: torch.dtype, variant: native.Variant) -> None:
    dtype = torch.float32 if is_wide else dtype
    for width in WIDTHS:
        torch.manual_seed(width)
        x = (torch.randn(ROWS, 2 * width) + 1).to(dtype)
        found, expected = (
            in_place("cut_gate", c_float(cut), x, variant, 2 if is_wide else x.itemsize),
            cut_gates(x, cut),
        )
        torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
        assert torch.equal(found[:, width:], x[:, width:])
        if width >= 200:  # of so many gates about the share that the cut stands for is left
            share = 1 - torch.distributions.Normal(0, 1).cdf(torch.tensor(cut)).item()
            assert (found[:, :width] > 0).float().mean().item() == pytest.approx(share, abs=0.06)
    x[0, 0] = torch.nan
    assert in_place("cut_gate", c_float(cut), x, variant, 2 if is_wide else x.itemsize)[0, :width].isnan().all()


@by_variant
@pytest.mark.parametrize("is_wide", [False, True])
def test_a_product_gets_the_length_of_another(is_wide: bool, dtype: torch.dtype, variant: native.Variant) -> None:
    wide = torch.float32 if is_wide else dtype
    for width in WIDTHS:
        torch.manual_seed(width)
        x, like = torch.randn(ROWS, width).to(wide), (torch.randn(ROWS, width) * 3).to(wide)
        x[0] = 0  # is left so, and divided by no 0
        x[1] *= 1e-4  # is not so long that it would be enlarged to the whole length
        found = in_place("match", None, x, variant, dtype.itemsize, like)
        torch.testing.assert_close(found, with_length_of(like, x), rtol=TOLERANCES[wide], atol=TOLERANCES[wide])
        lengths, expected = found.float().square().mean(1), like.float().square().mean(1)
        torch.testing.assert_close(lengths[2:], expected[2:], rtol=4 * TOLERANCES[wide], atol=0)
        assert found[0].eq(0).all()
        assert lengths[1] < expected[1] / 100


@by_variant
@pytest.mark.parametrize("num_rows", [0, 3, 9])
def test_tokens_beyond_a_table_have_its_first_row(num_rows: int, dtype: torch.dtype, variant: native.Variant) -> None:
    rows, ids = torch.randn(9, 24).to(dtype), torch.tensor([2, 3, 8, 0])
    found = torch.empty(len(ids), 24, dtype=dtype)
    program = Program({"x": 24}, dtype.itemsize, variant)
    program.add("embed", "x", "x", Table(rows.data_ptr(), 1.0, 0, num_rows))
    program.place("x", found.data_ptr())
    program.run(len(ids), ids.data_ptr())
    assert torch.equal(found, rows[[2, 0, 0, 0] if num_rows == 3 else ids])


@pytest.mark.skipif("avx512" not in native.supported_variants(16), reason="this CPU has no AVX-512")
@pytest.mark.parametrize("size", [2, 4])
def test_avx2_and_avx512_compute_the_same_bits(size: int) -> None:
    def all_of(variant: native.Variant, width: int) -> Sequence[Tensor]:
        torch.manual_seed(width)
        numbers, streams = mixer(4, width), torch.randn(ROWS, 4, width)
        y, logits = torch.randn(ROWS, width), torch.randn(ROWS, 4)
        x = torch.randn(ROWS, 2 * width)
        cut = in_place("cut_gate", c_float(1.2), x, variant, size)
        return *mixed(numbers, streams, y, logits, variant, size), cut, in_place("match", None, x, variant, size, x + 1)

    for width in WIDTHS:
        assert all(map(torch.equal, all_of("avx2", width), all_of("avx512", width)))
