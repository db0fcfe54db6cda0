"""OLMo 2: Llama with norms after each part instead of before, and queries and keys normalised as wholes.

OLMo Team, "2 OLMo 2 Furious" (2024).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from gptserve.weights.config import ModelConfig
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config

NORMS = {"attn_output_norm": "post_attention_layernorm", "ffn_output_norm": "post_feedforward_layernorm"}


def _read_config(raw: RawConfig) -> ModelConfig:
    return replace(read_llama_config(raw), norm_placement="output", qk_norm="projection")


OLMO2 = Family(
    model_type="olmo2",
    read_config=_read_config,
    sources=partial(llama_sources, norms=NORMS),
    prefixes=("model.",),
    ignored=IGNORED,
)
