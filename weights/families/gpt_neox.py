"""GPT-NeoX and Pythia: partly rotary heads, projections stored head by head, a parallel residual with two norms.

Black et al., "GPT-NeoX-20B: An Open-Source Autoregressive Language Model" (2022).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, plain_config, with_ffn
from gptserve.weights.families.rotary import with_rotary

NAMES = {
    "embed": "embed_in",
    "blocks.{}.attn_norm": "layers.{}.input_layernorm",
    "blocks.{}.qkv": "layers.{}.attention.query_key_value",
    "blocks.{}.attn_out": "layers.{}.attention.dense",
    "blocks.{}.ffn_norm": "layers.{}.post_attention_layernorm",
    "blocks.{}.ffn_up": "layers.{}.mlp.dense_h_to_4h",
    "blocks.{}.ffn_down": "layers.{}.mlp.dense_4h_to_h",
    "final_norm": "final_layer_norm",
    "head": "embed_out",
}


def _read_config(raw: RawConfig) -> ModelConfig:
    config = plain_config(raw, norm_eps="layer_norm_eps", tied_head=False)
    has_bias = raw.boolean("attention_bias", default=True)
    theta, fraction = raw.positive("rotary_emb_base", default=10_000.0), raw.positive("rotary_pct", default=0.25)
    return replace(
        with_ffn(with_rotary(raw, config, theta=theta, fraction=fraction), raw.size("intermediate_size")),
        qkv_bias=has_bias,
        attn_out_bias=has_bias,
        activation=raw.choice("hidden_act", ACTIVATIONS, default="gelu"),
        parallel_residual=raw.boolean("use_parallel_residual", default=True),
    )


IGNORED = r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
_sources = layout.decoder(NAMES, qkv_order=layout.heads_together)
GPT_NEOX = Family("gpt_neox", _read_config, _sources, ("gpt_neox.",), IGNORED, models="GPT-NeoX, Pythia")
