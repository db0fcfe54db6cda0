"""Qwen3's mixtures of experts: Qwen3 with 128 experts in place of each feed-forward, or of some.

Yang et al., "Qwen3 Technical Report" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_WIDTH, Family, RawConfig
from gptserve.weights.families.llama import IGNORED, llama_sources
from gptserve.weights.families.mixtral import MAX_EXPERTS
from gptserve.weights.families.qwen import read_qwen3_config

_EXPERT = "layers.{}.mlp.experts.{}."


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=4)
    config = read_qwen3_config(raw)
    num = raw.size("num_local_experts", default=raw.size("num_experts", default=128))
    if num * config.num_layers > MAX_EXPERTS:
        raise raw.error("num_experts", f"an integer in [1, {MAX_EXPERTS // config.num_layers}]")
    num_active = raw.size("num_experts_per_tok", default=8, limit=num)
    experts = Experts(num, num_active, renormalised=raw.boolean("norm_topk_prob", default=False))
    width = raw.size("moe_intermediate_size", default=768, limit=MAX_WIDTH)
    step, dense = raw.size("decoder_sparse_step", default=1), raw.token_ids("mlp_only_layers", config.num_layers)
    layers = [
        replace(layer, experts=experts, ffn_size=width) if (i + 1) % step == 0 and i not in dense else layer
        for i, layer in enumerate(config.layers)
    ]
    return replace(config, layers=tuple(layers))


qwen_moe_sources = layout.with_experts(
    llama_sources, "layers.{}.mlp.gate", (f"{_EXPERT}gate_proj", f"{_EXPERT}up_proj"), f"{_EXPERT}down_proj"
)

QWEN3_MOE = Family("qwen3_moe", _read_config, qwen_moe_sources, ignored=IGNORED)
