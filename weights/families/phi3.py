"""Phi-3 and 4: Llama with fused projections and, in the long-context models, LongRoPE within the original context.

Abdin et al., "Phi-3 Technical Report" (2024).
"""

from __future__ import annotations

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, NAMES
from gptserve.weights.families.mistral import read_mistral_config


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(rms_norm_eps=1e-5, original_max_position_embeddings=4096)
    return read_mistral_config(raw)


FUSED = {"blocks.{}.qkv": "layers.{}.self_attn.qkv_proj", "blocks.{}.ffn_up": "layers.{}.mlp.gate_up_proj"}
PHI3 = Family("phi3", _read_config, layout.decoder({**NAMES, **FUSED}), ignored=IGNORED, models="Phi-3, Phi-4")
