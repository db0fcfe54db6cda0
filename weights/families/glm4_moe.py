"""GLM 4.5 to 4.7: partly rotary heads, dense first layers, then mixtures with shared experts. dots.llm1. Solar Open.

GLM-4.5 Team, "GLM-4.5: Agentic, Reasoning, and Coding (ARC) Foundation Models" (2025). Huo et al., "dots.llm1 Technical
Report" (2025). Upstage, "Solar Open Technical Report" (2026).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_LAYERS, MAX_WIDTH, Family, RawConfig, with_windows
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config
from gptserve.weights.families.mixtures import read_deepseek_experts, with_mixtures
from gptserve.weights.families.qwen_moe import with_qwen_experts

DRAFTING = r"layers\.(46|92)\..*"
"""Layers behind the last one, which predict further tokens: of GLM 4.5 Air and of the larger ones."""


def _read_glm(raw: RawConfig) -> ModelConfig:
    raw.default(rms_norm_eps=1e-5, num_key_value_heads=8, partial_rotary_factor=0.5)
    raw.skip("num_nextn_predict_layers", "num_mtp_layers")
    config = replace(read_llama_config(raw), attn_out_bias=False)
    if raw.boolean("use_qk_norm", default=False):
        config = replace(config, qk_norm="head")
    raw.default(num_experts_per_tok=8, n_shared_experts=1)
    return _with_mixtures(raw, config, num=128, num_dense=1, renormalised=True)


def _read_dots(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=32, sliding_window=4096)
    config = replace(read_llama_config(raw), qk_norm="head")
    if "sliding_window" in raw:
        first = raw.count("max_window_layers", default=62)
        config = with_windows(raw, config, lambda layer: layer >= first)
    raw.skip("max_window_layers", "layer_types")
    return _with_mixtures(raw, config, num=None, num_dense=0, renormalised=False)


def _read_solar(raw: RawConfig) -> ModelConfig:
    raw.default(rms_norm_eps=1e-5, num_key_value_heads=8, head_dim=128, rope_theta=1_000_000.0)
    raw.default(num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=1280)
    raw.default(intermediate_size=raw.value("moe_intermediate_size", 1280), replaces_null=True)  # no layer is dense
    for name, value in (("first_k_dense_replace", 0), ("use_qk_norm", False)):
        raw.forbid(name, value, "transformers has no other for this model_type")
    raw.skip("num_nextn_predict_layers")
    config = replace(read_llama_config(raw), attn_out_bias=False)
    return _with_mixtures(raw, config, num=128, num_dense=0, renormalised=True)


def _with_mixtures(
    raw: RawConfig, config: ModelConfig, *, num: int | None, num_dense: int, renormalised: bool
) -> ModelConfig:
    experts = read_deepseek_experts(raw, config, num=num, renormalised=renormalised)
    width = raw.size("moe_intermediate_size", default=1408, limit=MAX_WIDTH)
    num_dense = raw.count("first_k_dense_replace", default=num_dense, limit=MAX_LAYERS)
    return with_mixtures(config, experts, width, lambda layer: layer >= num_dense)


_SHARED = "layers.{}.mlp.shared_experts."
SHARED = layout.Shared((f"{_SHARED}gate_proj", f"{_SHARED}up_proj"), f"{_SHARED}down_proj")
_sources = with_qwen_experts(llama_sources, "layers.{}.mlp.gate.e_score_correction_bias", SHARED)

GLM4_MOE = Family(
    "glm4_moe",
    _read_glm,
    _sources,
    ignored=rf"{IGNORED}|{DRAFTING}",
    models="GLM 4.5 to 4.7 with experts",
)
SOLAR_OPEN = Family("solar_open", _read_solar, _sources, ignored=IGNORED, models="Solar Open")
DOTS1 = Family("dots1", _read_dots, _sources, ignored=IGNORED, models="dots.llm1")
