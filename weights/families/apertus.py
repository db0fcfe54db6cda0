"""Apertus: Llama with norms of heads and a feed-forward without a gate, whose activation has numbers in each layer.

Swiss AI, "Apertus: Democratizing Open and Compliant LLMs for Global Language Environments" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import ATTENTION, EMBED, END, IGNORED, read_llama_config

NAMES: layout.Names = {
    **EMBED,
    "blocks.{}.attn_norm": "layers.{}.attention_layernorm",
    "blocks.{}.ffn_norm": "layers.{}.feedforward_layernorm",
    **ATTENTION,
    "blocks.{}.ffn_up": "layers.{}.mlp.up_proj",
    "blocks.{}.xielu": tuple(f"layers.{{}}.mlp.act_fn.{part}" for part in ("alpha_p", "alpha_n", "beta", "eps")),
    "blocks.{}.ffn_down": "layers.{}.mlp.down_proj",
    **END,
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192} | {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(rms_norm_eps=1e-5, max_position_embeddings=65536)
    if "rope_scaling" not in raw:
        raw.default(replaces_null=True, rope_parameters=_LLAMA3)
    raw.forbid("hidden_act", "xielu", "no other activation is published")
    raw.forbid("qk_norm", True, "transformers' class always has these norms")
    raw.forbid("post_norm", False, "transformers' class has the norms before attention and feed-forward")
    raw.forbid("mlp_bias", False, "transformers' class has none")
    return replace(read_llama_config(raw, has_activation=False), qk_norm="head", gated_ffn=False, xielu=True)


APERTUS = Family("apertus", _read_config, layout.decoder(NAMES), ignored=IGNORED, models="Apertus")
