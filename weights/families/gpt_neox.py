"""GPT-NeoX and Pythia: partly rotary heads, projections stored head by head, a parallel residual with two norms.

Black et al., "GPT-NeoX-20B: An Open-Source Autoregressive Language Model" (2022).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, plain_config
from gptserve.weights.families.rotary import read_rotary, usable_context

NAMES = {
    "embed": "embed_in",
    "blocks.{}.attn_norm": "layers.{}.input_layernorm",
    "blocks.{}.qkv": "layers.{}.attention.query_key_value",
    "blocks.{}.attn_out": "layers.{}.attention.dense",
    "blocks.{}.ffn_norm": "layers.{}.post_attention_layernorm",
    "blocks.{}.ffn_up": "layers.{}.mlp.dense_h_to_4h",
    "blocks.{}.ffn_down": "layers.{}.mlp.dense_4h_to_h",
    "final_norm": "final_layer_norm",
    "head": "embed_out",
}


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


GPT_NEOX = Family(
    model_type="gpt_neox",
    read_config=_read_config,
    sources=partial(layout.decoder, names=NAMES, qkv_order=layout.heads_together),
    prefixes=("gpt_neox.",),
    ignored=re.compile(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)|embed_out\.weight"),
)
