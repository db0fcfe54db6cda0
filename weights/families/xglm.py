"""XGLM: the sinusoidal positions of "Attention Is All You Need", and an embedding scaled by the root of its width.

Lin et al., "Few-shot Learning with Multilingual Language Models" (2021).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, Source, plain_config


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("add_cross_attention", False, "there is no second text to attend to")
    config = plain_config(
        raw, width="d_model", layers="num_layers", heads="attention_heads", context="max_position_embeddings"
    )
    return replace(
        config,
        ffn_size=raw.size("ffn_dim"),
        position="sinusoidal",
        position_offset=2,
        activation=raw.choice("activation_function", ACTIVATIONS, default="gelu"),
        embed_scale=math.sqrt(config.hidden_size) if raw.boolean("scale_embedding", default=True) else 1.0,
        tied_head=raw.boolean("tie_word_embeddings", default=True),
    )


def _sources(config: ModelConfig) -> dict[str, Source]:
    hidden, ffn = config.hidden_size, config.ffn_size
    sources = layout.table("embed", "embed_tokens", config.vocab_size, hidden)
    for layer in range(config.num_layers):
        block, stored = f"blocks.{layer}.", f"layers.{layer}."
        out = [(f"{stored}self_attn.out_proj", hidden)]
        sources |= layout.norm(config, f"{block}attn_norm", f"{stored}self_attn_layer_norm")
        sources |= layout.linear(f"{block}qkv", layout.split_qkv(config, f"{stored}self_attn."), hidden, bias=True)
        sources |= layout.linear(f"{block}attn_out", out, hidden, bias=True)
        sources |= layout.norm(config, f"{block}ffn_norm", f"{stored}final_layer_norm")
        sources |= layout.linear(f"{block}ffn_up", [(f"{stored}fc1", ffn)], hidden, bias=True)
        sources |= layout.linear(f"{block}ffn_down", [(f"{stored}fc2", hidden)], ffn, bias=True)
    return sources | layout.norm(config, "final_norm", "layer_norm") | layout.head(config, "lm_head")


XGLM = Family(
    model_type="xglm",
    read_config=_read_config,
    sources=_sources,
    prefixes=("model.",),
    # Its positions are computed; some files carry the table.
    ignored=re.compile(r"embed_positions\.weights|lm_head\.weight"),
)
