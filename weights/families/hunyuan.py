"""Hunyuan of 2025, dense and mixed: Llama with norms of heads after their rotation, and one shared expert.

Tencent Hunyuan Team, "Hunyuan-A13B Technical Report" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, NAMES, read_llama_config
from gptserve.weights.families.mixtures import read_num_experts

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
_moe_sources = layout.with_experts(
    _sources,
    "layers.{}.mlp.gate.wg",
    (f"{_EXPERT}gate_proj", f"{_EXPERT}up_proj"),
    f"{_EXPERT}down_proj",
    shared=layout.Shared((f"{_SHARED}gate_proj", f"{_SHARED}up_proj"), f"{_SHARED}down_proj"),
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
