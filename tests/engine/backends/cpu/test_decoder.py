"""Which models a program computes, and that its buffers grow; tests/parity compares every family with the formulas."""

from __future__ import annotations

import logging
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.cpu.decoder import NativeDecoder
from gptserve.engine.engine import Engine
from gptserve.engine.model.batch import model_input
from gptserve.engine.model.layout import Span, lay_out
from gptserve.engine.runner import batch_invariance, products, runner
from tests.engine.runs import make_engine, make_request, ragged_prompts, run
from tests.parity.models import write_model
from tests.parity.shapes import FIRST, SHAPES, UNLIKE

pytestmark = pytest.mark.skipif(
    not (native.is_available() and CpuAttention.is_available()), reason="the libraries are not built"
)

NO_PROGRAM = "torch runs the operations of a step, not a program: "
OBSTACLES: dict[str, tuple[str, dict[str, Any], str]] = {
    "the reference": ("GPT-2", {"attention_backend": "reference"}, "attention is 'reference'"),
    "a narrow model": ("GPT-2, one layer of one head", {}, "a linear's input is not a multiple of 32 wide"),
    "narrow heads": ("GPT-2, head size 24, wide ffn", {}, "a linear's input is not a multiple of 32 wide"),
}


def obstacle(folder: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> str | None:
    """Return why an engine of this model has no program, as it is logged; None if it has one."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        make_engine(folder, **{"dtype": "bfloat16", **options})
    reasons = [message.partition(NO_PROGRAM)[2] for message in caplog.messages if NO_PROGRAM in message]
    assert len(reasons) <= 1
    return reasons[0] if reasons else None


@pytest.mark.parametrize("case", OBSTACLES)
def test_what_no_program_can_compute_is_told(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shape, options, expected = OBSTACLES[case]
    write_model(tmp_path, *SHAPES[shape])
    assert obstacle(tmp_path, caplog, **options) == expected


def test_other_products_leave_a_model_to_torch(
    tiny_gpt2: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (products, runner, batch_invariance):
        monkeypatch.setattr(module, "product_of", lambda *choice: "onednn")
    found = obstacle(tiny_gpt2, caplog, dtype="float32")
    assert found == "its products are not those of engine/backends/cpu"


WITH_EXPERTS = "gpt-oss, past its window"
GATED = "Trinity, past its window", "Laguna, gates of heads"
FAMILIES = [
    *("GPT-1", "GPT-2", "GPT-J", "BLOOM", "OPT 350M's layout", "Llama", "Qwen3", "Gemma 3, past its window"),
    *("OLMo 2", WITH_EXPERTS, *GATED),
]


both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.mark.some(2)
@both_dtypes
@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=() if shape in UNLIKE else pytest.mark.slow) for shape in FIRST.values()]
)
def test_every_family_has_a_program(shape: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, *SHAPES[shape])
    assert obstacle(tmp_path, caplog, dtype=dtype) is None


INT8: tuple[native.Variant, ...] = ("avx_vnni", "avx512_vnni")


@pytest.mark.slow
@pytest.mark.skipif("avx512" not in native.supported_variants(16), reason="this CPU has no AVX-512")
@both_dtypes
@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("other", [None, *(pytest.param(other, marks=pytest.mark.slow) for other in INT8[:2])])
def test_programs_give_the_same_bits_by_avx2_as_by_others(
    other: native.Variant | None,
    shape: str,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where attention is computed by the same instructions: without int8, and in int8 by each variant ."""
    if other is not None and other not in native.supported_variants(native.CODED_VARIANTS):
        pytest.skip(f"this CPU has no {other}")
    quantization = None if other is None else "int8"
    write_model(tmp_path, *SHAPES[shape])
    requests = [make_request(str(i), [i + 1] * (3 + 9 * i), max_tokens=4, logprobs=3) for i in range(4)]

    def told(variant: native.Variant, int8_variant: native.Variant | None) -> list[object]:
        monkeypatch.setattr(native, "supported_variants", lambda bits: (int8_variant if bits < 16 else variant,))
        assert obstacle(tmp_path, caplog, dtype=dtype, quantization=quantization) is None
        outputs = run(make_engine(tmp_path, dtype=dtype, quantization=quantization), requests)
        return [(output.token_ids, output.logprobs) for request in requests for output in outputs[request.request_id]]

    assert told("avx2", "avx2") == told("avx512", other)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("shape", "quantization", "is_wide"),
    [
        ("GPT-2", "int8", True),
        ("Llama", "int8", True),
        ("OPT 350M's layout", "int8", True),
        ("Llama", None, False),
        ("Gemma 2, past its window", "int8", True),
        (WITH_EXPERTS, "int8", False),
    ],
)
def test_what_products_read_is_in_fp32_if_all_weights_are_integers(
    shape: str,
    quantization: str | None,
    is_wide: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not in a mixture, whose router keeps bf16."""
    write_model(tmp_path, *SHAPES[shape])
    assert obstacle(tmp_path, caplog, dtype="bfloat16", quantization=quantization) is None
    made = program_of(make_engine(tmp_path, dtype="bfloat16", quantization=quantization))
    wide = {name.partition(" ")[0] for name, dtype in made._dtypes.items() if dtype is torch.float32}
    assert wide == {"x", "taken"} | ({"embedded", "h", "h2", "up", "gated"} if is_wide else set())


@pytest.mark.some(2)
@pytest.mark.parametrize("shape", [WITH_EXPERTS, pytest.param("GLM 4.5, in groups", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [("float32", None, 5e-4), ("float32", "int8", 5e-3), ("bfloat16", None, 0.05), ("bfloat16", "int8", 0.05)],
)
def test_a_program_mixes_experts_as_torch_does(
    dtype: str, quantization: str | None, tolerance: float, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of one row, and of many; the logprobs of other prompts differ by far more.

    In int8 the last bits of a row decide to which code a number of it is rounded.
    """
    write_model(tmp_path, *SHAPES[shape])
    by_program, by_torch = logprobs_of_both(tmp_path, monkeypatch, dtype=dtype, quantization=quantization)
    assert (by_program - by_torch).abs().mean() < tolerance < 0.5 < (by_program - by_torch.roll(1)).abs().mean()


@pytest.mark.some(3)
@pytest.mark.parametrize("shape", GATED)
@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [
        ("float32", None, 5e-4),
        ("float32", "int8", 0.02),
        ("float32", "int4", 0.02),
        ("bfloat16", None, 0.1),
        ("bfloat16", "int8", 0.1),
        ("bfloat16", "int4", 0.1),
    ],
)
def test_a_program_gates_attention_as_torch_does(
    dtype: str, quantization: str | None, tolerance: float, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in integers jump where one rounds otherwise; the logprobs of other prompts differ by far more."""
    write_model(tmp_path, *SHAPES[shape])
    by_program, by_torch = logprobs_of_both(tmp_path, monkeypatch, dtype=dtype, quantization=quantization)
    assert (by_program - by_torch).abs().mean() < tolerance < 0.5 < (by_program - by_torch.roll(1)).abs().mean()


def logprobs_of_both(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the logprobs of prompts by a program and by torch, in steps of one row, and of many."""
    requests = [
        make_request(str(i), prompt, max_tokens=1, prompt_logprobs=0)
        for i, prompt in enumerate([[5], *ragged_prompts(6, 60), [7, 7]])
    ]

    def logprobs() -> Tensor:
        engine, found = make_engine(folder, **options), list[float]()
        for together in (requests[:1], requests[1:]):
            outputs = run(engine, together)
            entries = [e for r in together for o in outputs[r.request_id] for e in o.prompt_logprobs or () if e]
            found += [entry.logprob for entry in entries]
        return torch.tensor(found)

    by_program = logprobs()
    monkeypatch.setattr(runner, "native_decoder", lambda *arguments: None)
    by_torch = logprobs()
    assert len(by_torch) > 100
    return by_program, by_torch


def test_the_embedded_model_has_programs(storyteller: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert obstacle(storyteller, caplog) is None


@both_dtypes
def test_a_step_may_have_more_rows_than_those_before(tiny_gpt2: Path, dtype: str) -> None:
    """And fewer again; the tokens are those of an engine that begins with this request."""
    requests = [make_request(str(i), [i + 1] * (3 + 20 * i), max_tokens=5, logprobs=0) for i in range(4)]
    engine = make_engine(tiny_gpt2, dtype=dtype)
    for request in requests[:2] + requests[::-1]:
        outputs, alone = (
            run(its, [request])[request.request_id] for its in (engine, make_engine(tiny_gpt2, dtype=dtype))
        )
        assert [(o.token_ids, o.logprobs) for o in outputs] == [(o.token_ids, o.logprobs) for o in alone]


def test_tokens_of_a_program_are_those_that_torch_computes(tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32; in bf16 torch rounds more often."""
    requests = [make_request(str(i), [i + 1] * (3 + 20 * i), max_tokens=5, logprobs=0) for i in range(4)]

    def texts() -> list[list[tuple[int, ...]]]:
        engine = make_engine(tiny_gpt2, dtype="float32")
        return [[output.token_ids for output in run(engine, [r])[r.request_id]] for r in requests[:2] + requests[::-1]]

    by_programs = texts()
    monkeypatch.setattr(runner, "native_decoder", lambda *arguments: None)
    assert by_programs == texts()


@pytest.mark.some(3)
@both_dtypes
@pytest.mark.parametrize("shape", ["GPT-2", "Gemma 3, past its window", "OPT 350M's layout"])
@pytest.mark.parametrize("rows", [[], [0], [13], [2, 3, 9], list(range(14))])
def test_logits_of_taken_rows_are_those_of_all_hidden_states(
    rows: list[int], shape: str, dtype: str, tmp_path: Path
) -> None:
    write_model(tmp_path, *SHAPES[shape])
    engine = make_engine(tmp_path, dtype=dtype)
    made, cache = program_of(engine), engine._runner._cache
    arrays = lay_out([prompt(i) for i in range(2)], engine.info.block_size)
    made.run(arrays, cache)
    hidden, expected = made.hidden_states(14).clone(), made.logits(slice(14))
    made.run(arrays._replace(sampled=array("q", rows)), cache)
    logits = made.sampled_logits(len(rows)).clone()
    assert torch.equal(made.hidden_states(14), hidden)
    assert torch.equal(logits, expected[rows])
    assert torch.equal(made.logits(slice(3, 9)), expected[3:9])
    assert rows in ([], [0]) or not torch.equal(logits, expected[[0] * len(rows)]), "as if it took others"


def program_of(engine: Engine) -> NativeDecoder:
    made = engine._runner._decoder.program
    assert isinstance(made, NativeDecoder)
    return made


def prompt(number: int) -> Span:
    """Return a prompt of 7 tokens in the block of this number."""
    return Span([(5 * i + 3 * number + 1) % 50 for i in range(7)], 0, [number], num_sampled=1)


def test_the_stream_is_not_rounded_to_bf16(tmp_path: Path) -> None:
    """So outlier channels, as GPT-2 has, cost less. The weights are bf16's, so the error is all of the computation."""
    write_model(tmp_path, *SHAPES["GPT-2"])
    tensors = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if name.endswith(("wte.weight", "wpe.weight", "c_proj.weight", "c_proj.bias")):
            tensor[..., :2] *= 20
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")

    def hidden(dtype: str, *, by_program: bool = True) -> Tensor:
        engine = make_engine(tmp_path, dtype=dtype)
        arrays, cache = lay_out([prompt(1)], engine.info.block_size), engine._runner._cache
        if by_program:
            program_of(engine).run(arrays, cache)
            return program_of(engine).hidden_states(7).double()
        inputs = model_input(arrays.as_numpy(), torch.device("cpu"))
        step = inputs.token_ids_T, inputs.positions_T, cache, inputs.metadata
        return engine._runner._decoder.hidden_states(*step).double()

    exact, by_program, by_torch = hidden("float32"), hidden("bfloat16"), hidden("bfloat16", by_program=False)
    error, rounded = ((found - exact)[:, :2].abs().mean() for found in (by_program, by_torch))
    assert 0 < error < 0.75 * rounded
