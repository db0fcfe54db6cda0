"""Jais 2: Llama with LayerNorm, biases everywhere and a feed-forward of squared relu, without a gate.

Inception, "Jais 2" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, NAMES, read_llama_config


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(hidden_act="relu2", mlp_bias=True)
    return replace(
        read_llama_config(raw, attention_bias=True),
        gated_ffn=False,
        norm="layernorm",
        norm_eps=raw.positive("layer_norm_eps", default=1e-5),
        norm_bias=True,
    )


_sources = layout.decoder({**NAMES, "blocks.{}.ffn_up": "layers.{}.mlp.up_proj"})
JAIS2 = Family("jais2", _read_config, _sources, ignored=IGNORED, models="Jais 2")
