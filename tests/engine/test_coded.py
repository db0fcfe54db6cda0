"""Engines that compute with codes as a file stores them: their logits, what they hold, and how they are turned off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.linear import NativeCodedLinear, PackedRows
from gptserve.engine.engine import Engine
from gptserve.engine.runner.memory import codes_kept, held_weights, linear_bytes
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.families import load_config
from gptserve.weights.inventory import code_formats
from gptserve.weights.quantized.coded import CodedWeight, JoinedFormat
from gptserve.weights.source import resolve_model
from tests.engine.runs import make_engine, make_request, ragged_prompts, run
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES
from tests.weights.gguf.k_quants import TypeOf, q4_k_m
from tests.weights.gguf.test_codes import WIDE
from tests.weights.gguf.written import write_gguf
from tests.weights.quantized.formats import write
from tests.weights.quantized.test_integers import CASES

Q4_1, Q8_0 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0


def written(name: str, folder: Path, quant: GGMLQuantizationType | TypeOf = Q8_0) -> Path:
    """Return the folder of a model in GGUF. For several types its rows are wide."""
    model_type, settings = SHAPES[name]
    write_model(folder, model_type, settings if isinstance(quant, GGMLQuantizationType) else {**settings, **WIDE})
    write_gguf(folder, folder / "model.gguf", quant)
    return resolve_model(str(folder / "model.gguf"))


def logprobs(engine: Engine) -> torch.Tensor:
    """Return the logprobs of the tokens of some prompts."""
    requests = [
        make_request(str(i), prompt, max_tokens=1, prompt_logprobs=1)
        for i, prompt in enumerate(ragged_prompts(engine.info.vocab_size, 4, 24))
    ]
    entries = [
        entry.logprob
        for outputs in run(engine, requests).values()
        for entry in outputs[0].prompt_logprobs or ()
        if entry is not None
    ]
    return torch.tensor(entries)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "name",
    [
        *("Llama", "GPT-NeoX", "Llama, biases, own head size, tied", "Mixtral, past its window", "Qwen3.5"),
        *("Granite 4-H", "Nemotron-H", "Falcon-H1"),
    ],
)
def test_codes_of_8_bits_give_nearly_what_they_are_unpacked_to(name: str, tmp_path: Path) -> None:
    folder = written(name, tmp_path)
    stored = make_engine(folder, dtype="float32")
    unpacked = make_engine(folder, dtype="float32", quantization="none")
    assert (stored.info.product, unpacked.info.product) == ("native_coded", "native")
    assert stored.info.fingerprint != unpacked.info.fingerprint
    found, expected = logprobs(stored), logprobs(unpacked)
    assert not torch.equal(found, expected)
    assert (found - expected).std() < 0.04 * expected.std()


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["awq", "gptq, joined", "packed", "mlx"])
def test_codes_of_folders_give_nearly_what_they_are_unpacked_to(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    plain = write(folder, CASES[name])
    stored, unpacked = make_engine(folder, dtype="float32"), make_engine(folder, dtype="float32", quantization="none")
    assert (stored.info.product, unpacked.info.product) == ("native_coded", "native")
    found, expected = logprobs(stored), logprobs(unpacked)
    assert torch.equal(expected, logprobs(make_engine(plain, dtype="float32")))
    assert not torch.equal(found, expected)
    assert (found - expected).std() < 0.04 * expected.std()


@pytest.mark.parametrize(("name", "bound"), [("Llama", 0.04), ("Qwen3.5", 0.06)])
def test_several_types_in_a_layer_give_nearly_what_they_are_unpacked_to(
    name: str, bound: float, tmp_path: Path
) -> None:
    folder = written(name, tmp_path, q4_k_m)
    stored, unpacked = (make_engine(folder, dtype="float32", quantization=its) for its in (None, "none"))
    assert (stored.info.product, unpacked.info.product) == ("native_coded", "native")
    found, expected = logprobs(stored), logprobs(unpacked)
    assert not torch.equal(found, expected)
    assert (found - expected).std() < bound * expected.std()


@pytest.mark.parametrize("quant", [Q8_0, Q4_1, q4_k_m], ids=["Q8_0", "Q4_1", "Q4_K_M"])
def test_an_embedding_is_read_from_the_codes_of_its_head(quant: GGMLQuantizationType | TypeOf, tmp_path: Path) -> None:
    folder = written("Llama, biases, own head size, tied", tmp_path, quant)
    model = load_config(folder)
    found = make_engine(folder, dtype="bfloat16")._runner._decoder._embedding
    (table,) = (
        tensor
        for name, tensor in Checkpoint(folder, model).stream(dtype=torch.bfloat16, device="cpu")
        if name == "embed.weight"
    )
    assert isinstance(table, torch.Tensor)
    assert isinstance(found, PackedRows)
    assert torch.equal(found[torch.arange(model.vocab_size)], table)

    codes = codes_kept(model, code_formats(folder, model))
    sizes = {its.name: its.num_bytes for its in held_weights(model, 2, codes=codes)}
    num_bytes = codes["embed.weight"].num_bytes((model.vocab_size, model.hidden_size))
    assert (sizes["embed.weight"], sizes["head.weight"]) == (num_bytes, 0)


def test_without_the_library_and_in_int8_they_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written("Llama", tmp_path)
    assert make_engine(folder, dtype="bfloat16", quantization="int8").info.product == "native_coded"
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert make_engine(folder, dtype="float32").info.product in ("onednn", "torch")


@pytest.mark.some(3)
@pytest.mark.parametrize("quant", [Q4_1, Q8_0, q4_k_m], ids=lambda its: getattr(its, "name", "Q4_K_M"))
@pytest.mark.parametrize("name", ["Llama", "Llama, biases, own head size, tied", "Mixtral, past its window", "Qwen3.5"])
def test_the_plan_has_the_bytes_that_the_linears_hold(
    name: str, quant: GGMLQuantizationType | TypeOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(name, tmp_path, quant)
    model = load_config(folder)
    codes = codes_kept(model, code_formats(folder, model))
    held: list[int] = []
    pack = NativeCodedLinear._pack_codes

    def counted(self: NativeCodedLinear, weight: CodedWeight) -> int:
        address = pack(self, weight)
        (num_out, num_in), packed = weight.shape, self._kept[-1]
        padded = -(-num_out // native.COLUMNS) * native.COLUMNS, num_in
        assert packed.nbytes == weight.format.num_bytes(padded)
        held.append(packed.nbytes)
        return address

    monkeypatch.setattr(NativeCodedLinear, "_pack_codes", counted)
    make_engine(folder, dtype="bfloat16")
    num_parts = [len(its.parts) if isinstance(its, JoinedFormat) else 1 for its in codes.values()]
    assert len(held) == sum(num_parts)
    assert (max(num_parts) > 1) == (quant is q4_k_m)
    planned = [entry for entry in held_weights(model, 2, codes=codes) if entry.type is not None and entry.num_bytes]
    assert {entry.type for entry in planned} == {its.name for its in codes.values()}
    assert len(planned) == len(codes)
    assert sum(held) * 0.8 < sum(entry.num_bytes for entry in planned) <= sum(held)  # which has padding
    assert linear_bytes(model, None, 2, codes) < linear_bytes(model, None, 2)
