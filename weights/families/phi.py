"""Phi-1, 1.5 and 2: partly rotary heads, attention and feed-forward side by side after one norm, biases everywhere.

Gunasekar et al., "Textbooks Are All You Need" (2023).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, plain_config, with_ffn, with_kv_heads
from gptserve.weights.families.rotary import with_rotary

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
    config = plain_config(raw, norm_eps="layer_norm_eps", tied_head=False)
    config = with_kv_heads(raw, with_rotary(raw, config, fraction=0.5))
    return replace(
        with_ffn(config, raw.size("intermediate_size")),
        activation=raw.choice("hidden_act", ACTIVATIONS, default="gelu_new"),
        parallel_residual=True,
        shared_norm=True,
        head_bias=True,
    )


IGNORED = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
PHI = Family("phi", _read_config, layout.decoder(NAMES), ignored=IGNORED, models="Phi-1, Phi-1.5, Phi-2")
