"""OLMo 2: Llama with norms after each part instead of before, and queries and keys normalised as wholes.

OLMo Team, "2 OLMo 2 Furious" (2024).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import ATTENTION, EMBED, END, FFN, IGNORED, read_llama_config

NORMS = {
    "blocks.{}.attn_output_norm": "layers.{}.post_attention_layernorm",
    "blocks.{}.ffn_output_norm": "layers.{}.post_feedforward_layernorm",
}
NAMES: layout.Names = {**EMBED, **NORMS, **ATTENTION, **FFN, **END}


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(rms_norm_eps=1e-5)
    return replace(read_llama_config(raw), norm_placement="output", qk_norm="projection")


OLMO2 = Family("olmo2", _read_config, layout.decoder(NAMES), ignored=IGNORED)
