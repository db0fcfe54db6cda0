"""Nemotron 4 and Minitron: partly rotary heads, LayerNorm with weights around 0, a feed-forward of squared relu.

NVIDIA, "Nemotron-4 340B Technical Report" (2024).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, NAMES, read_llama_config


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(hidden_act="relu2", partial_rotary_factor=0.5)
    return replace(
        read_llama_config(raw),
        gated_ffn=False,
        norm="layernorm",
        norm_eps=raw.positive("norm_eps", default=1e-5),
        norm_bias=True,
        norm_weight_offset=1.0,
    )


_sources = layout.decoder({**NAMES, "blocks.{}.ffn_up": "layers.{}.mlp.up_proj"})
NEMOTRON = Family("nemotron", _read_config, _sources, ignored=IGNORED, models="Nemotron 4, Minitron")
