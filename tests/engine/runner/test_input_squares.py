"""The squares of a model's inputs: those that torch finds with exact weights, of every linear, each time the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.config import EngineConfig, Quantization
from gptserve.engine.model.batch import model_input
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.model.layout import Span, lay_out
from gptserve.engine.model.linear import Affine, DenseLinear
from gptserve.engine.runner import input_squares as module
from gptserve.engine.runner.input_squares import input_squares, linears_of
from gptserve.engine.runner.kv_cache import KVCache
from gptserve.engine.runner.setup import Setup, set_up
from gptserve.weights.mappings import map_memory
from gptserve.weights.sharding import WHOLE
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the compiled library is missing")
of_both = pytest.mark.parametrize("quantization", ["int8", "int4"])
NAMES = ("Llama, biases, own head size, tied", "Mixtral, past its window")


class Exact:
    """Makes torch's linears that keep all rows which come. A LinearMaker."""

    def __init__(self) -> None:
        self.inputs: dict[str, list[Tensor]] = {}

    def rows_of(self, linear: object) -> None:
        return None

    def make(self, name: str, affine: Affine) -> object:
        assert isinstance(affine.weight, Tensor)
        linear = DenseLinear(affine.weight, affine.bias, affine.activation, affine.out_dtype)
        kept = self.inputs.setdefault(name, [])

        def multiply(x: Tensor, residual: Tensor | None = None) -> Tensor:
            kept.append(x)
            return linear(x, residual)

        return multiply


def exact_inputs(setup: Setup) -> dict[str, list[Tensor]]:
    """Return all rows of the inputs of each linear, of the tokens that are drawn, with the weights as they are."""
    maker, model = Exact(), setup.model
    decoder = Decoder(model, setup.stream(), setup.backend, maker)  # type: ignore[arg-type]
    num = min(module.MAX_TOKENS, model.max_position)
    decoder.set_max_model_len(num)
    ids = torch.randint(model.vocab_size, (module.NUM_SEQUENCES, num), generator=torch.Generator().manual_seed(0))
    for row in ids.tolist():
        step = model_input(lay_out([Span(row, 0, range(1))], num).as_numpy(), setup.device)
        cache = KVCache(model, 1, num, setup.dtype, setup.device)
        decoder.step(step.token_ids_T, step.positions_T, cache, step.metadata, torch.arange(num))
    return maker.inputs


@of_both
@pytest.mark.parametrize("name", NAMES)
def test_they_are_nearly_those_of_the_exact_weights(name: str, quantization: Quantization, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES[name])
    config = EngineConfig(tmp_path, device="cpu", dtype="float32", quantization=quantization)
    with torch.inference_mode():
        setup = set_up(config, WHOLE, 1)
        found, exact = input_squares(config, setup), exact_inputs(setup)
        again = input_squares(config, setup)
    assert set(found) == {name for name in exact if name.startswith("blocks.") or name == "head"}
    for linear, squares in found.items():
        assert torch.equal(squares, again[linear])
        rows = torch.cat(exact[linear]) if exact[linear] else torch.zeros(1, len(squares))
        expected = rows.double().square().mean(0).float()
        assert squares.dtype is torch.float32
        if "experts" not in linear:  # which other tokens may choose
            assert torch.corrcoef(torch.stack([squares, expected]))[0, 1] > 0.8


@of_both
def test_memory_is_used_twice_and_the_weights_are_the_same(
    quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, *SHAPES[NAMES[0]])
    config = EngineConfig(tmp_path, device="cpu", dtype="float32", quantization=quantization)
    told = list[tuple[int, int]]()
    packed = list[list[Tensor]]()
    with torch.inference_mode():
        setup = set_up(config, WHOLE, 1)
        for memory in (None, map_memory(2**22)):
            monkeypatch.setattr(module, "take_populated", lambda memory=memory: memory)
            maker, progress = linears_of(config, setup, lambda *its: told.append(its))
            decoder = Decoder(setup.model, setup.stream(progress), setup.backend, maker, operations=setup.operations)
            linears = decoder._source.linears.values()
            packed.append([linear(torch.ones(1, linear.num_in)) for linear in linears])  # type: ignore[attr-defined]
    assert all(torch.equal(*pair) for pair in zip(*packed, strict=True))
    total = 2 * setup.checkpoint.num_bytes
    first = told[: len(told) // 2]
    assert told == first * 2
    assert first == sorted(first)
    assert first[len(first) // 2 - 1 :: len(first) // 2] == [(total // 2, total), (total, total)]
