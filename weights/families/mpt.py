"""MPT: ALiBi, no biases anywhere, norms included.

MosaicML, "Introducing MPT-7B" (2023).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.bloom import alibi_slopes
from gptserve.weights.families.family import Family, RawConfig, plain_config

NAMES = {
    "embed": "wte",
    "blocks.{}.attn_norm": "blocks.{}.norm_1",
    "blocks.{}.qkv": "blocks.{}.attn.Wqkv",
    "blocks.{}.attn_out": "blocks.{}.attn.out_proj",
    "blocks.{}.ffn_norm": "blocks.{}.norm_2",
    "blocks.{}.ffn_up": "blocks.{}.ffn.up_proj",
    "blocks.{}.ffn_down": "blocks.{}.ffn.down_proj",
    "final_norm": "norm_f",
    "head": "lm_head",
}


def _read_config(raw: RawConfig) -> ModelConfig:
    attention = raw.section("attn_config")
    attention.forbid("alibi", True, "learned positions are not supported")
    attention.forbid("prefix_lm", False, "a prompt is read from left to right")
    attention.forbid("qk_ln", False, "no published MPT normalises queries and keys")
    attention.forbid("attn_type", "multihead_attention", "only as many key heads as query heads are supported")
    raw.forbid("no_bias", True, "the hub's format has no biases")
    raw.forbid("logit_scale", None, "no published MPT has it")
    raw.forbid("expansion_ratio", 4, "the hub's format has a feed-forward of four times the width")
    raw.choice("norm_type", dict.fromkeys(("layernorm", "low_precision_layernorm")), default="layernorm")
    raw.skip("learned_pos_emb")  # positions are ALiBi's
    config = plain_config(
        raw, width="d_model", layers="n_layers", heads="n_heads", context="max_seq_len", default_context=2048
    )
    layer = config.layers[0]
    layer = replace(
        layer,
        attention_scale=attention.positive("softmax_scale", default=layer.attention_scale),
        alibi_slopes=alibi_slopes(layer.num_heads, attention.size("alibi_bias_max", default=8)),
    )
    return replace(
        config,
        layers=(layer,) * config.num_layers,
        qkv_bias=False,
        attn_out_bias=False,
        qkv_clip=attention.number("clip_qkv"),
        position=None,
        activation="gelu",
        ffn_bias=False,
        norm_bias=False,
    )


MPT = Family("mpt", _read_config, layout.decoder(NAMES), ("transformer.",), models="MPT")
