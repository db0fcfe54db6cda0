"""GLM 4 of 2024 and of 2025: Llama with partly rotary heads of neighbouring pairs; the later one has norms of outputs.

GLM Team, "ChatGLM: A Family of Large Language Models from GLM-130B to GLM-4 All Tools" (2024).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import ATTENTION, EMBED, END, FFN, IGNORED, NAMES, read_llama_config

FUSED = {"blocks.{}.ffn_up": "layers.{}.mlp.gate_up_proj"}
NORMS = {
    "blocks.{}.attn_norm": "layers.{}.input_layernorm",
    "blocks.{}.attn_output_norm": "layers.{}.post_self_attn_layernorm",
    "blocks.{}.ffn_norm": "layers.{}.post_attention_layernorm",
    "blocks.{}.ffn_output_norm": "layers.{}.post_mlp_layernorm",
}


def _read_glm(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-07, partial_rotary_factor=0.5)
    return replace(read_llama_config(raw, attention_bias=True), attn_out_bias=False)


def _read_glm4(raw: RawConfig) -> ModelConfig:
    return replace(_read_glm(raw), norm_placement="both")


_glm = layout.decoder({**NAMES, **FUSED}, qkv_order=layout.halves_apart)
_glm4 = layout.decoder({**EMBED, **NORMS, **ATTENTION, **FFN, **END, **FUSED}, qkv_order=layout.halves_apart)
GLM = Family("glm", _read_glm, _glm, ignored=IGNORED, models="GLM 4 of 2024")
GLM4 = Family("glm4", _read_glm4, _glm4, ignored=IGNORED, models="GLM 4 of 2025, without experts")
