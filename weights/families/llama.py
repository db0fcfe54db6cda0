"""Llama 1 to 3 and all that share its files' layout: RMSNorm, a gated feed-forward, grouped queries, rotary positions.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023). Families that differ in a few fields
or names build on `read_llama_config` and on these tables.
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import (
    ACTIVATIONS,
    MAX_WIDTH,
    Family,
    RawConfig,
    plain_config,
    with_ffn,
    with_kv_heads,
)
from gptserve.weights.families.rotary import with_rotary

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
llama_sources = layout.decoder(NAMES)
SINKS: layout.Names = {"blocks.{}.sinks": "layers.{}.self_attn.sinks"}
IGNORED = r"(layers\.\d+\.self_attn\.)?rotary_emb\.(original_)?inv_freq"


def read_llama_config(
    raw: RawConfig, *, attention_bias: bool = False, has_rotary: bool = True, has_activation: bool = True
) -> ModelConfig:
    """Return the fields that the layout's families share; each replaces those in which it differs.

    `attention_bias` is for a file that does not say. Without `has_rotary` the family reads the positions itself,
    and without `has_activation` the activation.
    """
    has_older_name = "max_sequence_length" in raw and "max_position_embeddings" not in raw  # early files of Llama 1
    context = "max_sequence_length" if has_older_name else "max_position_embeddings"
    config = plain_config(raw, head_size="head_dim", context=context, norm_eps=None, tied_head=False)
    has_bias = raw.boolean("attention_bias", default=attention_bias)
    config = with_kv_heads(raw, with_rotary(raw, config) if has_rotary else config)
    return replace(
        with_ffn(config, raw.size("intermediate_size", limit=MAX_WIDTH)),
        qkv_bias=has_bias,
        attn_out_bias=has_bias,
        activation=raw.choice("hidden_act", ACTIVATIONS, default="silu") if has_activation else config.activation,
        gated_ffn=True,
        ffn_bias=raw.boolean("mlp_bias", default=False),
        norm="rmsnorm",
        norm_eps=raw.positive("rms_norm_eps", default=1e-6),
        norm_bias=False,
    )


LLAMA = Family("llama", read_llama_config, llama_sources, ignored=IGNORED, models="Llama 1 to 3, SmolLM, TinyLlama")
