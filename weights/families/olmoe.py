"""OLMoE: Llama with normalised queries and keys, and a mixture of experts whose weights are not scaled to a sum of 1.

Muennighoff et al., "OLMoE: Open Mixture-of-Experts Language Models" (2024).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig, Router
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, read_llama_config
from gptserve.weights.families.mixtral import MAX_EXPERTS
from gptserve.weights.families.qwen_moe import qwen_moe_sources


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(rms_norm_eps=1e-5)
    raw.forbid("clip_qkv", None, "no published OLMoE clips queries, keys and values")
    config = read_llama_config(raw)
    num = raw.size("num_local_experts", default=raw.size("num_experts", default=64))
    if num * config.num_layers > MAX_EXPERTS:
        raise raw.error("num_experts", f"an integer in [1, {MAX_EXPERTS // config.num_layers}]")
    num_active = raw.size("num_experts_per_tok", default=8, limit=num)
    experts = Experts(num, num_active, Router(renormalised=raw.boolean("norm_topk_prob", default=False)))
    config = config.change_layers(lambda layer: replace(layer, experts=experts))
    return replace(config, qk_norm="projection")


OLMOE = Family("olmoe", _read_config, qwen_moe_sources, ignored=IGNORED, models="OLMoE")
