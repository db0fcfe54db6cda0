"""HyperCLOVA X: Granite with norms behind each part, too, and a factor of the logits that is no divisor.

NAVER Cloud HyperCLOVA X Team, "HyperCLOVA X THINK Technical Report" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig, Source
from gptserve.weights.families.granite import with_factors
from gptserve.weights.families.llama import IGNORED, NAMES, read_llama_config

_NORMS = {
    "blocks.{}.attn_output_norm": "layers.{}.post_norm1",
    "blocks.{}.ffn_output_norm": "layers.{}.post_norm2",
}


def _read_config(raw: RawConfig) -> ModelConfig:
    config = read_llama_config(raw)
    raw.default(attention_multiplier=config.layers[0].attention_scale, replaces_null=True)
    has_norms = raw.boolean("use_post_norm", default=True)
    if has_norms:
        raw.forbid("residual_multiplier", 1.0, "with use_post_norm no published model has another")
    return replace(
        with_factors(raw, config),
        logit_scale=raw.positive("logits_scaling", default=1.0),
        norm_placement="both" if has_norms else "input",
    )


def _sources(config: ModelConfig) -> dict[str, Source]:
    return layout.decoder(NAMES if config.norm_placement == "input" else {**NAMES, **_NORMS})(config)


HYPERCLOVAX = Family("hyperclovax", _read_config, _sources, ignored=IGNORED, models="HyperCLOVA X SEED Think")
