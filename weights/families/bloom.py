"""BLOOM: ALiBi instead of positions, a norm after the embedding, heads stored one by one.

BigScience Workshop, "BLOOM: A 176B-Parameter Open-Access Multilingual Language Model" (2022).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig, Source, plain_config


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("apply_residual_connection_post_layernorm", False, "no published BLOOM has it")
    config = plain_config(
        raw,
        # The largest one's file has the older names.
        width="hidden_size" if "hidden_size" in raw else "n_embed",
        layers="n_layer",
        heads="n_head" if "n_head" in raw else "num_attention_heads",
        context="seq_length",
        default_context=2048,
    )
    return replace(
        config,
        position=None,
        alibi_slopes=_slopes(config.num_heads),
        norm_eps=raw.positive("layer_norm_epsilon", default=1e-5),
        embed_norm=True,
        tied_head=raw.boolean("tie_word_embeddings", default=True),
    )


def _slopes(num_heads: int) -> tuple[float, ...]:
    """Press et al. 2022, section 3; heads beyond a power of two take every other slope of twice as many."""
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    return (*slopes, *(2 ** (-4 * (2 * h + 1) / power) for h in range(num_heads - power)))


def _sources(config: ModelConfig) -> dict[str, Source]:
    hidden, ffn = config.hidden_size, config.ffn_size
    order = layout.heads_together(config.num_heads, config.head_size)
    sources = layout.table("embed", "word_embeddings", config.vocab_size, hidden)
    sources |= layout.norm(config, "embed_norm", "word_embeddings_layernorm")
    for layer in range(config.num_layers):
        block, stored = f"blocks.{layer}.", f"h.{layer}."
        attention = f"{stored}self_attention."
        qkv = [(f"{attention}query_key_value", 3 * hidden)]
        sources |= layout.norm(config, f"{block}attn_norm", f"{stored}input_layernorm")
        sources |= layout.linear(f"{block}qkv", qkv, hidden, bias=True, row_order=order)
        sources |= layout.linear(f"{block}attn_out", [(f"{attention}dense", hidden)], hidden, bias=True)
        sources |= layout.norm(config, f"{block}ffn_norm", f"{stored}post_attention_layernorm")
        sources |= layout.linear(f"{block}ffn_up", [(f"{stored}mlp.dense_h_to_4h", ffn)], hidden, bias=True)
        sources |= layout.linear(f"{block}ffn_down", [(f"{stored}mlp.dense_4h_to_h", hidden)], ffn, bias=True)
    return sources | layout.norm(config, "final_norm", "ln_f") | layout.head(config, "lm_head")


BLOOM = Family(
    model_type="bloom",
    read_config=_read_config,
    sources=_sources,
    prefixes=("transformer.",),
    ignored=re.compile(r"lm_head\.weight"),
)
