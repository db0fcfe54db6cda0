"""Mistral 7B and its like: Llama with a sliding window on every layer, or on none. Ministral: on the layers of a list.

Jiang et al., "Mistral 7B" (2023). Ministral 3 has none, and YaRN. But for the largest Devstral 2, it multiplies
queries behind the original context by a number that grows with their position, as Llama 4 does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families.family import Family, RawConfig, with_windows
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config

ROPE_OF_MINISTRAL3: Mapping[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What transformers' class has."""


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=8, sliding_window=4096)
    return read_mistral_config(raw)


def read_mistral_config(raw: RawConfig) -> ModelConfig:
    """Return Llama's fields, with a window if the file says one."""
    slides = raw.value("sliding_window") is not None
    return with_windows(raw, read_llama_config(raw), lambda layer: slides)


def _read_ministral3(raw: RawConfig) -> ModelConfig:
    raw.default(head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5, sliding_window=None)
    raw.default(rope_parameters=ROPE_OF_MINISTRAL3, replaces_null=True)
    config, rope = read_mistral_config(raw), raw.section("rope_parameters")
    rope.skip("max_position_embeddings")
    if not rope.value("llama_4_scaling_beta"):
        return config
    if config.layers[0].head_size % 2:
        raise raw.error("head_dim", "even")
    raw.forbid("partial_rotary_factor", 1.0, "transformers has no other")
    rope.forbid("partial_rotary_factor", 1.0, "transformers has no other")
    growth = rope.positive("llama_4_scaling_beta", default=0.0), rope.size("original_max_position_embeddings")
    return config.change_layers(
        lambda layer: replace(layer, rotary=layer.rotary and replace(layer.rotary, growth=growth))
    )


MISTRAL = Family("mistral", _read_config, llama_sources, ignored=IGNORED, models="Mistral")
MINISTRAL = Family("ministral", _read_config, llama_sources, ignored=IGNORED, models="Ministral")
MINISTRAL3 = Family(
    "ministral3",
    _read_ministral3,
    llama_sources,
    ignored=IGNORED,
    models="Ministral 3, Devstral 2",
)
