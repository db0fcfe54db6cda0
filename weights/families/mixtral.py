"""Mixtral: Mistral with a mixture of eight experts in place of each feed-forward.

Jiang et al., "Mixtral of Experts" (2024). The softmax of all router logits is scaled so that the weights of the chosen
experts have a sum of 1: it is the softmax of the chosen ones.
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, llama_sources
from gptserve.weights.families.mistral import read_mistral_config

MAX_EXPERTS = 2**16  # over all layers

_EXPERT = "layers.{}.block_sparse_moe.experts.{}."


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6)
    config = read_mistral_config(raw)
    num = raw.size("num_local_experts", default=8, limit=max(1, MAX_EXPERTS // config.num_layers))
    experts = Experts(num, raw.size("num_experts_per_tok", default=2, limit=num))
    return config.change_layers(lambda layer: replace(layer, experts=experts))


_sources = layout.with_experts(
    llama_sources, "layers.{}.block_sparse_moe.gate", (f"{_EXPERT}w1", f"{_EXPERT}w3"), f"{_EXPERT}w2"
)

MIXTRAL = Family("mixtral", _read_config, _sources, ignored=IGNORED, models="Mixtral")
