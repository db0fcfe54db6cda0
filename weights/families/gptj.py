"""GPT-J: rotary positions of neighbouring pairs, attention and feed-forward side by side after one norm.

Wang and Komatsuzaki, "GPT-J-6B" (2021).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, plain_config, with_ffn
from gptserve.weights.families.rotary import with_rotary

NAMES: layout.Names = {
    "embed": "wte",
    "blocks.{}.attn_norm": "h.{}.ln_1",
    "blocks.{}.qkv": ("h.{}.attn.q_proj", "h.{}.attn.k_proj", "h.{}.attn.v_proj"),
    "blocks.{}.attn_out": "h.{}.attn.out_proj",
    "blocks.{}.ffn_up": "h.{}.mlp.fc_in",
    "blocks.{}.ffn_down": "h.{}.mlp.fc_out",
    "final_norm": "ln_f",
    "head": "lm_head",
}


def read_gptj_config(raw: RawConfig) -> ModelConfig:
    """Return the fields of GPT-J, which CodeGen shares."""
    raw.forbid("rotary", True, "no published model has learned positions")
    raw.forbid("scale_attn_weights", True, "unscaled scores are not supported")
    config = plain_config(raw, width="n_embd", layers="n_layer", heads="n_head", context="n_positions", tied_head=False)
    layer = config.layers[0]
    config = with_rotary(raw, config, size=raw.size("rotary_dim", default=64, limit=layer.head_size))
    return replace(
        with_ffn(config, raw.size("n_inner", default=layer.ffn_size)),
        qkv_bias=False,
        attn_out_bias=False,
        activation=raw.choice("activation_function", ACTIVATIONS, default="gelu_new"),
        parallel_residual=True,
        shared_norm=True,
        head_bias=True,
    )


IGNORED = r"h\.\d+\.attn\.(bias|masked_bias|embed_positions)"
_sources = layout.decoder(NAMES, qkv_order=layout.halves_apart)
GPTJ = Family("gptj", read_gptj_config, _sources, ("transformer.",), IGNORED, models="GPT-J")
