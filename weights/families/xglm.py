"""XGLM: the sinusoidal positions of "Attention Is All You Need", and an embedding scaled by the root of its width.

Lin et al., "Few-shot Learning with Multilingual Language Models" (2021).
"""

from __future__ import annotations

import math
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, plain_config, with_ffn
from gptserve.weights.families.opt import BLOCKS

NAMES: layout.Names = {"embed": "embed_tokens", **BLOCKS, "final_norm": "layer_norm", "head": "lm_head"}


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("add_cross_attention", False, "there is no second text to attend to")
    config = plain_config(raw, width="d_model", layers="num_layers", heads="attention_heads", norm_eps=None)
    return replace(
        with_ffn(config, raw.size("ffn_dim")),
        position="sinusoidal",
        position_offset=2,
        activation=raw.choice("activation_function", ACTIVATIONS, default="gelu"),
        embed_scale=math.sqrt(config.hidden_size) if raw.boolean("scale_embedding", default=True) else 1.0,
    )


# Its positions are computed; some files carry the table.
IGNORED = r"embed_positions\.weights"
XGLM = Family("xglm", _read_config, layout.decoder(NAMES), ignored=IGNORED, models="XGLM")
