"""Mellum 2: Qwen3's mixtures with windows, and rotary positions of either kind of layers. Flint: the same with sinks,
and one shared expert; layers without a window have no positions.

JetBrains, "Mellum 2" (2026), https://huggingface.co/JetBrains; RecursiveSI, "Flint" (2026).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig, Router
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_WIDTH, Family, RawConfig, with_windows
from gptserve.weights.families.llama import IGNORED, NAMES, read_llama_config
from gptserve.weights.families.mixtures import read_mixing, read_num_experts, with_mixtures
from gptserve.weights.families.qwen_moe import mixing_layers, qwen_moe_sources, with_qwen_experts
from gptserve.weights.families.rotary import with_rotary_by_kind


def _read_mellum(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=4, head_dim=128, sliding_window=1024)
    raw.skip("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")
    config = with_windows(raw, read_llama_config(raw, has_rotary=False), lambda layer: False)
    config = with_rotary_by_kind(raw, config, theta=500_000.0, local_theta=10_000.0)
    num = read_num_experts(raw, ("num_local_experts", "num_experts"), config.num_layers, 64)
    router = Router(renormalised=raw.boolean("norm_topk_prob", default=True))
    experts = Experts(num, raw.size("num_experts_per_tok", default=8, limit=num), router)
    width = raw.size("moe_intermediate_size", default=896, limit=MAX_WIDTH)
    mixes = read_mixing(raw, config.num_layers, num_dense=0)
    return with_mixtures(replace(config, qk_norm="head"), experts, width, mixes.__getitem__)


def _read_flint(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=4, head_dim=128, sliding_window=513, mlp_only_layers=[0, 1], replaces_null=True)
    config = read_llama_config(raw)
    last = config.num_layers - 1
    config = with_windows(raw, config, lambda layer: 2 <= layer < last and layer % 4 != 1)
    config = config.change_layers(lambda layer: layer if layer.window is not None else replace(layer, rotary=None))
    width = raw.size("moe_intermediate_size", default=512, limit=MAX_WIDTH)
    shared_width = raw.size("shared_expert_intermediate_size", default=1024, limit=MAX_WIDTH)
    if shared_width % width:
        raise raw.error("shared_expert_intermediate_size", f"a multiple of moe_intermediate_size ({width})")
    num = read_num_experts(raw, ("num_experts",), config.num_layers, 256)
    experts = Experts(
        num,
        raw.size("num_experts_per_tok", default=6, limit=num),
        Router("sigmoid", renormalised=raw.boolean("norm_topk_prob", default=True)),
        num_shared=shared_width // width,
    )
    config = replace(config, qk_norm="head", attention_sinks=True)
    return with_mixtures(config, experts, width, mixing_layers(raw))


_SHARED = "layers.{}.mlp.shared_expert."
_flint_sources = with_qwen_experts(
    layout.decoder({**NAMES, "blocks.{}.sinks": "layers.{}.self_attn.softmax_offset"}),
    shared=layout.Shared((f"{_SHARED}gate_proj", f"{_SHARED}up_proj"), f"{_SHARED}down_proj"),
)
MELLUM = Family("mellum", _read_mellum, qwen_moe_sources, ignored=rf"{IGNORED}|mtp\..*", models="Mellum 2")
FLINT = Family("flint", _read_flint, _flint_sources, ignored=IGNORED, models="Flint")
