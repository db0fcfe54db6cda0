"""The squares of a model's inputs: those that torch finds with exact weights, of every linear, each time the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.linear import NativeLinear
from gptserve.engine.config import EngineConfig, Quantization
from gptserve.engine.model.batch import model_input
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.model.layout import Span, lay_out
from gptserve.engine.model.linear import Affine, DenseLinear, Linear
from gptserve.engine.model.trial import Trial
from gptserve.engine.runner import input_squares as module
from gptserve.engine.runner.input_squares import AwaitingLinears, linears_of
from gptserve.engine.runner.kv_cache import KVCache
from gptserve.engine.runner.products import Linears
from gptserve.engine.runner.setup import Setup, set_up
from gptserve.weights.loading_threads import loading_threads
from gptserve.weights.mappings import map_memory
from gptserve.weights.sharding import WHOLE
from gptserve.weights.unread import UnreadWeight
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
        weight = affine.weight.whole() if isinstance(affine.weight, UnreadWeight) else affine.weight
        assert isinstance(weight, Tensor)
        linear = DenseLinear(weight, affine.bias, affine.activation, affine.out_dtype)
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


def load(config: EngineConfig, setup: Setup, told: list[tuple[int, int]] | None = None) -> Decoder:
    """Return a decoder of codes, of which each part is made; `told` gets the bytes that were read."""
    progress = None if told is None else lambda *its: told.append(its)
    maker, trial = linears_of(config, setup)
    operations = setup.operations
    return Decoder(setup.model, setup.stream(progress), setup.backend, maker, operations=operations, trial=trial)


@contextmanager
def seen_squares() -> Iterator[dict[str, Tensor]]:
    """Give the squares by which linears are made, by their names."""
    found, make = dict[str, Tensor](), Linears.make

    def seeing(self: Linears, name: str, affine: Affine) -> Linear:
        if name in self._squares:
            found[name] = self._squares[name]
        return make(self, name, affine)

    with patch.object(Linears, "make", seeing):
        yield found


def packed(decoder: Decoder) -> dict[str, Tensor]:
    """Return what the linears make of rows that are all different."""
    found = dict[str, Tensor]()
    for name, linear in decoder._source.linears.items():
        assert isinstance(linear, NativeLinear)
        x = torch.randn(2, linear.num_in, generator=torch.Generator().manual_seed(0)).to(linear.dtype)
        found[name] = linear(x)
    return found


@of_both
@pytest.mark.parametrize("name", NAMES)
def test_they_are_nearly_those_of_the_exact_weights(name: str, quantization: Quantization, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES[name])
    config = EngineConfig(tmp_path, device="cpu", dtype="float32", quantization=quantization)
    with torch.inference_mode():
        setup = set_up(config, WHOLE, 1)
        exact = exact_inputs(setup)
        with seen_squares() as found:
            load(config, setup)
        with seen_squares() as again:
            load(config, setup)
    assert found.keys() == {name for name in exact if not name.endswith("router")} == again.keys()
    for linear, squares in found.items():
        assert torch.equal(squares, again[linear])
        rows = torch.cat(exact[linear]) if exact[linear] else torch.zeros(1, len(squares))
        expected = rows.double().square().mean(0).float()
        assert squares.dtype is torch.float32
        if "experts" not in linear:  # which other tokens may choose
            assert torch.corrcoef(torch.stack([squares, expected]))[0, 1] > 0.8


@of_both
@pytest.mark.parametrize("name", NAMES)
def test_each_weight_has_the_codes_of_its_squares(name: str, quantization: Quantization, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES[name])
    config = EngineConfig(tmp_path, device="cpu", dtype="float32", quantization=quantization)
    with torch.inference_mode():
        setup = set_up(config, WHOLE, 1)
        with seen_squares() as squares:
            decoder = load(config, setup)
        num_layers = setup.model.num_layers
        by_squares, nearest = (
            packed(
                Decoder(setup.model, setup.stream(), setup.backend, Linears(quantization, None, None, its, num_layers))
            )
            for its in (squares, {})
        )
        found = packed(decoder)
    assert found.keys() == by_squares.keys() > {"head", "blocks.1.qkv"}
    for linear, rows in found.items():
        assert torch.equal(rows, by_squares[linear])
        assert linear.endswith("router") == torch.equal(rows, nearest[linear]) or ".experts." in linear


@of_both
def test_codes_depend_on_no_threads(quantization: Quantization, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES[NAMES[0]])
    config = EngineConfig(tmp_path, device="cpu", dtype="bfloat16", quantization=quantization)
    found, before = [], native.num_threads()
    try:
        for num_threads in (1, 3):
            native.set_num_threads(num_threads)
            with torch.inference_mode(), loading_threads(num_threads):
                found.append(packed(load(config, set_up(config, WHOLE, num_threads))))
    finally:
        native.set_num_threads(before)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@of_both
def test_an_expert_that_no_token_chooses_has_no_squares(
    quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NUM_SEQUENCES", 1)
    monkeypatch.setattr(module, "MAX_TOKENS", 1)
    write_model(tmp_path, *SHAPES[NAMES[1]])
    config = EngineConfig(tmp_path, device="cpu", dtype="float32", quantization=quantization)
    with torch.inference_mode(), seen_squares() as squares:
        decoder = load(config, setup := set_up(config, WHOLE, 1))
    experts = setup.model.layers[0].experts
    assert experts is not None
    names = [f"blocks.0.experts.{e}.ffn_down" for e in range(experts.num_all)]
    assert sum(bool(squares[name].any()) for name in names) == experts.num_per_row < experts.num_all
    assert all(isinstance(decoder._source.linears[name], NativeLinear) for name in names)


@of_both
@pytest.mark.parametrize("name", ["OPT 350M's layout", "GPT-2", "GPT-J", "Llama"])
def test_any_family_has_squares_of_all_linears(name: str, quantization: Quantization, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES[name])
    config = EngineConfig(tmp_path, device="cpu", dtype="float32", quantization=quantization)
    with torch.inference_mode(), seen_squares() as squares:
        decoder = load(config, set_up(config, WHOLE, 1))
    assert squares.keys() == decoder._source.linears.keys()
    assert all(its.any() for its in squares.values())
    assert not isinstance(decoder._embedding, UnreadWeight)
    maker = decoder._source.maker
    assert isinstance(maker, AwaitingLinears)
    assert not maker.squares  # as they are not held for longer than needed
    assert type(decoder._source.trial) is Trial


@of_both
def test_weights_are_read_once_into_memory_that_is_there(
    quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, *SHAPES[NAMES[0]])
    config = EngineConfig(tmp_path, device="cpu", dtype="float32", quantization=quantization)
    told, found, read = list[tuple[int, int]](), [], Counter[int]()
    rows = UnreadWeight.rows

    def counted(self: UnreadWeight, its_rows: slice) -> Tensor:
        read[id(self)] += its_rows.stop - its_rows.start
        assert read[id(self)] <= self.shape[0]
        kept.append(self)
        return rows(self, its_rows)

    kept = list[UnreadWeight]()  # so that no other has its id
    monkeypatch.setattr(UnreadWeight, "rows", counted)
    with torch.inference_mode():
        setup = set_up(config, WHOLE, 1)
        for memory in (None, map_memory(2**22)):
            monkeypatch.setattr(module, "take_populated", lambda memory=memory: memory)
            found.append(packed(load(config, setup, told)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert all(read[id(its)] == its.shape[0] for its in kept)
    assert len(read) == 2 * len(setup.unread)
    assert told[: len(told) // 2] * 2 == told == sorted(told[: len(told) // 2]) * 2
    assert told[-1] == (setup.checkpoint.num_bytes,) * 2
