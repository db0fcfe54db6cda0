"""OLMo: Llama with norms that have no weights. OLMo 2: with norms after each part, and of queries and keys. OLMo 3:
the same, with windows on three layers of four.

Groeneveld et al., "OLMo" (2024); OLMo Team, "2 OLMo 2 Furious" (2024) and "Olmo 3" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig, with_windows
from gptserve.weights.families.llama import ATTENTION, EMBED, END, FFN, IGNORED, llama_sources, read_llama_config
from gptserve.weights.families.rotary import with_rotary_by_kind

NORMS = {
    "blocks.{}.attn_output_norm": "layers.{}.post_attention_layernorm",
    "blocks.{}.ffn_output_norm": "layers.{}.post_feedforward_layernorm",
}
NAMES: layout.Names = {**EMBED, **NORMS, **ATTENTION, **FFN, **END}
PATTERN = 4  # OLMo 3: every fourth layer has no window


def _read_olmo(raw: RawConfig) -> ModelConfig:
    config = read_llama_config(raw)
    clip = raw.number("clip_qkv")
    return replace(config, norm="layernorm", norm_weight=False, norm_eps=1e-5, qkv_clip=clip)


def _read_olmo2(raw: RawConfig) -> ModelConfig:
    raw.default(rms_norm_eps=1e-5)
    return replace(read_llama_config(raw), norm_placement="output", qk_norm="projection")


def _read_olmo3(raw: RawConfig) -> ModelConfig:
    raw.default(rms_norm_eps=1e-5, sliding_window=4096)
    config = read_llama_config(raw, has_rotary=False)
    config = with_windows(raw, config, lambda layer: (layer + 1) % PATTERN > 0)
    config = with_rotary_by_kind(raw, config, theta=500_000.0, local_theta=500_000.0)
    return replace(config, norm_placement="output", qk_norm="projection")


OLMO = Family("olmo", _read_olmo, llama_sources, ignored=IGNORED, models="OLMo 1")
OLMO2 = Family("olmo2", _read_olmo2, layout.decoder(NAMES), ignored=IGNORED, models="OLMo 2")
OLMO3 = Family("olmo3", _read_olmo3, layout.decoder(NAMES), ignored=IGNORED, models="OLMo 3")
