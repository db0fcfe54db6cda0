"""The operations that keep states: they compute what torch does, by all instructions, in any steps and slots."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from ctypes import addressof, c_void_p
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.attention import _Batch
from gptserve.engine.backends.cpu.program import Convolve, Program, Recur, StateCache
from gptserve.engine.model.activation import decay, softplus
from gptserve.engine.model.linear_attention import of_value_heads, recur
from gptserve.engine.model.states import State, make_state
from gptserve.engine.state_place import StatePlace
from gptserve.weights.config import GatedDelta, ShortConvolution, StateSpace

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the library is not built")

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = (
    GatedDelta(1, 1, 8, 8, 2),
    GatedDelta(2, 4, 17, 33, 4),
    GatedDelta(2, 6, 16, 20, 4, tiled=True),
    GatedDelta(3, 3, 128, 128, 4),
    GatedDelta(1, 2, 5, 50, 1),
    StateSpace(1, 1, 8, 8, 2, norm_eps=1e-5),
    StateSpace(2, 4, 17, 33, 4, norm_eps=1e-5, step_limits=(0.5, 1.5), has_conv_bias=False),
    StateSpace(1, 3, 128, 64, 4, norm_eps=1e-5),
)
Shape = GatedDelta | StateSpace
NUM_SLOTS = 5


@dataclass
class Layer:
    """A layer's numbers, and a program of its two operations."""

    shape: Shape
    dtype: torch.dtype
    variant: native.Variant | None = None
    num_slots: int = NUM_SLOTS
    state: State = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        shape = self.shape
        self.factors_SC = torch.randn(shape.conv_size, shape.conv_width)
        self.decay_H, self.step_H = torch.rand(shape.num_value_heads) * 4, torch.randn(shape.num_value_heads)
        is_space = isinstance(shape, StateSpace)
        self.skip_H = torch.randn(shape.num_value_heads) if is_space else None
        self.bias_C = torch.randn(shape.conv_width) if isinstance(shape, StateSpace) and shape.has_conv_bias else None
        self.limits = shape.step_limits if isinstance(shape, StateSpace) else (0.0, 0.0)
        state = make_state(shape, self.num_slots, torch.device("cpu"))
        assert state is not None
        self.state = State(*(torch.full_like(its, torch.nan) for its in state))  # nobody may read it

    def run(self, inputs: Tensor, rates: Tensor, places: list[StatePlace], sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Return what the two operations give for rows of sequences of these sizes."""
        shape, num = self.shape, len(inputs)
        widths = {"in": shape.conv_width, "mixed": shape.conv_width, "rates": rates.shape[1], "out": shape.value_width}
        program = Program(widths, self.dtype.itemsize, self.variant)
        mixed, out = (torch.empty(num, widths[name], dtype=self.dtype) for name in ("mixed", "out"))
        for name, tensor in {"in": inputs, "mixed": mixed, "rates": rates, "out": out}.items():
            program.place(name, tensor.data_ptr())
        bias, skip = (None if its is None else its.data_ptr() for its in (self.bias_C, self.skip_H))
        convolve = Convolve(self.factors_SC.data_ptr(), bias, 0, shape.conv_size, gated=False)
        program.add("convolve", "in", "mixed", convolve)
        sizes_of = shape.num_key_heads, shape.num_value_heads, shape.key_size, shape.value_size, shape.group
        numbers = self.decay_H.data_ptr(), self.step_H.data_ptr(), skip, 0, *sizes_of, *self.limits
        program.add("recur", "mixed", "out", Recur(*numbers, program.number("rates")))
        starts = array("i", [0, *torch.tensor(sizes).cumsum(0).tolist()])
        batch = _Batch(query_starts=starts.buffer_info()[0], num_seqs=len(sizes), num_tokens=num)
        cache = StateCache(self.state.latest_NSC.data_ptr(), self.state.memory_NHKV.data_ptr())
        fields = array("i", [number for place in places for number in place])
        states = fields.buffer_info()[0], (c_void_p * 1)(addressof(cache))
        program.run(num, batch=batch, states=states[0], state_caches=states[1])
        return mixed, out

    def rows(self, num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = (num, self.shape.conv_width), (num, self.shape.rate_width)
        inputs, rates = (torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes)
        return inputs * self.shape.key_size**-0.5, rates

    def expected(self, inputs: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same for one sequence from its first token on, in fp32 by torch."""
        shape, num = self.shape, len(inputs)
        before = functional.pad(inputs.float(), (0, 0, shape.conv_size - 1, 0))
        sums = torch.stack([before[i : i + num] * self.factors_SC[i] for i in range(shape.conv_size)]).sum(0)
        mixed = functional.silu(sums if self.bias_C is None else sums + self.bias_C).to(self.dtype)
        q, k, v = mixed.float().split_with_sizes((shape.key_width, shape.key_width, shape.value_width), dim=1)
        q_TGK, k_TGK = (its.view(num, shape.num_key_heads, shape.key_size) for its in (q, k))
        v_THV = v.view(num, shape.num_value_heads, shape.value_size)
        *learned, forgotten = rates.float().split(shape.num_value_heads, dim=1)
        steps = softplus(forgotten + self.step_H)
        if isinstance(shape, StateSpace):
            steps = steps.clamp(*shape.step_limits)
        of_tokens = decay(steps, self.decay_H), learned[0].sigmoid() if learned else steps
        memory = torch.empty(1, shape.num_value_heads, shape.key_size, shape.value_size)
        q_THK, k_THK = (of_value_heads(its, shape) for its in (q_TGK, k_TGK))
        return mixed, recur(memory, StatePlace(0, -1), q_THK, k_THK, v_THV, *of_tokens, self.skip_H).flatten(1)


def test_value_heads_have_their_key_heads_side_by_side_or_in_turn() -> None:
    x_TGK = torch.arange(4.0).view(2, 2, 1)
    grouped, tiled = (of_value_heads(x_TGK, GatedDelta(2, 6, 1, 8, 2, tiled=its)) for its in (False, True))
    assert grouped.flatten(1).tolist() == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]
    assert tiled.flatten(1).tolist() == [[0, 1, 0, 1, 0, 1], [2, 3, 2, 3, 2, 3]]


def variants(dtype: torch.dtype) -> Iterator[native.Variant]:
    yield from native.supported_variants(8 * dtype.itemsize)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_instructions_give_what_torch_gives(shape: Shape, dtype: torch.dtype) -> None:
    for variant in variants(dtype):
        layer = Layer(shape, dtype, variant)
        inputs, rates = layer.rows(40)
        mixed, out = layer.run(inputs, rates, [StatePlace(2, -1)], [40])
        expected_mixed, expected_out = layer.expected(inputs, rates)
        of_bf16 = dtype is torch.bfloat16
        assert torch.allclose(mixed.float(), expected_mixed.float(), rtol=1e-2 if of_bf16 else 1e-5, atol=1e-6)
        scale = expected_out.abs().max()
        assert (out.float() - expected_out).abs().max() < scale * (2e-2 if of_bf16 else 1e-5)
        assert (out.float() - expected_out.roll(1, 0)).abs().max() > scale * 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[5]])
def test_avx2_and_avx512_give_the_same_bits(shape: Shape, dtype: torch.dtype) -> None:
    found = []
    for variant in variants(dtype):
        layer = Layer(shape, dtype, variant)
        if variant != "generic":
            found.append(layer.run(*layer.rows(40), [StatePlace(2, -1)], [40])[1])
    if len(found) < 2:
        pytest.skip("needs a CPU with AVX-512")
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_slots_threads_and_other_sequences_change_no_bit(
    shape: Shape, dtype: torch.dtype, num_threads: int
) -> None:
    alone = Layer(shape, dtype)
    inputs, rates = alone.rows(70)
    _, whole = alone.run(inputs, rates, [StatePlace(0, -1)], [70])
    layer, start, found = Layer(shape, dtype), 0, list[Tensor]()
    others = layer.rows(50, seed=1)
    native.set_num_threads(num_threads)
    for num, slot in ((1, 3), (2, 3), (50, 3), (1, 3), (16, 3)):
        rows = slice(start, start + num)
        both = [torch.cat([other[:5], own[rows]]) for other, own in zip(others, (inputs, rates), strict=True)]
        places = [StatePlace(1, -1), StatePlace(slot, slot if start else -1)]
        found.append(layer.run(both[0], both[1], places, [5, num])[1][5:])
        start += num
    native.set_num_threads(1)
    assert torch.equal(torch.cat(found), whole)
    assert torch.equal(layer.state.memory_NHKV[3], alone.state.memory_NHKV[0])
    assert torch.equal(layer.state.latest_NSC[3], alone.state.latest_NSC[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kept_row", [0, 1, 6, 19])
def test_a_state_is_kept_after_a_row_and_read_again(shape: Shape, kept_row: int) -> None:
    layer = Layer(shape, torch.float32)
    inputs, rates = layer.rows(20)
    _, whole = layer.run(inputs, rates, [StatePlace(0, -1, kept_row, 4)], [20])
    kept = [its[4].clone() for its in layer.state]
    num = 19 - kept_row
    if num:
        _, rest = layer.run(inputs[kept_row + 1 :], rates[kept_row + 1 :], [StatePlace(2, 4)], [num])
        assert torch.equal(rest, whole[kept_row + 1 :])
    assert all(torch.equal(its[4], before) for its, before in zip(layer.state, kept, strict=True))
    assert all(torch.equal(its[2 if num else 4], its[0]) for its in layer.state)


CONVOLUTIONS = (ShortConvolution(50, 3), ShortConvolution(16, 1), ShortConvolution(300, 7))


@dataclass
class Gated:
    """A program of one gated convolution, and its states."""

    convolution: ShortConvolution
    dtype: torch.dtype
    variant: native.Variant | None = None
    latest_NSC: Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        size, width = self.convolution.conv_size, self.convolution.conv_width
        self.factors_SC = torch.randn(size, width)
        self.latest_NSC = torch.full((NUM_SLOTS, size - 1, width), torch.nan)  # nobody may read it

    def run(self, inputs: Tensor, places: list[StatePlace], sizes: list[int]) -> Tensor:
        """Return what it gives for rows of sequences of these sizes."""
        width = self.convolution.conv_width
        program = Program({"in": 3 * width, "out": width}, self.dtype.itemsize, self.variant)
        out = torch.empty(len(inputs), width, dtype=self.dtype)
        program.place("in", inputs.data_ptr())
        program.place("out", out.data_ptr())
        convolve = Convolve(self.factors_SC.data_ptr(), None, 0, self.convolution.conv_size, gated=True)
        program.add("convolve", "in", "out", convolve)
        starts = array("i", [0, *torch.tensor(sizes).cumsum(0).tolist()])
        batch = _Batch(query_starts=starts.buffer_info()[0], num_seqs=len(sizes), num_tokens=len(inputs))
        cache = StateCache(self.latest_NSC.data_ptr(), None)
        fields = array("i", [number for place in places for number in place])
        states = fields.buffer_info()[0], (c_void_p * 1)(addressof(cache))
        program.run(len(inputs), batch=batch, states=states[0], state_caches=states[1])
        return out

    def rows(self, num: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(num, 3 * self.convolution.conv_width, generator=generator).to(self.dtype)

    def expected(self, inputs: Tensor) -> Tensor:
        """Return the same for one sequence from its first token on, in fp64."""
        b, c, x = inputs.double().chunk(3, dim=1)
        size = self.convolution.conv_size
        before = functional.pad(b * x, (0, 0, size - 1, 0))
        return c * torch.stack([before[i : i + len(b)] * self.factors_SC[i] for i in range(size)]).sum(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("convolution", CONVOLUTIONS)
def test_a_gated_convolution_gives_its_formula_by_all_instructions(
    convolution: ShortConvolution, dtype: torch.dtype
) -> None:
    found = dict[str, Tensor]()
    for variant in variants(dtype):
        layer = Gated(convolution, dtype, variant)
        inputs = layer.rows(40)
        found[variant] = layer.run(inputs, [StatePlace(2, -1)], [40])
        expected = layer.expected(inputs)
        assert torch.allclose(
            found[variant].double(), expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5
        )
        assert not torch.allclose(found[variant].double(), expected.roll(1, 0), rtol=0.1)
    vectors = [its for variant, its in found.items() if variant != "generic"]
    assert all(torch.equal(vectors[0], other) for other in vectors[1:])


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("convolution", CONVOLUTIONS)
def test_steps_slots_threads_and_other_sequences_change_no_bit_of_a_gated_convolution(
    convolution: ShortConvolution, dtype: torch.dtype, num_threads: int
) -> None:
    alone, layer = Gated(convolution, dtype), Gated(convolution, dtype)
    inputs, other, start, found = alone.rows(70), alone.rows(50, seed=1), 0, list[Tensor]()
    whole = alone.run(inputs, [StatePlace(0, -1)], [70])
    native.set_num_threads(num_threads)
    for num, slot in ((1, 3), (2, 3), (50, 3), (1, 3), (16, 3)):
        rows = torch.cat([other[:5], inputs[start : start + num]])
        found.append(layer.run(rows, [StatePlace(1, -1), StatePlace(slot, slot if start else -1)], [5, num])[5:])
        start += num
    native.set_num_threads(1)
    assert torch.equal(torch.cat(found), whole)
    assert torch.equal(layer.latest_NSC[3], alone.latest_NSC[0])


@pytest.mark.parametrize("convolution", CONVOLUTIONS)
@pytest.mark.parametrize("kept_row", [0, 1, 6, 19])
def test_inputs_of_a_gated_convolution_are_kept_after_a_row_and_read_again(
    convolution: ShortConvolution, kept_row: int
) -> None:
    layer = Gated(convolution, torch.float32)
    inputs = layer.rows(20)
    whole = layer.run(inputs, [StatePlace(0, -1, kept_row, 4)], [20])
    kept, num = layer.latest_NSC[4].clone(), 19 - kept_row
    if num:
        assert torch.equal(layer.run(inputs[kept_row + 1 :], [StatePlace(2, 4)], [num]), whole[kept_row + 1 :])
    assert torch.equal(layer.latest_NSC[4], kept)
    assert torch.equal(layer.latest_NSC[2 if num else 4], layer.latest_NSC[0])


def test_any_number_of_heads_and_sequences_is_computed() -> None:
    """More of them than the team takes chunks."""
    num = 18
    shape = GatedDelta(1, 4096, 8, 8, 2)
    layer = Layer(shape, torch.float32, num_slots=num)
    inputs, rates = layer.rows(1)
    places = [StatePlace(slot, -1) for slot in range(num)]
    _, out = layer.run(inputs.repeat(num, 1), rates.repeat(num, 1), places, [1] * num)
    assert torch.equal(out, out[:1].expand(num, -1))
    assert torch.allclose(out[0], layer.expected(inputs, rates)[1][0], rtol=1e-4, atol=1e-5)
