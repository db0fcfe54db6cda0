"""Trinity (AFMoE): Llama with norms around each part, gated attention, positions where a window is, and mixtures as in
DeepSeek V3. Laguna: gates of heads, whose number differs among layers, and rotary positions of either kind of layers.

Arcee AI, "Trinity Large Technical Report" (2026); Poolside, "Laguna" (2026), https://huggingface.co/poolside.
"""

from __future__ import annotations

import math
from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig, Router
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_LAYERS, MAX_WIDTH, Family, RawConfig, with_windows
from gptserve.weights.families.glm4_moe import SHARED
from gptserve.weights.families.llama import ATTENTION, EMBED, END, FFN, IGNORED, NAMES, read_llama_config
from gptserve.weights.families.mixtures import MIN_SUM, read_mixing, read_num_experts, with_mixtures
from gptserve.weights.families.qwen_moe import with_qwen_experts
from gptserve.weights.families.rotary import with_rotary_by_kind

_ONE_GROUP = ("n_group", "num_expert_groups", "num_limited_groups", "topk_group")
_GATING = {"per-head": True, "per-element": False}


def _read_afmoe(raw: RawConfig) -> ModelConfig:
    raw.default(rms_norm_eps=1e-5, head_dim=128, sliding_window=1024)
    raw.skip("load_balance_coeff", "use_grouped_mm")  # of training
    for name, value in (("score_func", "sigmoid"), ("route_norm", True), *((name, 1) for name in _ONE_GROUP)):
        raw.forbid(name, value, "transformers has no other for this model_type")
    period = raw.size("global_attn_every_n_layers", default=4)
    config = with_windows(raw, read_llama_config(raw), lambda layer: (layer + 1) % period > 0)
    config = config.change_layers(lambda layer: layer if layer.window is not None else replace(layer, rotary=None))
    num = read_num_experts(raw, ("num_experts",), config.num_layers, 64)
    router = Router("sigmoid", True, min_sum=MIN_SUM, scale=raw.positive("route_scale", default=1.0))
    num_active = raw.size("num_experts_per_tok", default=6, limit=num)
    num_shared = raw.count("num_shared_experts", default=2)
    num_dense = raw.count("num_dense_layers", default=1, limit=MAX_LAYERS)
    is_scaled = raw.boolean("mup_enabled", default=False)
    config = replace(
        config,
        norm_placement="both",
        qk_norm="head",
        attention_gate="sigmoid",
        embed_scale=math.sqrt(config.hidden_size) if is_scaled else 1.0,
    )
    width = raw.size("moe_intermediate_size", default=1408, limit=MAX_WIDTH)
    return with_mixtures(config, Experts(num, num_active, router, num_shared), width, lambda layer: layer >= num_dense)


def _read_laguna(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=8, head_dim=128, sliding_window=512)
    raw.forbid("moe_apply_router_weight_on_input", False, "transformers has no other for this model_type")
    raw.forbid("moe_router_logit_softcapping", 0.0, "caps of a router's logits are not computed")
    config = with_windows(raw, read_llama_config(raw, has_rotary=False), lambda layer: False)
    raw.default(rope_parameters=_ROPE_OF_LAGUNA, replaces_null=True)
    config = with_rotary_by_kind(raw, _with_own_heads(raw, config), theta=500_000.0, local_theta=10_000.0)
    num = read_num_experts(raw, ("num_experts",), config.num_layers, 256)
    width = raw.size("moe_intermediate_size", default=512, limit=MAX_WIDTH)
    shared_width = raw.size("shared_expert_intermediate_size", default=512, limit=MAX_WIDTH)
    if shared_width % width:
        raise raw.error("shared_expert_intermediate_size", f"a multiple of moe_intermediate_size ({width})")
    router = Router("sigmoid", True, scale=raw.positive("moe_routed_scaling_factor", default=1.0))
    num_active = raw.size("num_experts_per_tok", default=8, limit=num)
    mixes = read_mixing(raw, config.num_layers, num_dense=1)
    gates_heads = raw.value("gating", True) is True or raw.choice("gating", _GATING, default="per-head")
    config = replace(config, qk_norm="head", attention_gate="softplus", gates_heads=gates_heads)
    return with_mixtures(config, Experts(num, num_active, router, shared_width // width), width, mixes.__getitem__)


_ROPE_OF_LAGUNA: dict[str, dict[str, object]] = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}


def _with_own_heads(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the heads that each layer has."""
    numbers = raw.integers("num_attention_heads_per_layer")
    if not numbers:
        return config
    groups = config.layers[0].num_kv_heads
    if len(numbers) != config.num_layers or any(number < 1 or number % groups for number in numbers):
        rule = f"a list of {config.num_layers} multiples of num_key_value_heads ({groups})"
        raise raw.error("num_attention_heads_per_layer", rule)
    layers = zip(config.layers, numbers, strict=True)
    return replace(config, layers=tuple(replace(layer, num_heads=number) for layer, number in layers))


_NORMS = {
    "blocks.{}.attn_norm": "layers.{}.input_layernorm",
    "blocks.{}.attn_output_norm": "layers.{}.post_attention_layernorm",
    "blocks.{}.ffn_norm": "layers.{}.pre_mlp_layernorm",
    "blocks.{}.ffn_output_norm": "layers.{}.post_mlp_layernorm",
}
_GATE = {"blocks.{}.attn_gate": "layers.{}.self_attn.gate_proj"}
_EXPERT = "layers.{}.mlp.experts.{}."
_SHARED = "layers.{}.mlp.shared_expert."
_afmoe_sources = layout.with_experts(
    layout.decoder({**EMBED, **_NORMS, **ATTENTION, **_GATE, **FFN, **END}),
    "layers.{}.mlp.router.gate",
    (f"{_EXPERT}gate_proj", f"{_EXPERT}up_proj"),
    f"{_EXPERT}down_proj",
    correction="layers.{}.mlp.expert_bias",
    shared=SHARED,
)
_laguna_sources = with_qwen_experts(
    layout.decoder({**NAMES, "blocks.{}.attn_gate": "layers.{}.self_attn.g_proj"}),
    "layers.{}.mlp.experts.e_score_correction_bias",
    layout.Shared((f"{_SHARED}gate_proj", f"{_SHARED}up_proj"), f"{_SHARED}down_proj"),
)
AFMOE = Family("afmoe", _read_afmoe, _afmoe_sources, ignored=IGNORED, models="Trinity")
LAGUNA = Family("laguna", _read_laguna, _laguna_sources, ignored=IGNORED, models="Laguna")
