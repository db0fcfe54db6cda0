"""GPT-NeoX and Pythia: partly rotary heads, stored head by head, and a parallel residual with two norms.

Black et al., "GPT-NeoX-20B: An Open-Source Autoregressive Language Model" (2022).
"""

from __future__ import annotations

import re
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, Source, plain_config
from gptserve.weights.families.rotary import read_rotary, usable_context


def _read_config(raw: RawConfig) -> ModelConfig:
    config = plain_config(
        raw,
        width="hidden_size",
        layers="num_hidden_layers",
        heads="num_attention_heads",
        context="max_position_embeddings",
    )
    has_bias = raw.boolean("attention_bias", default=True)
    theta, fraction = raw.positive("rotary_emb_base", default=10_000.0), raw.positive("rotary_pct", default=0.25)
    rotary = read_rotary(raw, config.head_size, config.max_position, theta=theta, fraction=fraction)
    return replace(
        config,
        max_position=usable_context(raw, config.max_position),
        ffn_size=raw.size("intermediate_size"),
        qkv_bias=has_bias,
        attn_out_bias=has_bias,
        position=None,
        rotaries=(rotary,) * config.num_layers,
        activation=raw.choice("hidden_act", ACTIVATIONS, default="gelu"),
        norm_eps=raw.positive("layer_norm_eps", default=1e-5),
        parallel_residual=raw.boolean("use_parallel_residual", default=True),
        tied_head=raw.boolean("tie_word_embeddings", default=False),
    )


def _sources(config: ModelConfig) -> dict[str, Source]:
    hidden, ffn, bias = config.hidden_size, config.ffn_size, config.qkv_bias
    order = layout.heads_together(config.num_heads, config.head_size)
    sources = layout.table("embed", "embed_in", config.vocab_size, hidden)
    for layer in range(config.num_layers):
        block, stored = f"blocks.{layer}.", f"layers.{layer}."
        qkv = [(f"{stored}attention.query_key_value", 3 * hidden)]
        sources |= layout.norm(config, f"{block}attn_norm", f"{stored}input_layernorm")
        sources |= layout.linear(f"{block}qkv", qkv, hidden, bias=bias, row_order=order)
        sources |= layout.linear(f"{block}attn_out", [(f"{stored}attention.dense", hidden)], hidden, bias=bias)
        sources |= layout.norm(config, f"{block}ffn_norm", f"{stored}post_attention_layernorm")
        sources |= layout.linear(f"{block}ffn_up", [(f"{stored}mlp.dense_h_to_4h", ffn)], hidden, bias=True)
        sources |= layout.linear(f"{block}ffn_down", [(f"{stored}mlp.dense_4h_to_h", hidden)], ffn, bias=True)
    return sources | layout.norm(config, "final_norm", "final_layer_norm") | layout.head(config, "embed_out")


GPT_NEOX = Family(
    model_type="gpt_neox",
    read_config=_read_config,
    sources=_sources,
    prefixes=("gpt_neox.",),
    ignored=re.compile(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)|embed_out\.weight"),
)
