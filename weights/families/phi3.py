"""Phi-3 and 4: Llama with fused projections and, in the long-context models, LongRoPE within the original context.

Abdin et al., "Phi-3 Technical Report" (2024).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig, read_windows
from gptserve.weights.families.llama import IGNORED, NAMES, read_llama_config

FUSED = {"blocks.{}.qkv": "layers.{}.self_attn.qkv_proj", "blocks.{}.ffn_up": "layers.{}.mlp.gate_up_proj"}


def _read_config(raw: RawConfig) -> ModelConfig:
    config = read_llama_config(raw)
    slides = (raw.value("sliding_window") is not None,) * config.num_layers
    return replace(config, attention_windows=read_windows(raw, config, slides))


PHI3 = Family(
    model_type="phi3",
    read_config=_read_config,
    sources=partial(layout.decoder, names={**NAMES, **FUSED}),
    prefixes=("model.",),
    ignored=IGNORED,
)
