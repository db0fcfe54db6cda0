"""EXAONE 4: Llama with norms after each part, normalised queries and keys, and positions where a window is.

LG AI Research, "EXAONE 4.0: Unified Large Language Models Integrating Non-reasoning and Reasoning Modes" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import LayerConfig, ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig, with_windows
from gptserve.weights.families.llama import IGNORED, read_llama_config
from gptserve.weights.families.olmo import NAMES


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096)
    config = read_llama_config(raw)
    has_windows = "sliding_window" in raw
    if not has_windows or "layer_types" in raw:
        raw.skip("sliding_window_pattern")  # "LLLG" in published files
    pattern = 4 if not has_windows or "layer_types" in raw else raw.size("sliding_window_pattern", default=4)
    config = with_windows(raw, config, lambda layer: has_windows and (layer + 1) % pattern > 0)

    def without_rotary(layer: LayerConfig) -> LayerConfig:
        return replace(layer, rotary=None) if layer.window is None else layer

    config = config.change_layers(without_rotary) if has_windows else config
    return replace(config, norm_placement="output", qk_norm="head")


EXAONE4 = Family("exaone4", _read_config, layout.decoder(NAMES), ignored=IGNORED, models="EXAONE 4")
