"""Engines that make codes of 4 bits of float weights: the storyteller's perplexity, any family, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.int4 import NativeInt4Linear
from gptserve.engine.backends.cpu.linear import PackedRows
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.runner.memory import held_weights
from gptserve.weights.families import load_config
from tests.engine.runs import make_engine, make_request, ragged_prompts, run, token_ids
from tests.engine.test_int8 import NUM_STORIES, STORYTELLER, scores
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the compiled library is missing")
GATE = ("Llama, biases, own head size, tied", "Mixtral, past its window")


@pytest.mark.parametrize("num_stories", NUM_STORIES)
def test_the_perplexity_is_at_most_four_percent_worse(num_stories: int) -> None:
    bf16, _ = scores(make_engine(STORYTELLER, dtype="bfloat16"), num_stories)
    int4, _ = scores(make_engine(STORYTELLER, dtype="bfloat16", quantization="int4"), num_stories)
    print(f"perplexity: bf16 {math.exp(bf16):.4f}, int4 {math.exp(int4):.4f}")  # noqa: T201 - shown by pytest -rP
    assert int4 != bf16
    assert math.exp(int4 - bf16) < 1.04


@pytest.mark.parametrize("name", [*GATE, *(pytest.param(name, marks=pytest.mark.slow) for name in SHAPES)])
def test_any_family_computes_in_int4_and_alone_as_in_a_batch(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES[name])
    requests = [make_request(str(i), ids, max_tokens=6, logprobs=2) for i, ids in enumerate(ragged_prompts(5, 20))]
    results = []
    for options in ({"max_num_seqs": 5}, {"max_num_seqs": 1, "max_num_batched_tokens": 3}, {"quantization": None}):
        engine = make_engine(tmp_path, **{"quantization": "int4", **options})
        outputs = run(engine, requests)
        results.append([(token_ids(o), [entry for output in o for entry in output.logprobs]) for o in outputs.values()])
    batched, alone, exact = results
    assert batched == alone
    assert batched != exact


def write_tied(folder: Path, hidden_size: int) -> None:
    model_type, shape = SHAPES["Llama, biases, own head size, tied"]
    write_model(folder, model_type, shape | {"hidden_size": hidden_size})


@pytest.mark.parametrize(("hidden_size", "head_bits"), [(64, 8), (256, 6)])
def test_a_tied_head_holds_the_embedding_and_the_plan_has_what_is_held(
    hidden_size: int, head_bits: int, tmp_path: Path
) -> None:
    write_tied(tmp_path, hidden_size)
    engine = make_engine(tmp_path, quantization="int4", dtype="bfloat16")
    assert engine.info.product == "native_coded"
    decoder = engine._runner._decoder
    assert isinstance(decoder._embedding, PackedRows)
    held = 0
    for linear in decoder._source.linears.values():
        assert isinstance(linear, NativeInt4Linear)
        held += linear._kept[0].nbytes
    assert decoder._source.linears["head"].weight.element_bits == head_bits  # type: ignore[attr-defined]
    planned = [its.num_bytes for its in held_weights(load_config(tmp_path), 2, "int4") if its.type is not None]
    assert held * 0.8 < sum(planned) <= held  # which has padding
    exact, int8 = (make_engine(tmp_path, quantization=its, dtype="bfloat16").info for its in (None, "int8"))
    assert len({engine.info.fingerprint, exact.fingerprint, int8.fingerprint}) == 3


@pytest.mark.parametrize("hidden_size", [64, 256])
def test_programs_and_torch_embed_alike(hidden_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tied(tmp_path, hidden_size)
    # Rows are codes, too: in a prompt that begins with 1, 2, 3 an element lies halfway between two.
    prompts = ([5, 6, 7], [9, 8, 7, 6, 5], [11, 3], [4, 3, 2, 1])
    requests = [make_request(str(i), ids, max_tokens=6, logprobs=2) for i, ids in enumerate(prompts)]
    by_program = make_engine(tmp_path, quantization="int4", dtype="float32")
    monkeypatch.setattr("gptserve.engine.runner.runner.native_decoder", None)
    engine = make_engine(tmp_path, quantization="int4", dtype="float32")
    assert engine._runner._decoder.program is None
    ours, others = (its._runner._decoder._source.linears for its in (by_program, engine))
    assert all(ours[name]._kept[0].equal(others[name]._kept[0]) for name in ours)
    found, expected = run(by_program, requests), run(engine, requests)
    assert [token_ids(found[str(i)]) for i in range(len(prompts))] == [
        token_ids(expected[str(i)]) for i in range(len(prompts))
    ]


def test_it_is_refused_where_it_cannot_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfigurationError, match="has packed codes, which are not split, got tensor_par"):
        make_engine(STORYTELLER, quantization="int4", tensor_parallel_size=2)
    monkeypatch.setattr(native, "is_available", lambda: False)
    with pytest.raises(InvalidConfigurationError, match="is computed by the compiled library, which is missing"):
        make_engine(STORYTELLER, quantization="int4")
