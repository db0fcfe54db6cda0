"""BLOOM: ALiBi instead of positions, a norm after the embedding, heads stored one by one.

BigScience Workshop, "BLOOM: A 176B-Parameter Open-Access Multilingual Language Model" (2022).
"""

from __future__ import annotations

import math
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig, plain_config

NAMES = {
    "embed": "word_embeddings",
    "embed_norm": "word_embeddings_layernorm",
    "blocks.{}.attn_norm": "h.{}.input_layernorm",
    "blocks.{}.qkv": "h.{}.self_attention.query_key_value",
    "blocks.{}.attn_out": "h.{}.self_attention.dense",
    "blocks.{}.ffn_norm": "h.{}.post_attention_layernorm",
    "blocks.{}.ffn_up": "h.{}.mlp.dense_h_to_4h",
    "blocks.{}.ffn_down": "h.{}.mlp.dense_4h_to_h",
    "final_norm": "ln_f",
    "head": "lm_head",
}


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("apply_residual_connection_post_layernorm", False, "no published BLOOM has it")
    # The file of the largest BLOOM has the older names.
    width = "hidden_size" if "hidden_size" in raw else "n_embed"
    heads = "n_head" if "n_head" in raw else "num_attention_heads"
    config = plain_config(raw, width=width, layers="n_layer", heads=heads, context="seq_length", default_context=2048)
    config = config.change_layers(lambda layer: replace(layer, alibi_slopes=alibi_slopes(layer.num_heads)))
    return replace(config, position=None, embed_norm=True)


def alibi_slopes(num_heads: int, steepest: int = 8) -> tuple[float, ...]:
    """Return powers of two down to 2^-steepest: every other one first, unless num_heads is a power of two.

    Press et al. 2022, section 3.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2 ** (-steepest * (h + 1) / power) for h in range(power)]
    return tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


BLOOM = Family(
    "bloom", _read_config, layout.decoder(NAMES, qkv_order=layout.heads_together), ("transformer.",), models="BLOOM"
)
