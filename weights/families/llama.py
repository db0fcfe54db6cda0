"""Llama 1 to 3 and all that share its files' layout: RMSNorm, a gated feed-forward, grouped queries, rotary positions.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023). `read_llama_config` and `llama_sources`
are the base of the families that differ from it in a few fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, MAX_LAYERS, MAX_WIDTH, Family, RawConfig, Source
from gptserve.weights.families.rotary import read_rotary, usable_context

NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
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


def llama_sources(
    config: ModelConfig, norms: Mapping[str, str] = NORMS, *, fused: bool = False, ffn: bool = True
) -> dict[str, Source]:
    """Return the layout's tensors; `norms` maps a block's norms to their names in the file.

    fused: query, key and value are one tensor, gate and up another. ffn: False where the family adds its own.
    """
    hidden, attended = config.hidden_size, config.num_heads * config.head_size
    sources = layout.table("embed", "embed_tokens", config.vocab_size, hidden)
    for layer in range(config.num_layers):
        block, stored = f"blocks.{layer}.", f"layers.{layer}."
        attention, mlp = f"{stored}self_attn.", f"{stored}mlp."
        for name, its_name in norms.items():
            sources |= layout.norm(config, f"{block}{name}", f"{stored}{its_name}")
        qkv = [(f"{attention}qkv_proj", config.qkv_size)] if fused else layout.split_qkv(config, attention)
        sources |= layout.linear(f"{block}qkv", qkv, hidden, bias=config.qkv_bias)
        if config.qk_norm:
            wholes = {"q": attended, "k": config.num_kv_heads * config.head_size}
            for name, whole in wholes.items():
                size = config.head_size if config.qk_norm == "head" else whole
                sources |= layout.norm(config, f"{block}{name}_norm", f"{attention}{name}_norm", size)
        sources |= layout.linear(
            f"{block}attn_out", [(f"{attention}o_proj", hidden)], attended, bias=config.attn_out_bias
        )
        if ffn:
            size = config.ffn_size
            up = [(f"{mlp}gate_up_proj", 2 * size)] if fused else [(f"{mlp}gate_proj", size), (f"{mlp}up_proj", size)]
            sources |= layout.linear(f"{block}ffn_up", up, hidden, bias=config.ffn_bias)
            sources |= layout.linear(f"{block}ffn_down", [(f"{mlp}down_proj", hidden)], size, bias=config.ffn_bias)
    return sources | layout.norm(config, "final_norm", "norm") | layout.head(config, "lm_head")


LLAMA = Family(
    model_type="llama",
    read_config=read_llama_config,
    sources=llama_sources,
    prefixes=("model.",),
    ignored=IGNORED,
)
