"""Persimmon: partly rotary heads, queries and keys normalised like the residual stream, a feed-forward of squared relu.

Adept, "Releasing Persimmon-8B" (2023).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, MAX_WIDTH, Family, RawConfig, plain_config, with_ffn
from gptserve.weights.families.rotary import with_rotary

NAMES = {
    "embed": "embed_tokens",
    "blocks.{}.attn_norm": "layers.{}.input_layernorm",
    "blocks.{}.qkv": "layers.{}.self_attn.query_key_value",
    "blocks.{}.q_norm": "layers.{}.self_attn.q_layernorm",
    "blocks.{}.k_norm": "layers.{}.self_attn.k_layernorm",
    "blocks.{}.attn_out": "layers.{}.self_attn.dense",
    "blocks.{}.ffn_norm": "layers.{}.post_attention_layernorm",
    "blocks.{}.ffn_up": "layers.{}.mlp.dense_h_to_4h",
    "blocks.{}.ffn_down": "layers.{}.mlp.dense_4h_to_h",
    "final_norm": "final_layernorm",
    "head": "lm_head",
}


def _read_config(raw: RawConfig) -> ModelConfig:
    config = with_rotary(raw, plain_config(raw, norm_eps="layer_norm_eps", tied_head=False), fraction=0.5)
    return replace(
        with_ffn(config, raw.size("intermediate_size", limit=MAX_WIDTH)),
        qk_norm="head" if raw.boolean("qk_layernorm", default=True) else None,
        activation=raw.choice("hidden_act", ACTIVATIONS, default="relu2"),
    )


IGNORED = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
PERSIMMON = Family(
    "persimmon",
    _read_config,
    layout.decoder(NAMES, qkv_order=layout.heads_together),
    ignored=IGNORED,
    models="Persimmon",
)
