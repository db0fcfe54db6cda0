"""Gemma 1: Llama with a scaled embedding. Gemma 2 and 3 (text): norms on both sides of each part, alternating windows,
capped or normalised scores. VaultGemma: Gemma 2 with norms before each part alone.

Gemma Team, "Gemma: Open Models Based on Gemini Research and Technology" (2024), "Gemma 2: Improving Open Language
Models at a Practical Size" (2024), "Gemma 3 Technical Report" (2025), "VaultGemma: A Differentially Private Gemma
Model" (2025).
"""

from __future__ import annotations

import math
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, with_windows
from gptserve.weights.families.llama import ATTENTION, EMBED, END, FFN, IGNORED, llama_sources, read_llama_config
from gptserve.weights.families.rotary import with_rotary_by_kind

NORMS = {
    "blocks.{}.attn_norm": "layers.{}.input_layernorm",
    "blocks.{}.attn_output_norm": "layers.{}.post_attention_layernorm",
    "blocks.{}.ffn_norm": "layers.{}.pre_feedforward_layernorm",
    "blocks.{}.ffn_output_norm": "layers.{}.post_feedforward_layernorm",
}
NAMES: layout.Names = {**EMBED, **NORMS, **ATTENTION, **FFN, **END}
VAULT_NAMES = {name: stored for name, stored in NAMES.items() if not name.endswith("output_norm")}
PATTERN = 6  # Gemma 3: every sixth layer has no window


def _read_gemma(raw: RawConfig) -> ModelConfig:
    raw.default(head_dim=256, num_key_value_heads=16, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True)
    raw.forbid("use_bidirectional_attention", False, "bidirectional attention cannot continue a text")
    config = read_llama_config(raw)
    activation = (
        config.activation
        if "hidden_activation" not in raw
        else raw.choice("hidden_activation", ACTIVATIONS, default="gelu")
    )
    return replace(
        config,
        activation="gelu_tanh"
        if activation == "gelu"
        else activation,  # published files say the one, and mean the other
        norm_weight_offset=1.0,
        embed_scale=math.sqrt(config.hidden_size),
    )


def _read_gemma2(raw: RawConfig) -> ModelConfig:
    raw.default(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    return with_windows(raw, _read_shared(raw), lambda layer: layer % 2 == 0)


def _read_vault(raw: RawConfig) -> ModelConfig:
    return replace(_read_gemma2(raw), norm_placement="input")


def _read_gemma3(raw: RawConfig) -> ModelConfig:
    pattern = raw.size("sliding_window_pattern", default=raw.size("_sliding_window_pattern", default=PATTERN))
    config = with_windows(raw, _read_shared(raw), lambda layer: (layer + 1) % pattern > 0)
    near = raw.positive("rope_local_base_freq", default=10_000.0)
    config = with_rotary_by_kind(raw, config, theta=1_000_000.0, local_theta=near)
    return replace(config, qk_norm="head")


def _read_shared(raw: RawConfig) -> ModelConfig:
    raw.default(head_dim=256, num_key_value_heads=4)
    raw.forbid("use_bidirectional_attention", False, "bidirectional attention cannot continue a text")
    config = read_llama_config(raw)
    scale = raw.positive("query_pre_attn_scalar", default=256.0) ** -0.5
    return replace(
        config.change_layers(lambda layer: replace(layer, attention_scale=scale)),
        attention_softcap=raw.number("attn_logit_softcapping") or None,
        activation=raw.choice("hidden_activation", ACTIVATIONS, default="gelu_pytorch_tanh"),
        norm_placement="both",
        norm_weight_offset=1.0,
        embed_scale=math.sqrt(config.hidden_size),
        tied_head=raw.boolean("tie_word_embeddings", default=True),
        logit_softcap=raw.number("final_logit_softcapping"),
    )


GEMMA = Family("gemma", _read_gemma, llama_sources, ignored=IGNORED, models="Gemma 1, CodeGemma")
GEMMA2 = Family("gemma2", _read_gemma2, layout.decoder(NAMES), ignored=IGNORED, models="Gemma 2")
VAULTGEMMA = Family("vaultgemma", _read_vault, layout.decoder(VAULT_NAMES), ignored=IGNORED, models="VaultGemma")
GEMMA3 = Family("gemma3_text", _read_gemma3, layout.decoder(NAMES), ignored=IGNORED, models="Gemma 3, text only")
