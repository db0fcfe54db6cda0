"""Qwen's mixtures: Qwen3 with 128 experts in place of each feed-forward, or of some; Qwen2 with shared ones beside.

Yang et al., "Qwen2 Technical Report" (2024) and "Qwen3 Technical Report" (2025).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig, Router
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_WIDTH, Family, RawConfig, Source, with_windows
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config
from gptserve.weights.families.mixtral import MAX_EXPERTS
from gptserve.weights.families.mixtures import read_num_experts, with_mixtures
from gptserve.weights.families.qwen import read_qwen3_config

_EXPERT = "layers.{}.mlp.experts.{}."


def _read_qwen3(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=4, head_dim=None)
    raw.forbid("shared_expert_intermediate_size", 0, "its layers have no shared experts")
    config = read_qwen3_config(raw)
    num = raw.size("num_local_experts", default=raw.size("num_experts", default=128))
    if num * config.num_layers > MAX_EXPERTS:
        raise raw.error("num_experts", f"an integer in [1, {MAX_EXPERTS // config.num_layers}]")
    num_active = raw.size("num_experts_per_tok", default=8, limit=num)
    experts = Experts(num, num_active, Router(renormalised=raw.boolean("norm_topk_prob", default=False)))
    return _with_mixtures(raw, config, experts, raw.size("moe_intermediate_size", default=768, limit=MAX_WIDTH))


def _read_qwen3_vl(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=16, num_experts=60, num_experts_per_tok=4)
    raw.default(moe_intermediate_size=1408)
    raw.default(norm_topk_prob=True, replaces_null=True)
    raw.forbid("norm_topk_prob", True, "transformers has no other for this model_type")
    return _read_qwen3(raw)


def _read_qwen2(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=16, max_window_layers=28, sliding_window=4096)
    config = replace(read_llama_config(raw), qkv_bias=raw.boolean("qkv_bias", default=True), attn_out_bias=False)
    if raw.boolean("use_sliding_window", default=False):
        end = raw.count("max_window_layers")
        config = with_windows(raw, config, lambda layer: layer % 2 == 0 and layer < end)
    raw.skip("sliding_window", "max_window_layers", "layer_types")
    num = read_num_experts(raw, ("num_experts",), config.num_layers, 60)
    width = raw.size("moe_intermediate_size", default=1408, limit=MAX_WIDTH)
    shared_width = raw.size("shared_expert_intermediate_size", default=5632, limit=MAX_WIDTH)
    if shared_width % width:
        raise raw.error("shared_expert_intermediate_size", f"a multiple of moe_intermediate_size ({width})")
    experts = Experts(
        num,
        raw.size("num_experts_per_tok", default=4, limit=num),
        Router(renormalised=raw.boolean("norm_topk_prob", default=False)),
        num_shared=shared_width // width,
        has_shared_gate=True,
    )
    return _with_mixtures(raw, config, experts, width)


def _with_mixtures(raw: RawConfig, config: ModelConfig, experts: Experts, width: int) -> ModelConfig:
    return with_mixtures(config, experts, width, mixing_layers(raw))


def mixing_layers(raw: RawConfig) -> Callable[[int], bool]:
    """Return which layers mix: each of a step, but those that are told to be dense."""
    step, dense = raw.size("decoder_sparse_step", default=1), raw.integers("mlp_only_layers")
    return lambda layer: (layer + 1) % step == 0 and layer not in dense


def with_qwen_experts(
    dense: Callable[[ModelConfig], dict[str, Source]], correction: str = "", shared: layout.Shared | None = None
) -> Callable[[ModelConfig], dict[str, Source]]:
    """Return `dense` with routers and experts by the names that most families have."""
    up, down = (f"{_EXPERT}gate_proj", f"{_EXPERT}up_proj"), f"{_EXPERT}down_proj"
    return layout.with_experts(dense, "layers.{}.mlp.gate", up, down, correction=correction, shared=shared)


qwen_moe_sources = with_qwen_experts(llama_sources)
_SHARED = "layers.{}.mlp.shared_expert."
_GATE = "layers.{}.mlp.shared_expert_gate"
SHARED = layout.Shared((f"{_SHARED}gate_proj", f"{_SHARED}up_proj"), f"{_SHARED}down_proj", _GATE)
_qwen2_sources = with_qwen_experts(llama_sources, shared=SHARED)


def _qwen3_vl_sources(config: ModelConfig) -> dict[str, Source]:
    """Return all tensors; those of all experts of a layer are one, [experts, in, out], gates before ups."""
    found = llama_sources(config)
    for number, layer in enumerate(config.layers):
        if layer.experts is None:
            continue
        num, hidden, ffn = layer.experts.num, config.hidden_size, layer.ffn_size
        block, stored = f"blocks.{number}.", f"layers.{number}.mlp."
        found |= layout.linear(f"{block}router", [(f"{stored}gate", num)], hidden, bias=False)
        found |= layout.joined_experts(number, num, f"{stored}experts.", hidden, ffn, transpose=True)
    return layout.in_order(found)


QWEN2_MOE = Family("qwen2_moe", _read_qwen2, _qwen2_sources, ignored=IGNORED, models="Qwen1.5 and Qwen2 with experts")
QWEN3_MOE = Family(
    "qwen3_moe",
    _read_qwen3,
    qwen_moe_sources,
    ignored=IGNORED,
    models="Qwen3 and Qwen3-Coder with experts",
)
QWEN3_VL_MOE_TEXT = Family("qwen3_vl_moe_text", _read_qwen3_vl, _qwen3_vl_sources, ignored=IGNORED, models="")
"""Only as the text of one that sees."""
