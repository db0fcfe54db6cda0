"""GPTBigCode (SantaCoder, StarCoder): GPT-2 with one key and value head for all queries.

Ben Allal et al., "SantaCoder: don't reach for the stars!" (2023).
"""

from __future__ import annotations

import re
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, Source, plain_config


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
        norm_eps=raw.positive("layer_norm_epsilon", default=1e-5),
        tied_head=raw.boolean("tie_word_embeddings", default=True),
    )


def _sources(config: ModelConfig) -> dict[str, Source]:
    hidden, ffn, heads = config.hidden_size, config.ffn_size, config.num_heads
    order = layout.heads_together(heads, config.head_size) if config.num_kv_heads == heads else None
    sources = layout.table("embed", "wte", config.vocab_size, hidden)
    sources |= layout.table("position", "wpe", config.max_position, hidden)
    for layer in range(config.num_layers):
        block, stored = f"blocks.{layer}.", f"h.{layer}."
        qkv = [(f"{stored}attn.c_attn", config.qkv_size)]
        sources |= layout.norm(config, f"{block}attn_norm", f"{stored}ln_1")
        sources |= layout.linear(f"{block}qkv", qkv, hidden, bias=True, row_order=order)
        sources |= layout.linear(f"{block}attn_out", [(f"{stored}attn.c_proj", hidden)], hidden, bias=True)
        sources |= layout.norm(config, f"{block}ffn_norm", f"{stored}ln_2")
        sources |= layout.linear(f"{block}ffn_up", [(f"{stored}mlp.c_fc", ffn)], hidden, bias=True)
        sources |= layout.linear(f"{block}ffn_down", [(f"{stored}mlp.c_proj", hidden)], ffn, bias=True)
    return sources | layout.norm(config, "final_norm", "ln_f") | layout.head(config, "lm_head")


GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    read_config=_read_config,
    sources=_sources,
    prefixes=("transformer.",),
    ignored=re.compile(r"h\.\d+\.attn\.bias|lm_head\.weight"),
)
