"""config.json ties the head to the embedding, and the files have a head too: logits are those of transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptserve.engine.backends.reference.attention import ReferenceAttention
from tests.parity.models import load_in_transformers, write_model
from tests.parity.shapes import FIRST, SHAPES, UNLIKE
from tests.parity.test_families import paged_logits

WITH_LANGUAGE_MODEL = ("aya_vision", "gemma3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3")
EMBEDS = {
    **dict.fromkeys(("bloom", "falcon"), "transformer.word_embeddings.weight"),
    "gpt_neox": "gpt_neox.embed_in.weight",
    "openai-gpt": "transformer.tokens_embed.weight",
    "opt": "model.decoder.embed_tokens.weight",
    **dict.fromkeys(WITH_LANGUAGE_MODEL, "language_model.model.embed_tokens.weight"),
    **dict.fromkeys(("smolvlm", "idefics3"), "model.text_model.embed_tokens.weight"),
    **dict.fromkeys(("gemma3n", "gemma4", "gemma4_unified"), "model.language_model.embed_tokens.weight"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "model.language_model.embed_tokens.weight"),
    **dict.fromkeys(
        ("cohere2_vision", "lfm2_vl", "qwen3_vl", "qwen3_vl_moe"), "model.language_model.embed_tokens.weight"
    ),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen", "mpt", "exaone"), "transformer.wte.weight"),
}
HEADS = {
    "gpt_neox": "embed_out.weight",
    **dict.fromkeys(WITH_LANGUAGE_MODEL, "language_model.lm_head.weight"),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]

Change = Callable[[dict[str, Tensor], str, str], object]


def differs(tensors: dict[str, Tensor], embed: str, head: str) -> None:
    tensors[head] = torch.randn(tensors[embed].shape, generator=torch.Generator().manual_seed(3)) * 0.2


def differs_at_the_end(tensors: dict[str, Tensor], embed: str, head: str) -> None:
    tensors[head] = tensors[embed].clone()
    tensors[head][-1, -1] += 5.0


def equals(tensors: dict[str, Tensor], embed: str, head: str) -> None:
    tensors[head] = tensors[embed].clone()


def is_alone(tensors: dict[str, Tensor], embed: str, head: str) -> None:
    tensors[head] = tensors.pop(embed)


USED: dict[Change, bool] = {differs: True, differs_at_the_end: True, equals: False, is_alone: False}
NEVER_TIED = ("nemotron_h",)
"""Whose head transformers never ties to the embedding, whatever the file says: it writes both."""
IN_ALL_WAYS = ("gpt2", "llama", "gpt_neox")
"""Families that are tried in all ways also where no slow tests run."""


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        pytest.param(model_type, change, marks=pytest.mark.slow if is_slow else ())
        for model_type in FIRST
        if model_type not in NEVER_TIED
        for change in USED
        for is_slow in (FIRST[model_type] not in UNLIKE or (change is not differs and model_type not in IN_ALL_WAYS),)
    ],
)
def test_a_head_beside_a_tied_embedding_is_read_as_transformers_reads_it(
    model_type: str, change: Change, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, model_type, {**SHAPES[FIRST[model_type]][1], "tie_word_embeddings": True})
    tensors = load_file(tmp_path / "model.safetensors")
    embed, head = EMBEDS.get(model_type, "model.embed_tokens.weight"), HEADS.get(model_type, "lm_head.weight")
    assert embed in tensors
    assert head not in tensors
    change(tensors, embed, head)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_in_transformers(tmp_path)

    with caplog.at_level(logging.WARNING, "gptserve"):
        found = paged_logits(tmp_path, PROMPTS, ReferenceAttention())

    for prompt, logits in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            assert (model(torch.tensor([prompt])).logits[0] - logits).abs().max() < 1e-4
    told = (
        f"config.json ties the head to the embedding, but the files have {head}, which differs from {embed}; using both"
    )
    assert [message for message in caplog.messages if "ties" in message] == ([told] if USED[change] else [])
