"""Mistral 7B and its like: Llama with a sliding window on every layer, or on none. Ministral: on the layers of a list.

Jiang et al., "Mistral 7B" (2023).
"""

from __future__ import annotations

from gptserve.weights.config import ModelConfig
from gptserve.weights.families.family import Family, RawConfig, with_windows
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=8, sliding_window=4096)
    return read_mistral_config(raw)


def read_mistral_config(raw: RawConfig) -> ModelConfig:
    """Return Llama's fields, with a window if the file says one."""
    slides = raw.value("sliding_window") is not None
    return with_windows(raw, read_llama_config(raw), lambda layer: slides)


MISTRAL = Family("mistral", _read_config, llama_sources, ignored=IGNORED)
MINISTRAL = Family("ministral", _read_config, llama_sources, ignored=IGNORED)
