"""GPT-J: rotary positions of neighbouring pairs, attention and feed-forward side by side after one norm.

Wang and Komatsuzaki, "GPT-J-6B" (2021).
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
    "embed": "wte",
    "blocks.{}.attn_norm": "h.{}.ln_1",
    "blocks.{}.qkv": ("h.{}.attn.q_proj", "h.{}.attn.k_proj", "h.{}.attn.v_proj"),
    "blocks.{}.attn_out": "h.{}.attn.out_proj",
    "blocks.{}.ffn_up": "h.{}.mlp.fc_in",
    "blocks.{}.ffn_down": "h.{}.mlp.fc_out",
    "final_norm": "ln_f",
    "head": "lm_head",
}


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("rotary", True, "no published GPT-J has learned positions")
    raw.forbid("scale_attn_weights", True, "unscaled scores are not supported")
    config = plain_config(raw, width="n_embd", layers="n_layer", heads="n_head", context="n_positions")
    rotated = raw.size("rotary_dim", default=64, limit=config.head_size)
    return replace(
        config,
        max_position=usable_context(raw, config.max_position),
        ffn_size=raw.size("n_inner", default=config.ffn_size),
        qkv_bias=False,
        attn_out_bias=False,
        position=None,
        rotaries=(read_rotary(raw, rotated, config.max_position),) * config.num_layers,
        activation=raw.choice("activation_function", ACTIVATIONS, default="gelu_new"),
        norm_eps=raw.positive("layer_norm_epsilon", default=1e-5),
        parallel_residual=True,
        shared_norm=True,
        tied_head=raw.boolean("tie_word_embeddings", default=False),
        head_bias=True,
    )


GPTJ = Family(
    model_type="gptj",
    read_config=_read_config,
    sources=partial(layout.decoder, names=NAMES, qkv_order=layout.halves_apart),
    prefixes=("transformer.",),
    ignored=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|h\.\d+\.attn\.embed_positions|lm_head\.weight"),
)
