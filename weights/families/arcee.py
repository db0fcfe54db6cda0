"""Arcee AFM: Llama with a feed-forward of squared relu, without a gate.

Arcee AI, "AFM-4.5B" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, NAMES, read_llama_config


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(rms_norm_eps=1e-5, hidden_act="relu2")
    return replace(read_llama_config(raw), gated_ffn=False)


_sources = layout.decoder({**NAMES, "blocks.{}.ffn_up": "layers.{}.mlp.up_proj"})
ARCEE = Family("arcee", _read_config, _sources, ignored=IGNORED, models="Arcee AFM")
