"""Phi-1, 1.5 and 2: partly rotary heads, attention and feed-forward side by side after one norm, biases everywhere.

Gunasekar et al., "Textbooks Are All You Need" (2023).
"""

from __future__ import annotations

import re
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, Source, plain_config
from gptserve.weights.families.rotary import read_rotary, usable_context


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("qk_layernorm", False, "no published Phi normalises queries and keys")
    config = plain_config(
        raw,
        width="hidden_size",
        layers="num_hidden_layers",
        heads="num_attention_heads",
        context="max_position_embeddings",
    )
    rotary = read_rotary(raw, config.head_size, config.max_position, fraction=0.5)
    return replace(
        config,
        max_position=usable_context(raw, config.max_position),
        num_kv_heads=raw.kv_heads(config.num_heads),
        ffn_size=raw.size("intermediate_size"),
        position=None,
        rotaries=(rotary,) * config.num_layers,
        activation=raw.choice("hidden_act", ACTIVATIONS, default="gelu_new"),
        norm_eps=raw.positive("layer_norm_eps", default=1e-5),
        parallel_residual=True,
        shared_norm=True,
        tied_head=raw.boolean("tie_word_embeddings", default=False),
        head_bias=True,
    )


def _sources(config: ModelConfig) -> dict[str, Source]:
    hidden, ffn = config.hidden_size, config.ffn_size
    sources = layout.table("embed", "embed_tokens", config.vocab_size, hidden)
    for layer in range(config.num_layers):
        block, stored = f"blocks.{layer}.", f"layers.{layer}."
        out = [(f"{stored}self_attn.dense", hidden)]
        sources |= layout.norm(config, f"{block}attn_norm", f"{stored}input_layernorm")
        sources |= layout.linear(f"{block}qkv", layout.split_qkv(config, f"{stored}self_attn."), hidden, bias=True)
        sources |= layout.linear(f"{block}attn_out", out, config.num_heads * config.head_size, bias=True)
        sources |= layout.linear(f"{block}ffn_up", [(f"{stored}mlp.fc1", ffn)], hidden, bias=True)
        sources |= layout.linear(f"{block}ffn_down", [(f"{stored}mlp.fc2", hidden)], ffn, bias=True)
    return sources | layout.norm(config, "final_norm", "final_layernorm") | layout.head(config, "lm_head")


PHI = Family(
    model_type="phi",
    read_config=_read_config,
    sources=_sources,
    prefixes=("model.",),
    ignored=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
)
