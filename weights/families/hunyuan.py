"""Hunyuan of 2025, dense and mixed: Llama with norms of heads after their rotation, and one shared expert.

Hy3 of 2026 has these norms before the rotation, corrected sigmoids, and a dense first layer. Tencent Hunyuan Team,
"Hunyuan-A13B Technical Report" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig, Router
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_LAYERS, MAX_WIDTH, Family, RawConfig
from gptserve.weights.families.llama import IGNORED, NAMES, llama_sources, read_llama_config
from gptserve.weights.families.mixtures import MIN_SUM, read_mixing, read_num_experts, with_mixtures

_NORMS = {
    "blocks.{}.q_norm": "layers.{}.self_attn.query_layernorm",
    "blocks.{}.k_norm": "layers.{}.self_attn.key_layernorm",
}
_OTHERS = "transformers has no other for this model_type"


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(rms_norm_eps=1e-5)
    for name, value in (("use_qk_norm", True), ("use_cla", False), ("use_mla", False), ("norm_type", "rms")):
        raw.forbid(name, value, _OTHERS)
    raw.skip("cla_share_factor", "org_vocab_size", "dense_list", "enable_lm_head_fp32", "pool_type", "pad_id")
    raw.skip(*(f"{name}_id" for name in ("im_start", "im_end", "im_newline", "text_start", "text_end", "mask_init")))
    return replace(read_llama_config(raw), qk_norm="head", qk_norm_after_rotation=True)


def _read_moe(raw: RawConfig) -> ModelConfig:
    config = _read_config(raw)
    layers = config.num_layers
    for name, value in (
        *(("use_mixed_mlp_moe", True), ("norm_topk_prob", True), ("moe_layer_num_skipped", 0)),
        *(("group_limited_greedy", False), ("routed_scaling_factor", 1.0)),
    ):
        raw.forbid(name, value, _OTHERS)
    raw.skip("moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor")
    for name, size in (("num_shared_expert", 1), ("moe_intermediate_size", config.layers[0].ffn_size)):
        raw.forbid(name, [size] * layers if isinstance(raw.value(name), list) else size, _OTHERS)
    num = read_num_experts(raw, ("num_experts", "num_local_experts"), layers, 1)
    actives = _of_layers(raw, "num_experts_per_tok", layers, num, [1] * layers)
    actives = _of_layers(raw, "moe_topk", layers, num, actives)
    mixed = (
        replace(layer, experts=Experts(num, active, num_shared=1))
        for layer, active in zip(config.layers, actives, strict=True)
    )
    return replace(config, layers=tuple(mixed))


def _read_v3(raw: RawConfig) -> ModelConfig:
    raw.default(rms_norm_eps=1e-5, num_key_value_heads=8, head_dim=128, rope_theta=11_158_840.0)
    for name in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        raw.forbid(name, True, _OTHERS)
    raw.skip(*(f"enable_{name}" for name in ("moe_fp32_combine", "lm_head_fp32", "attention_fp32_softmax")))
    raw.skip("num_nextn_predict_layers", "use_grouped_mm")
    config = read_llama_config(raw)
    num = read_num_experts(raw, ("num_experts", "num_local_experts"), config.num_layers, 192)
    scale = raw.positive("router_scaling_factor", default=2.826)
    experts = Experts(
        num,
        raw.size("num_experts_per_tok", default=8, limit=num),
        Router("sigmoid", has_correction=True, min_sum=MIN_SUM, scale=scale),
        num_shared=raw.size("num_shared_experts", default=1),
    )
    width = raw.size("moe_intermediate_size", default=1536, limit=MAX_WIDTH)
    raw.forbid("expert_hidden_dim", width, "it is another name of moe_intermediate_size")
    num_dense = raw.count("first_k_dense_replace", default=1, limit=MAX_LAYERS)
    mixes = read_mixing(raw, config.num_layers, num_dense=num_dense)
    return with_mixtures(replace(config, qk_norm="head"), experts, width, mixes.__getitem__)


def _of_layers(raw: RawConfig, name: str, length: int, limit: int, default: list[int]) -> list[int]:
    """Return an integer for each layer, of which a file may have one for all."""
    value = raw.value(name)
    if not isinstance(value, list):
        return default if value is None else [raw.size(name, limit=limit)] * length
    if len(value) != length or not all(type(entry) is int and 1 <= entry <= limit for entry in value):
        raise raw.error(name, f"an integer in [1, {limit}], or a list of {length}")
    return list(value)


_sources = layout.decoder({**NAMES, **_NORMS})
_EXPERT, _SHARED = "layers.{}.mlp.experts.{}.", "layers.{}.mlp.shared_mlp."
_shared = layout.Shared((f"{_SHARED}gate_proj", f"{_SHARED}up_proj"), f"{_SHARED}down_proj")
_moe_sources = layout.with_experts(
    _sources,
    "layers.{}.mlp.gate.wg",
    (f"{_EXPERT}gate_proj", f"{_EXPERT}up_proj"),
    f"{_EXPERT}down_proj",
    shared=_shared,
)
_v3_sources = layout.with_experts(
    llama_sources,
    "layers.{}.mlp.router.gate",
    (f"{_EXPERT}gate_proj", f"{_EXPERT}up_proj"),
    f"{_EXPERT}down_proj",
    correction="layers.{}.mlp.expert_bias",
    shared=_shared,
)

HUNYUAN = Family(
    "hunyuan_v1_dense",
    _read_config,
    _sources,
    ignored=IGNORED,
    models="Hunyuan of 2025",
)
HUNYUAN_MOE = Family(
    "hunyuan_v1_moe", _read_moe, _moe_sources, ignored=IGNORED, models="Hunyuan A13B in the format of `transformers`"
)
HY_V3 = Family("hy_v3", _read_v3, _v3_sources, ignored=rf"{IGNORED}|layers\.80\..*", models="Hy3")
"""Its layer behind the last of 80 predicts further tokens."""
