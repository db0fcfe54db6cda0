"""GPTBigCode (SantaCoder, StarCoder): GPT-2 with one key and value head for all queries.

Ben Allal et al., "SantaCoder: don't reach for the stars!" (2023).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.gpt2 import IGNORED, NAMES, read_gpt2_config


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("scale_attn_by_inverse_layer_idx", False, "no published GPTBigCode has it")
    config = read_gpt2_config(raw)
    has_one = raw.boolean("multi_query", default=True)
    return config.change_layers(lambda layer: replace(layer, num_kv_heads=1 if has_one else layer.num_heads))


_sources = layout.decoder(NAMES, qkv_order=layout.heads_together)
GPT_BIGCODE = Family("gpt_bigcode", _read_config, _sources, ("transformer.",), IGNORED, models="SantaCoder, StarCoder")
