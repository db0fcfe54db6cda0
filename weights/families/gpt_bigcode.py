"""GPTBigCode (SantaCoder, StarCoder): GPT-2 with one key and value head for all queries.

Ben Allal et al., "SantaCoder: don't reach for the stars!" (2023).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, plain_config
from gptserve.weights.families.gpt2 import NAMES


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("add_cross_attention", False, "there is no second text to attend to")
    config = plain_config(raw, width="n_embd", layers="n_layer", heads="n_head", context="n_positions")
    scale = config.head_size**-0.5 if raw.boolean("scale_attn_weights", default=True) else 1.0
    return replace(
        config,
        num_kv_heads=1 if raw.boolean("multi_query", default=True) else config.num_heads,
        attention_scales=(scale,) * config.num_layers,
        ffn_size=raw.size("n_inner", default=config.ffn_size),
        activation=raw.choice("activation_function", ACTIVATIONS, default="gelu_pytorch_tanh"),
    )


IGNORED = r"h\.\d+\.attn\.bias|lm_head\.weight"
_sources = layout.decoder(NAMES, qkv_order=layout.heads_together)
GPT_BIGCODE = Family("gpt_bigcode", _read_config, _sources, ("transformer.",), IGNORED)
