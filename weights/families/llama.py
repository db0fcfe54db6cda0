"""Llama 1 to 3 and all that share its files' layout: RMSNorm, a gated feed-forward, grouped queries, rotary positions.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023). Families that differ in a few fields
or names build on `read_llama_config` and on these tables.
"""

from __future__ import annotations

import re
from functools import partial

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, MAX_LAYERS, MAX_WIDTH, Family, RawConfig
from gptserve.weights.families.rotary import read_rotary, usable_context

EMBED = {"embed": "embed_tokens"}
NORMS = {
    "blocks.{}.attn_norm": "layers.{}.input_layernorm",
    "blocks.{}.ffn_norm": "layers.{}.post_attention_layernorm",
}
ATTENTION: layout.Names = {
    "blocks.{}.qkv": ("layers.{}.self_attn.q_proj", "layers.{}.self_attn.k_proj", "layers.{}.self_attn.v_proj"),
    "blocks.{}.q_norm": "layers.{}.self_attn.q_norm",
    "blocks.{}.k_norm": "layers.{}.self_attn.k_norm",
    "blocks.{}.attn_out": "layers.{}.self_attn.o_proj",
}
FFN: layout.Names = {
    "blocks.{}.ffn_up": ("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"),
    "blocks.{}.ffn_down": "layers.{}.mlp.down_proj",
}
END = {"final_norm": "norm", "head": "lm_head"}
NAMES: layout.Names = {**EMBED, **NORMS, **ATTENTION, **FFN, **END}
llama_sources = partial(layout.decoder, names=NAMES)
IGNORED = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|lm_head\.weight")


def read_llama_config(raw: RawConfig) -> ModelConfig:
    """Return the fields that the layout's families share; each replaces those in which it differs."""
    num_layers = raw.size("num_hidden_layers", limit=MAX_LAYERS)
    has_older_name = "max_sequence_length" in raw and "max_position_embeddings" not in raw  # early files of Llama 1
    max_position = raw.size("max_sequence_length" if has_older_name else "max_position_embeddings")
    num_heads = raw.size("num_attention_heads")
    head_size = (
        raw.size("head_dim", limit=MAX_WIDTH) if "head_dim" in raw else raw.share("hidden_size", "num_attention_heads")
    )
    has_bias = raw.boolean("attention_bias", default=False)
    return ModelConfig(
        model_type=raw.text("model_type"),
        vocab_size=raw.size("vocab_size"),
        hidden_size=raw.size("hidden_size"),
        num_layers=num_layers,
        max_position=usable_context(raw, max_position),
        num_heads=num_heads,
        num_kv_heads=raw.kv_heads(num_heads),
        head_size=head_size,
        attention_scales=(head_size**-0.5,) * num_layers,
        attention_windows=(None,) * num_layers,
        ffn_size=raw.size("intermediate_size", limit=MAX_WIDTH),
        qkv_bias=has_bias,
        attn_out_bias=has_bias,
        position=None,
        rotaries=(read_rotary(raw, head_size, max_position),) * num_layers,
        activation=raw.choice("hidden_act", ACTIVATIONS, default="silu"),
        gated_ffn=True,
        ffn_bias=raw.boolean("mlp_bias", default=False),
        norm="rmsnorm",
        norm_eps=raw.positive("rms_norm_eps", default=1e-6),
        norm_bias=False,
        tied_head=raw.boolean("tie_word_embeddings", default=False),
    )


LLAMA = Family(
    model_type="llama",
    read_config=read_llama_config,
    sources=llama_sources,
    prefixes=("model.",),
    ignored=IGNORED,
)
