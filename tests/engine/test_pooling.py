"""Vectors of prompts: those of transformers' states, and bit for bit the same in any batch, chunk and cache."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaModel, OPTConfig, OPTModel

from gptserve.engine.engine import Engine
from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.pooling import PoolingRequest
from gptserve.engine.request import FinishReason
from gptserve.engine.runner import runner
from gptserve.weights.errors import WeightsError
from gptserve.weights.pooling import Pooling
from tests.engine.runs import make_engine, make_request, ragged_prompts

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
PROMPTS = ragged_prompts(12, 50)
SHAPE = {"vocab_size": 96, "max_position_embeddings": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
SMALL_STEPS = {"max_num_batched_tokens": 7, "max_num_seqs": 3}


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaModel]:
    """A folder without a head, as those of embedding models are."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, hidden_size=64, intermediate_size=96, num_key_value_heads=2)
    model = LlamaModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def engine(base_model: tuple[Path, LlamaModel]) -> Engine:
    return make_engine(base_model[0], task="embed", max_num_batched_tokens=64)


def vectors(engine: Engine, requests: list[PoolingRequest]) -> dict[str, array[float]]:
    found: dict[str, array[float]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert (output.finish_reason, output.error, output.token_ids) == (FinishReason.STOP, None, ())
            assert output.vector is not None
            assert output.request_id not in found, "one output for each"
            found[output.request_id] = output.vector
    return found


def requests(pooling: Pooling) -> list[PoolingRequest]:
    return [PoolingRequest(str(i), tuple(prompt), pooling) for i, prompt in enumerate(PROMPTS)]


def alone(engine: Engine, pooling: Pooling) -> dict[str, array[float]]:
    return {request.request_id: vectors(engine, [request])[request.request_id] for request in requests(pooling)}


@torch.inference_mode()
def expected(model: Any, prompt: list[int], pooling: Pooling) -> np.ndarray[Any, Any]:
    states = model(torch.tensor([prompt])).last_hidden_state[0]
    pooled = {"last": lambda: states[-1], "cls": lambda: states[0], "mean": lambda: states.double().mean(0)}[pooling]()
    return pooled.float().numpy()


@pytest.mark.some(3)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_vectors_are_those_of_transformers(base_model: tuple[Path, LlamaModel], pooling: Pooling, backend: str) -> None:
    folder, model = base_model
    found = vectors(make_engine(folder, task="embed", attention_backend=backend), requests(pooling))
    for i, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(found[str(i)], expected(model, prompt, pooling), rtol=0, atol=1e-5)


def test_vectors_have_the_width_that_a_projection_at_the_end_gives(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = OPTConfig(**SHAPE, hidden_size=64, ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False)
    model = OPTModel(config).eval()
    model.save_pretrained(tmp_path)
    engine = make_engine(tmp_path, task="embed")
    found = vectors(engine, requests("mean"))
    assert engine.info.vector_size == 32
    for i, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(found[str(i)], expected(model, prompt, "mean"), rtol=0, atol=1e-5)


@pytest.mark.some(1)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_vector_has_the_same_bits_in_any_batch_and_chunk(
    base_model: tuple[Path, LlamaModel], engine: Engine, pooling: Pooling
) -> None:
    of_each = alone(engine, pooling)
    for options in ({}, SMALL_STEPS, {"enable_prefix_caching": False}):
        other = make_engine(base_model[0], task="embed", **options)
        assert vectors(other, requests(pooling)) == of_each
    reference = {"task": "embed", "attention_backend": "reference"}
    whole, cut = (make_engine(base_model[0], **reference, **of_steps) for of_steps in ({}, SMALL_STEPS))
    assert vectors(whole, requests(pooling)) == vectors(cut, requests(pooling)) == alone(whole, pooling)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_cached_prefix_changes_no_bit_of_a_vector(engine: Engine, pooling: Pooling) -> None:
    (request,) = [PoolingRequest("a", tuple(range(40)), pooling)]
    assert vectors(engine, [request]) == vectors(engine, [request])


def test_the_order_of_a_sum_is_the_tokens_own(base_model: tuple[Path, LlamaModel]) -> None:
    """The control of the tests above: added in another order the bits of some mean differ."""
    _, model = base_model
    with torch.inference_mode():
        states = model(torch.tensor([PROMPTS[0]])).last_hidden_state[0].numpy()
    forth, back = (np.add.accumulate(states[::step], dtype=np.float32)[-1] for step in (1, -1))
    assert forth.tobytes() != back.tobytes()


def test_an_engine_has_one_task(engine: Engine, tiny_gpt2: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"^an engine with the task embed completes no prompt$"):
        engine.add(make_request("a", [1], max_tokens=1))
    with pytest.raises(InvalidRequestError, match=r"^an engine with the task generate gives no vectors$"):
        make_engine(tiny_gpt2).add(PoolingRequest("a", (1,), "last"))


def test_a_prompt_may_fill_the_context_and_no_more(engine: Engine) -> None:
    limit = engine.info.max_model_len
    assert vectors(engine, [PoolingRequest("a", (1,) * limit, "mean")])
    with pytest.raises(
        InvalidRequestError, match=f"maximum context length is {limit} tokens; the input has {limit + 1}$"
    ):
        engine.add(PoolingRequest("a", (1,) * (limit + 1), "mean"))
    with pytest.raises(InvalidRequestError, match=r"input: token ids must be in \[0, 96\), got 96$"):
        engine.add(PoolingRequest("a", (96, 0), "mean"))
    with pytest.raises(InvalidRequestError, match="input must hold at least one token"):
        engine.add(PoolingRequest("a", (), "mean"))


def test_an_aborted_prompt_frees_its_blocks(engine: Engine) -> None:
    engine.add(PoolingRequest("a", tuple(range(50)) * 1, "mean"))
    engine.add(PoolingRequest("b", tuple(range(40)), "mean"))
    engine.step()
    engine.abort("a")
    engine.abort("b")
    assert not engine.has_work
    assert engine.stats.num_used_blocks == 0


def test_a_failed_step_is_computed_again_with_the_same_vector(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = PoolingRequest("a", tuple(range(60)), "mean")
    before = vectors(engine, [request])
    launch, failures = runner.ModelRunner.launch, iter([False, True])

    def fails(self: runner.ModelRunner, step: Any) -> runner.Collect:
        if step.pooled and next(failures, False):
            raise RuntimeError("a step that fails")
        return launch(self, step)

    monkeypatch.setattr(runner.ModelRunner, "launch", fails)
    monkeypatch.setattr(engine._scheduler, "_max_num_batched_tokens", 20)
    assert vectors(engine, [request]) == before
    assert next(failures, None) is None, "it failed"


def test_a_base_model_cannot_generate(base_model: tuple[Path, LlamaModel]) -> None:
    with pytest.raises(WeightsError, match=r"1 missing \(lm_head.weight\)"):
        make_engine(base_model[0])
