"""MiniMax M2: all layers mix 256 experts, chosen by corrected sigmoids; partly rotary heads, one norm of all queries.

MiniMax, "MiniMax-M2" (2025), https://github.com/MiniMax-AI/MiniMax-M2.
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig, Router
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config
from gptserve.weights.families.mixtures import read_num_experts

_NO_OTHER = "transformers has no other"


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(head_dim=128, num_key_value_heads=8, rope_theta=5e6)
    if "rotary_dim" in raw:
        head_size = raw.size("head_dim")
        raw.default(partial_rotary_factor=raw.size("rotary_dim", limit=head_size) / head_size)
    for name, value in (
        *(("scoring_func", "sigmoid"), ("use_routing_bias", True), ("shared_intermediate_size", 0)),
        *(("use_qk_norm", True), ("qk_norm_type", "per_layer")),
    ):
        raw.forbid(name, value, _NO_OTHER)
    config = read_llama_config(raw)
    raw.forbid("attn_type_list", [1] * config.num_layers, _NO_OTHER)
    raw.skip("mlp_intermediate_size", "num_mtp_modules", "mtp_transformer_layers", "use_mtp", "shared_moe_mode")
    num = read_num_experts(raw, ("num_local_experts", "num_experts"), config.num_layers, 256)
    router = Router("sigmoid", has_correction=True)
    experts = Experts(num, raw.size("num_experts_per_tok", default=8, limit=num), router)
    config = config.change_layers(lambda layer: replace(layer, experts=experts))
    return replace(config, qkv_bias=False, attn_out_bias=False, qk_norm="projection")


_EXPERT = "layers.{}.block_sparse_moe.experts.{}."
_sources = layout.with_experts(
    llama_sources,
    "layers.{}.block_sparse_moe.gate",
    (f"{_EXPERT}w1", f"{_EXPERT}w3"),
    f"{_EXPERT}w2",
    correction="layers.{}.block_sparse_moe.e_score_correction_bias",
)

MINIMAX_M2 = Family("minimax_m2", _read_config, _sources, ignored=IGNORED, models="MiniMax M2")
