"""SmolLM3: Llama without positions on every fourth layer.

Bakouch et al., "SmolLM3: smol, multilingual, long-context reasoner" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families.family import Family, RawConfig, with_windows
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=4, rope_theta=2_000_000.0, tie_word_embeddings=True)
    config = read_llama_config(raw)
    has_rotary = _layers_with_rotary(raw, config.num_layers)
    if raw.boolean("use_sliding_window", default=False) and "sliding_window" in raw:
        config = with_windows(raw, config, lambda layer: not has_rotary[layer])
    else:
        raw.skip("sliding_window", "layer_types")
    layers = zip(config.layers, has_rotary, strict=True)
    return replace(config, layers=tuple(layer if its else replace(layer, rotary=None) for layer, its in layers))


def _layers_with_rotary(raw: RawConfig, num_layers: int) -> list[bool]:
    interval, flags = raw.size("no_rope_layer_interval", default=4), raw.value("no_rope_layers")
    if flags is None:
        return [(layer + 1) % interval > 0 for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise raw.error("no_rope_layers", f"a list of {num_layers}, each 1 for a layer with positions or 0")
    return [flag == 1 for flag in flags]


SMOLLM3 = Family("smollm3", _read_config, llama_sources, ignored=IGNORED, models="SmolLM3")
