"""GPT-1: norms after each sum and none at the end, Conv1D weights as in GPT-2.

Radford et al., "Improving Language Understanding by Generative Pre-Training" (2018).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, plain_config

NAMES = {
    "embed": "tokens_embed",
    "position": "positions_embed",
    "blocks.{}.qkv": "h.{}.attn.c_attn",
    "blocks.{}.attn_out": "h.{}.attn.c_proj",
    "blocks.{}.attn_norm": "h.{}.ln_1",
    "blocks.{}.ffn_up": "h.{}.mlp.c_fc",
    "blocks.{}.ffn_down": "h.{}.mlp.c_proj",
    "blocks.{}.ffn_norm": "h.{}.ln_2",
    "head": "lm_head",
}


def _read_config(raw: RawConfig) -> ModelConfig:
    return replace(
        plain_config(raw, width="n_embd", layers="n_layer", heads="n_head", context="n_positions"),
        # Its files say "gelu" for the approximation with tanh.
        activation=raw.choice("afn", {**ACTIVATIONS, "gelu": "gelu_tanh"}, default="gelu"),
        norm_placement="sum",
        tied_head=raw.boolean("tie_word_embeddings", default=True),
        norm_eps=raw.positive("layer_norm_epsilon", default=1e-5),
    )


OPENAI_GPT = Family(
    model_type="openai-gpt",
    read_config=_read_config,
    sources=partial(layout.decoder, names=NAMES, transpose=True),
    prefixes=("transformer.",),
    # The causal mask, the numbers of the positions, and the head's second copy of the embedding.
    ignored=re.compile(r"h\.\d+\.attn\.bias|position_ids|lm_head\.weight"),
)
