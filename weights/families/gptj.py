"""GPT-J: rotary positions of neighbouring pairs, attention and feed-forward side by side after one norm.

Wang and Komatsuzaki, "GPT-J-6B" (2021).
"""

from __future__ import annotations

import re
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, Source, plain_config
from gptserve.weights.families.rotary import read_rotary, usable_context


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("rotary", True, "no published GPT-J has learned positions")
    raw.forbid("scale_attn_weights", True, "scores are scaled")
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


def _sources(config: ModelConfig) -> dict[str, Source]:
    hidden, ffn = config.hidden_size, config.ffn_size
    rotary = config.rotaries[0]
    assert rotary is not None
    order = layout.halves_apart(config, 2 * len(rotary.inv_freqs))
    sources = layout.table("embed", "wte", config.vocab_size, hidden)
    for layer in range(config.num_layers):
        block, stored = f"blocks.{layer}.", f"h.{layer}."
        parts = layout.split_qkv(config, f"{stored}attn.")
        sources |= layout.norm(config, f"{block}attn_norm", f"{stored}ln_1")
        sources |= layout.linear(f"{block}qkv", parts, hidden, bias=False, row_order=order)
        sources |= layout.linear(f"{block}attn_out", [(f"{stored}attn.out_proj", hidden)], hidden, bias=False)
        sources |= layout.linear(f"{block}ffn_up", [(f"{stored}mlp.fc_in", ffn)], hidden, bias=True)
        sources |= layout.linear(f"{block}ffn_down", [(f"{stored}mlp.fc_out", hidden)], ffn, bias=True)
    return sources | layout.norm(config, "final_norm", "ln_f") | layout.head(config, "lm_head")


GPTJ = Family(
    model_type="gptj",
    read_config=_read_config,
    sources=_sources,
    prefixes=("transformer.",),
    ignored=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|h\.\d+\.attn\.embed_positions|lm_head\.weight"),
)
