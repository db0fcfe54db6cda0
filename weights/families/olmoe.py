"""OLMoE: Llama with normalised queries and keys, and a mixture of experts whose weights are not scaled to a sum of 1.
FlexOlmo: the same, with norms after each part, as OLMo 2 has them.

Muennighoff et al., "OLMoE: Open Mixture-of-Experts Language Models" (2024). Shi et al., "FlexOlmo: Open Language Models
for Flexible Data Use" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig, Router
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, read_llama_config
from gptserve.weights.families.mixtral import MAX_EXPERTS
from gptserve.weights.families.olmo import NAMES
from gptserve.weights.families.qwen_moe import qwen_moe_sources, with_qwen_experts


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(rms_norm_eps=1e-5)
    raw.forbid("clip_qkv", None, "no published OLMoE clips queries, keys and values")
    return _with_experts(raw, num=64, num_active=8)


def _read_flex(raw: RawConfig) -> ModelConfig:
    raw.default(rope_theta=500_000.0)
    return replace(_with_experts(raw, num=7, num_active=5), norm_placement="output")


def _with_experts(raw: RawConfig, *, num: int, num_active: int) -> ModelConfig:
    """Return the fields; the numbers are for a file that does not say."""
    config = read_llama_config(raw)
    num = raw.size("num_local_experts", default=raw.size("num_experts", default=num))
    if num * config.num_layers > MAX_EXPERTS:
        raise raw.error("num_experts", f"an integer in [1, {MAX_EXPERTS // config.num_layers}]")
    num_active = raw.size("num_experts_per_tok", default=num_active, limit=num)
    experts = Experts(num, num_active, Router(renormalised=raw.boolean("norm_topk_prob", default=False)))
    config = config.change_layers(lambda layer: replace(layer, experts=experts))
    return replace(config, qk_norm="projection")


OLMOE = Family("olmoe", _read_config, qwen_moe_sources, ignored=IGNORED, models="OLMoE")
FLEX_OLMO = Family(
    "flex_olmo", _read_flex, with_qwen_experts(layout.decoder(NAMES)), ignored=IGNORED, models="FlexOlmo"
)
