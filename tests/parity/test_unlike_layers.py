"""A model whose layers have unlike shapes computes what transformers does, or what like layers do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.engine.model.attention import AttentionBackend
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.config import Experts, ModelConfig
from gptserve.weights.families import load_config
from tests.parity import test_families

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
NUM_EXPERTS = 4
PROMPTS = [list(range(3, 3 + length)) for length in (1, 9, 17)]


@pytest.mark.some(2)
@pytest.mark.parametrize("backend", [ReferenceAttention(), CpuAttention()], ids=lambda backend: backend.name)
@pytest.mark.parametrize(("intermediate_size", "num_key_value_heads"), [(40, 2), (64, 1), (40, 4)])
def test_a_layer_may_have_another_width_and_other_heads(
    backend: AttentionBackend,
    intermediate_size: int,
    num_key_value_heads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    other = LlamaConfig(
        **{**SHAPE, "intermediate_size": intermediate_size, "num_key_value_heads": num_key_value_heads},
        attn_implementation="eager",
    )
    layer = model.model.layers[1]
    layer.mlp, layer.self_attn = LlamaMLP(other), LlamaAttention(other, 1)
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    first, second, third = load_config(tmp_path).layers
    second = replace(second, ffn_size=intermediate_size, num_kv_heads=num_key_value_heads)
    config = replace(load_config(tmp_path), layers=(first, second, third))
    assert config.layers[0] is config.layers[2]
    monkeypatch.setattr(test_families, "load_config", lambda folder: config)
    found = test_families.paged_logits(tmp_path, PROMPTS, backend)
    for prompt, logits in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


class OneLayerOfExperts:
    """A checkpoint, but for a feed-forward that each of the experts of a layer has."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, name: str) -> None:
        self.config, self._checkpoint, self._name = config, checkpoint, name

    def stream(self, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._checkpoint.stream(**options):
            block, _, part = name.partition(".ffn_")
            if block != self._name or part.startswith("norm"):
                yield name, tensor
                continue
            if part.startswith("up"):
                yield f"{block}.router.weight", torch.randn(NUM_EXPERTS, tensor.shape[1])
            for e in range(NUM_EXPERTS):
                yield f"{block}.experts.{e}.ffn_{part}", tensor


@pytest.mark.parametrize("backend", [ReferenceAttention(), CpuAttention()], ids=lambda backend: backend.name)
def test_a_mixture_may_have_layers_without_experts(
    backend: AttentionBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal experts compute what one of them does, as a row's weights sum to 1."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    dense = load_config(tmp_path)
    first, second, third = dense.layers
    mixed = replace(dense, layers=(first, replace(second, experts=Experts(NUM_EXPERTS, 2)), third))
    expected = test_families.paged_logits(tmp_path, PROMPTS, backend)
    opened = Checkpoint(tmp_path, dense)
    monkeypatch.setattr(test_families, "Checkpoint", lambda *_: OneLayerOfExperts(opened, mixed, "blocks.1"))
    found = test_families.paged_logits(tmp_path, PROMPTS, backend)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not all(map(torch.equal, found, expected)), "no mixture has computed"
