"""Logits of labels: those of transformers' …ForSequenceClassification and of two rows of a causal model's head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gptserve.engine.engine import Engine
from gptserve.engine.pooling import PoolingRequest
from gptserve.weights.errors import WeightsError
from tests.engine.runs import make_engine, ragged_prompts
from tests.engine.test_pooling import SMALL_STEPS, vectors
from tests.weights.tiny_tokenizers import words

PROMPTS = ragged_prompts(10, 50)
SIZES = {"vocab_size": 96, "max_position_embeddings": 64}
SHAPE = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "head_dim": 16}
OF_GPT2 = {
    "vocab_size": 96,
    "n_positions": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
OF_OPT = {**SIZES, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Qwen2": {**SHAPE, "num_key_value_heads": 2},
    "Qwen3": GROUPED,
    "Mistral": {**GROUPED, "sliding_window": 16},
    "Gemma": GROUPED,
    "Gemma2": {**GROUPED, "query_pre_attn_scalar": 16, "sliding_window": 16},
    "GPT2": OF_GPT2,
    "OPT": {**OF_OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
}
OFFSETS = 0.05
NO, YES = 7, 11


def save(folder: Path, architecture: str, config: Any) -> Any:
    torch.manual_seed(3)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * OFFSETS)
    model.save_pretrained(folder)
    return model


def classifier(folder: Path, family: str, **options: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family], "pad_token_id": 0, **options})
    return save(folder, f"{family}ForSequenceClassification", config)


def reranker(folder: Path, family: str = "Qwen3", **options: Any) -> Any:
    """A causal model whose words 7 and 11 are no and yes."""
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family], **options})
    model = save(folder, f"{family}ForCausalLM", config)
    write_words(folder)
    return model


def write_words(folder: Path) -> None:
    """Write a tokenizer of words."""
    words([{NO: "no", YES: "yes"}.get(i, f"w{i}") for i in range(96)]).save(str(folder / "tokenizer.json"))


def requests() -> list[PoolingRequest]:
    # transformers takes the last token that is no padding: no prompt here ends in the token 0
    return [PoolingRequest(str(i), (*(max(1, its) for its in prompt),), "last") for i, prompt in enumerate(PROMPTS)]


def logits(engine: Engine) -> np.ndarray[Any, Any]:
    found = vectors(engine, requests())
    return np.array([found[request.request_id] for request in requests()])


@torch.inference_mode()
def expected(model: Any, *token_ids: int) -> np.ndarray[Any, Any]:
    rows = [model(torch.tensor([request.prompt_token_ids])).logits[0] for request in requests()]
    return np.array([row[-1, list(token_ids)].numpy() if token_ids else row.numpy() for row in rows])


@pytest.mark.some(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_labels_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = classifier(tmp_path, family, num_labels=3)
    engine = make_engine(tmp_path, task="classify")
    assert engine.info.vector_size == 3
    np.testing.assert_allclose(logits(engine), expected(model), rtol=0, atol=2e-5)


def test_the_reference_backend_computes_the_same(tmp_path: Path) -> None:
    model = classifier(tmp_path, "Qwen3", num_labels=1)
    engine = make_engine(tmp_path, task="score", attention_backend="reference")
    np.testing.assert_allclose(logits(engine), expected(model), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen3", {"tie_word_embeddings": True}),
        ("Qwen3", {"tie_word_embeddings": False}),
        ("Gemma2", {"final_logit_softcapping": 3.0}),
    ],
)
def test_logits_of_tokens_are_those_of_transformers(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    model = reranker(tmp_path, family, **options)
    engine = make_engine(tmp_path, task="score")
    assert engine.info.vector_size == 2
    np.testing.assert_allclose(logits(engine), expected(model, NO, YES), rtol=0, atol=2e-5)


def test_rows_of_a_head_keep_its_bias(tmp_path: Path) -> None:
    config = transformers.PhiConfig(**SHAPE)
    model = save(tmp_path, "PhiForCausalLM", config)
    write_words(tmp_path)
    np.testing.assert_allclose(logits(make_engine(tmp_path, task="score")), expected(model, NO, YES), rtol=0, atol=2e-5)


def test_rows_of_a_head_keep_its_scale(tmp_path: Path) -> None:
    config = transformers.CohereConfig(**SHAPE, num_key_value_heads=2, logit_scale=0.25, eos_token_id=1, bos_token_id=2)
    model = save(tmp_path, "CohereForCausalLM", config)
    write_words(tmp_path)
    np.testing.assert_allclose(logits(make_engine(tmp_path, task="score")), expected(model, NO, YES), rtol=0, atol=2e-5)


def test_tokens_are_those_that_the_folder_names(tmp_path: Path) -> None:
    model = reranker(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    vllm = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["w5", "w9"]}
    (tmp_path / "config.json").write_text(json.dumps(config | vllm | {"is_original_qwen3_reranker": True}))
    np.testing.assert_allclose(logits(make_engine(tmp_path, task="score")), expected(model, 5, 9), rtol=0, atol=2e-5)
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.LogitScore", "path": "1_LogitScore"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore" / "config.json").write_text('{"true_token_id": 8, "false_token_id": null}')
    np.testing.assert_allclose(logits(make_engine(tmp_path, task="score")), expected(model, 8), rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_logits_have_the_same_bits_in_any_batch_and_chunk(tmp_path: Path, backend: str) -> None:
    classifier(tmp_path, "Qwen3", num_labels=3)
    options = {"task": "classify", "attention_backend": backend}
    engine = make_engine(tmp_path, **options)
    of_each = {its.request_id: vectors(engine, [its])[its.request_id] for its in requests()}
    for changed in ({}, SMALL_STEPS, {"enable_prefix_caching": False}):
        assert vectors(make_engine(tmp_path, **options, **changed), requests()) == of_each
    again = {its.request_id: vectors(engine, [its])[its.request_id] for its in requests()}
    assert again == of_each, "with cached prefixes"


def test_a_classifier_generates_and_embeds_nothing(tmp_path: Path) -> None:
    classifier(tmp_path, "Llama", num_labels=3)
    for task in ("generate", "embed"):
        message = (
            f"^config.json: architectures names LlamaForSequenceClassification, a classifier, which --task {task} "
            "cannot use; use --task classify, or --task score for one of one label$"
        )
        with pytest.raises(WeightsError, match=message):
            make_engine(tmp_path, task=task)


def test_a_classifier_needs_weights_of_the_shape_of_its_labels(tmp_path: Path) -> None:
    classifier(tmp_path, "Llama", num_labels=3)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(WeightsError, match=r"1 misshapen \(score.weight is \[3, 64\], expected \[2, 64\]\)$"):
        make_engine(tmp_path, task="classify")
