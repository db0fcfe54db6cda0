"""ERNIE 4.5's mixtures: the softmax of all logits, corrected for the choice, and shared experts; a dense first layer.

Baidu ERNIE Team, "ERNIE 4.5 Technical Report" (2025).
"""

from __future__ import annotations

from gptserve.weights.config import Experts, ModelConfig, Router
from gptserve.weights.families import layout
from gptserve.weights.families.ernie4_5 import ERNIE4_5, read_ernie_config
from gptserve.weights.families.family import MAX_LAYERS, MAX_WIDTH, Family, RawConfig
from gptserve.weights.families.llama import IGNORED
from gptserve.weights.families.mixtures import read_num_experts, with_mixtures


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=4)
    raw.skip("moe_capacity", "num_nextn_predict_layers")
    raw.forbid("moe_use_aux_free", True, "transformers' router has corrections")
    raw.forbid("moe_gate", "topk", "transformers has no other")
    config = read_ernie_config(raw)
    num = read_num_experts(raw, ("moe_num_experts", "num_experts"), config.num_layers, 64)
    num_active = raw.size("moe_k", default=raw.size("num_experts_per_tok", default=6), limit=num)
    router = Router(has_correction=True, min_sum=raw.positive("moe_norm_min", default=1e-12))
    experts = Experts(num, num_active, router, num_shared=raw.count("moe_num_shared_experts", default=2))
    width = raw.size("moe_intermediate_size", default=1536, limit=MAX_WIDTH)
    first = raw.count("moe_layer_start_index", default=1, limit=MAX_LAYERS)
    last, step = config.num_layers - 1, raw.size("moe_layer_interval", default=1)
    if raw.value("moe_layer_end_index", -1) != -1:
        last = raw.count("moe_layer_end_index", limit=MAX_LAYERS)
    return with_mixtures(config, experts, width, lambda layer: first <= layer <= last and (layer + 1) % step == 0)


_EXPERT, _SHARED = "layers.{}.mlp.experts.{}.", "layers.{}.mlp.shared_experts."
_sources = layout.with_experts(
    ERNIE4_5.sources,
    "layers.{}.mlp.gate",
    (f"{_EXPERT}gate_proj", f"{_EXPERT}up_proj"),
    f"{_EXPERT}down_proj",
    correction="layers.{}.mlp.moe_statics.e_score_correction_bias",
    has_correction_rows=True,
    shared=layout.Shared((f"{_SHARED}gate_proj", f"{_SHARED}up_proj"), f"{_SHARED}down_proj"),
)

ERNIE4_5_MOE = Family(
    "ernie4_5_moe", _read_config, _sources, ignored=rf"{IGNORED}|mtp_.*", models="ERNIE 4.5 with experts"
)
