"""The inputs of layers, against their formula in fp64; a table of them may be in codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.int8 import FORMAT
from gptserve.engine.backends.cpu.linear import PackedRows
from gptserve.engine.model.layer_inputs import LayerInput, LayerInputs
from gptserve.engine.model.linear import Weight
from gptserve.engine.model.loading import StreamedTensors
from gptserve.engine.runner.products import Linears
from gptserve.weights.config import ModelConfig
from tests.engine.backends.cpu.coded import random_weight
from tests.engine.model.small_shape import MODEL

SIZE, VOCAB, NUM_LAYERS, HIDDEN = 32, MODEL.vocab_size, MODEL.num_layers, MODEL.hidden_size
CONFIG: ModelConfig = replace(
    MODEL, layer_input_size=SIZE, norm="rmsnorm", norm_bias=False, norm_eps=1e-2, activation="gelu_tanh"
)
IDS = torch.tensor([3, 0, 9, 3])


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * weight.double()


def of_all(table: Weight) -> dict[str, Weight]:
    torch.manual_seed(0)
    return {
        "input_embed.weight": table,
        "input_proj.weight": torch.randn(NUM_LAYERS * SIZE, HIDDEN),
        "input_norm.weight": torch.randn(SIZE),
    }


def stream(tensors: dict[str, Weight]) -> Iterator[tuple[str, Weight]]:
    yield from tensors.items()


def test_each_layer_has_its_part_of_a_row_and_of_a_projection() -> None:
    table, x = torch.randn(VOCAB, NUM_LAYERS * SIZE), torch.randn(len(IDS), HIDDEN)
    tensors = of_all(table)
    found = LayerInputs(CONFIG, StreamedTensors(stream(tensors)))(IDS, x)
    projection, weight = tensors["input_proj.weight"], tensors["input_norm.weight"]
    assert isinstance(projection, Tensor)
    assert isinstance(weight, Tensor)
    assert len(found) == NUM_LAYERS
    for layer, its in enumerate(found):
        rows = slice(layer * SIZE, (layer + 1) * SIZE)
        projected = norm(x.double() @ projection[rows].double().T / HIDDEN**0.5, weight)
        expected = (table[IDS][:, rows].double() * SIZE**0.5 + projected) / 2**0.5
        torch.testing.assert_close(its.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not native.is_available(), reason="the library is not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_in_codes_gives_what_its_numbers_do_and_is_held_in_codes(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, x = random_weight(FORMAT, VOCAB, NUM_LAYERS * SIZE, dtype), torch.randn(len(IDS), HIDDEN).to(dtype)
    weight.scales.clamp_(-1, 1)
    values = weight.values(slice(None))
    found, kinds = [], []
    for table in (weight, values):
        tensors = {name: its.to(dtype) if isinstance(its, Tensor) else its for name, its in of_all(table).items()}
        source = StreamedTensors(stream(tensors), Linears())
        found.append(torch.stack(LayerInputs(CONFIG, source)(IDS, x)))
        kinds.append(type(source.tables["input_embed"][0]))
    assert kinds == [PackedRows, Tensor]
    assert torch.equal(*found)
    assert not torch.equal(found[0][:, 0], found[0][:, 1])


def test_a_layer_adds_what_its_gate_lets_through() -> None:
    torch.manual_seed(2)
    gate, out, weight = torch.randn(SIZE, HIDDEN) / 8, torch.randn(HIDDEN, SIZE), torch.randn(HIDDEN)
    tensors: dict[str, Weight] = {
        "b.input_gate.weight": gate,
        "b.input_out.weight": out,
        "b.input_output_norm.weight": weight,
    }
    x, its = torch.randn(4, HIDDEN), torch.randn(4, SIZE)
    found = LayerInput(CONFIG, StreamedTensors(stream(tensors)), "b")(x, its)
    gated = functional.gelu(x.double() @ gate.double().T, approximate="tanh") * its.double()
    expected = x.double() + norm(gated @ out.double().T, weight)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
