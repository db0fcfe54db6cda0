"""Phi-1, 1.5 and 2: partly rotary heads, attention and feed-forward side by side after one norm, biases everywhere.

Gunasekar et al., "Textbooks Are All You Need" (2023).
"""

from __future__ import annotations

import re

from weights.config import ModelConfig
from weights.families import layout
from weights.families.family import ACTIVATIONS, MAX_LAYERS, Family, RawConfig, Source
from weights.families.rotary import read_rotary


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("qk_layernorm", False, "no published Phi normalises queries and keys")
    num_layers, max_position = raw.size("num_hidden_layers", limit=MAX_LAYERS), raw.size("max_position_embeddings")
    head_size, num_heads = raw.share("hidden_size", "num_attention_heads"), raw.size("num_attention_heads")
    return ModelConfig(
        model_type="phi",
        vocab_size=raw.size("vocab_size"),
        hidden_size=raw.size("hidden_size"),
        num_layers=num_layers,
        max_position=max_position,
        num_heads=num_heads,
        num_kv_heads=raw.size("num_key_value_heads", default=num_heads),
        head_size=head_size,
        attention_scales=(head_size**-0.5,) * num_layers,
        attention_windows=(None,) * num_layers,
        ffn_size=raw.size("intermediate_size"),
        position=None,
        rotaries=(read_rotary(raw, head_size, max_position, fraction=0.5),) * num_layers,
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
