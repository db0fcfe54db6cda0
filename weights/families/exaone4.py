"""EXAONE 4: Llama with norms after each part, normalised queries and keys, and positions where a window is.
K-EXAONE: the same with norms before each part, and mixtures as in DeepSeek V3 behind a dense first layer.

LG AI Research, "EXAONE 4.0: Unified Large Language Models Integrating Non-reasoning and Reasoning Modes" (2025) and
"K-EXAONE Technical Report" (2026).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import LayerConfig, ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_LAYERS, MAX_WIDTH, Family, RawConfig, with_windows
from gptserve.weights.families.glm4_moe import SHARED
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config
from gptserve.weights.families.mixtures import read_deepseek_experts, read_mixing, with_mixtures
from gptserve.weights.families.olmo import NAMES
from gptserve.weights.families.qwen_moe import with_qwen_experts


def _read_dense(raw: RawConfig) -> ModelConfig:
    return replace(_read_shared(raw), norm_placement="output")


def _read_moe(raw: RawConfig) -> ModelConfig:
    config = _read_shared(raw)
    raw.default(n_shared_experts=raw.value("num_shared_experts", 1), n_routed_experts=raw.value("num_experts", 64))
    raw.default(num_experts_per_tok=8, routed_scaling_factor=2.5)
    raw.skip("num_nextn_predict_layers")
    experts = read_deepseek_experts(raw, config, num=64, renormalised=True)
    num_dense = raw.count("first_last_k_dense_replace", default=1, limit=MAX_LAYERS)
    num_dense = raw.count("first_k_dense_replace", default=num_dense, limit=MAX_LAYERS)
    mixes = read_mixing(raw, config.num_layers, num_dense=num_dense)
    raw.forbid("is_moe_layer", list(mixes), "mlp_layer_types or first_k_dense_replace say which layers mix")
    width = raw.size("moe_intermediate_size", default=1024, limit=MAX_WIDTH)
    return with_mixtures(config, experts, width, mixes.__getitem__)


def _read_shared(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096)
    config = read_llama_config(raw)
    has_windows = "sliding_window" in raw
    if not has_windows or "layer_types" in raw:
        raw.skip("sliding_window_pattern")  # "LLLG" in published files
    pattern = 4 if not has_windows or "layer_types" in raw else raw.size("sliding_window_pattern", default=4)
    config = with_windows(raw, config, lambda layer: has_windows and (layer + 1) % pattern > 0)

    def without_rotary(layer: LayerConfig) -> LayerConfig:
        return replace(layer, rotary=None) if layer.window is None else layer

    config = config.change_layers(without_rotary) if has_windows else config
    return replace(config, qk_norm="head")


_moe_sources = with_qwen_experts(llama_sources, "layers.{}.mlp.e_score_correction_bias", SHARED)
EXAONE4 = Family("exaone4", _read_dense, layout.decoder(NAMES), ignored=IGNORED, models="EXAONE 4")
EXAONE_MOE = Family("exaone_moe", _read_moe, _moe_sources, ignored=rf"{IGNORED}|mtp\..*", models="K-EXAONE")
