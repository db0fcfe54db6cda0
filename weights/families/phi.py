"""Phi-1, 1.5 and 2: partly rotary heads, attention and feed-forward side by side after one norm, biases everywhere.

Gunasekar et al., "Textbooks Are All You Need" (2023).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, plain_config
from gptserve.weights.families.rotary import read_rotary, usable_context

NAMES: layout.Names = {
    "embed": "embed_tokens",
    "blocks.{}.attn_norm": "layers.{}.input_layernorm",
    "blocks.{}.qkv": ("layers.{}.self_attn.q_proj", "layers.{}.self_attn.k_proj", "layers.{}.self_attn.v_proj"),
    "blocks.{}.attn_out": "layers.{}.self_attn.dense",
    "blocks.{}.ffn_up": "layers.{}.mlp.fc1",
    "blocks.{}.ffn_down": "layers.{}.mlp.fc2",
    "final_norm": "final_layernorm",
    "head": "lm_head",
}


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


PHI = Family(
    model_type="phi",
    read_config=_read_config,
    sources=partial(layout.decoder, names=NAMES),
    prefixes=("model.",),
    ignored=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
)
