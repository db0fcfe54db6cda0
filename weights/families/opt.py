"""OPT: ReLU, learned positions in a table that begins with two unused rows; the 350M model has norms after each sum.

Zhang et al., "OPT: Open Pre-trained Transformer Language Models" (2022).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, MAX_WIDTH, Family, RawConfig, plain_config, with_ffn

BLOCKS: layout.Names = {
    "blocks.{}.attn_norm": "layers.{}.self_attn_layer_norm",
    "blocks.{}.qkv": ("layers.{}.self_attn.q_proj", "layers.{}.self_attn.k_proj", "layers.{}.self_attn.v_proj"),
    "blocks.{}.attn_out": "layers.{}.self_attn.out_proj",
    "blocks.{}.ffn_norm": "layers.{}.final_layer_norm",
    "blocks.{}.ffn_up": "layers.{}.fc1",
    "blocks.{}.ffn_down": "layers.{}.fc2",
}
NAMES: layout.Names = {
    "embed": "embed_tokens",
    "position": "embed_positions",
    "embed_in": "project_in",
    **BLOCKS,
    "final_norm": "final_layer_norm",
    "embed_out": "project_out",
    "head": "lm_head",
}


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("_remove_final_layer_norm", False, "convert it with a current transformers first")
    raw.forbid("learned_embeddings", True, "no published OPT has other positions")
    raw.forbid("scale_embeddings", False, "no published OPT has them")
    config = plain_config(raw, norm_eps=None)
    embed_size = raw.size("word_embed_proj_dim", default=config.hidden_size)
    has_bias = raw.boolean("enable_bias", default=True)
    has_affine = raw.boolean("layer_norm_elementwise_affine", default=True)
    return replace(
        with_ffn(config, raw.size("ffn_dim")),
        max_position=raw.size("max_position_embeddings", limit=MAX_WIDTH),
        position_offset=2,  # rows that nothing reads
        qkv_bias=has_bias,
        attn_out_bias=has_bias,
        ffn_bias=has_bias,
        activation=raw.choice("activation_function", ACTIVATIONS, default="relu"),
        norm_placement="input" if raw.boolean("do_layer_norm_before", default=True) else "sum",
        norm_weight=has_affine,
        norm_bias=has_affine,
        embed_size=embed_size if embed_size != config.hidden_size else None,
    )


OPT = Family("opt", _read_config, layout.decoder(NAMES), ("model.decoder.", "decoder."), models="OPT")
