"""MPT: ALiBi, no biases anywhere, norms included.

MosaicML, "Introducing MPT-7B" (2023).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.errors import UnsupportedModelError
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig, Source, plain_config


def _read_config(raw: RawConfig) -> ModelConfig:
    attention = raw.section("attn_config")
    if not attention.boolean("alibi", default=True):
        raise UnsupportedModelError("config.json: attn_config: alibi must be true: its learned positions are not read")
    attention.forbid("prefix_lm", False, "a prompt is read from left to right")
    attention.forbid("qk_ln", False, "queries and keys are not normalised in published models of the hub's format")
    attention.forbid("attn_type", "multihead_attention", "one projection with as many key as query heads is read")
    raw.forbid("no_bias", True, "the hub's format has no biases")
    raw.forbid("logit_scale", None, "no published MPT has it")
    raw.forbid("expansion_ratio", 4, "the hub's format has a feed-forward of four times the width")
    raw.choice("norm_type", dict.fromkeys(("layernorm", "low_precision_layernorm")), default="layernorm")
    raw.skip("learned_pos_emb")  # positions are ALiBi's
    config = plain_config(
        raw, width="d_model", layers="n_layers", heads="n_heads", context="max_seq_len", default_context=2048
    )
    return replace(
        config,
        attention_scales=(attention.positive("softmax_scale", default=config.head_size**-0.5),) * config.num_layers,
        qkv_bias=False,
        attn_out_bias=False,
        qkv_clip=attention.number("clip_qkv"),
        position=None,
        alibi_slopes=_slopes(config.num_heads, attention.size("alibi_bias_max", default=8)),
        activation="gelu",
        ffn_bias=False,
        norm_eps=raw.positive("layer_norm_epsilon", default=1e-5),
        norm_bias=False,
        tied_head=raw.boolean("tie_word_embeddings", default=True),
    )


def _slopes(num_heads: int, steepest: int) -> tuple[float, ...]:
    """Powers of two down to 2^-steepest; of a power of two of heads, every other one first, as many as there are."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2 ** (-steepest * (h + 1) / power) for h in range(power)]
    return tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


def _sources(config: ModelConfig) -> dict[str, Source]:
    hidden, ffn = config.hidden_size, config.ffn_size
    sources = layout.table("embed", "wte", config.vocab_size, hidden)
    for layer in range(config.num_layers):
        block = stored = f"blocks.{layer}."
        sources |= layout.norm(config, f"{block}attn_norm", f"{stored}norm_1")
        sources |= layout.linear(f"{block}qkv", [(f"{stored}attn.Wqkv", 3 * hidden)], hidden, bias=False)
        sources |= layout.linear(f"{block}attn_out", [(f"{stored}attn.out_proj", hidden)], hidden, bias=False)
        sources |= layout.norm(config, f"{block}ffn_norm", f"{stored}norm_2")
        sources |= layout.linear(f"{block}ffn_up", [(f"{stored}ffn.up_proj", ffn)], hidden, bias=False)
        sources |= layout.linear(f"{block}ffn_down", [(f"{stored}ffn.down_proj", hidden)], ffn, bias=False)
    return sources | layout.norm(config, "final_norm", "norm_f") | layout.head(config, "lm_head")


MPT = Family(
    model_type="mpt",
    read_config=_read_config,
    sources=_sources,
    prefixes=("transformer.",),
    ignored=re.compile(r"lm_head\.weight"),
)
