"""Granite 3, dense: Llama with factors of the embedding, the scores, the residual terms and the logits.

IBM Granite Team, "Granite 3.0 Language Models" (2024).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config


def _read_config(raw: RawConfig) -> ModelConfig:
    """Return the fields. The residual stream x + m f(n(x)) is computed as x / m, whose terms have no factor.

    The norm n does not see m if its eps is divided by m^2.
    """
    config = read_llama_config(raw)
    attention_scale = raw.positive("attention_multiplier", default=1.0)
    m = raw.positive("residual_multiplier", default=1.0)
    return replace(
        config.change_layers(lambda layer: replace(layer, attention_scale=attention_scale)),
        norm_eps=config.norm_eps / m**2,
        embed_scale=raw.positive("embedding_multiplier", default=1.0) / m,
        logit_scale=1.0 / raw.positive("logits_scaling", default=1.0),
    )


GRANITE = Family("granite", _read_config, llama_sources, ignored=IGNORED)
