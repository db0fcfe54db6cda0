"""GPT-1: norms after each sum and none at the end, Conv1D weights as in GPT-2.

Radford et al., "Improving Language Understanding by Generative Pre-Training" (2018).
"""

from __future__ import annotations

import re
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, Source, plain_config


def _read_config(raw: RawConfig) -> ModelConfig:
    return replace(
        plain_config(raw, width="n_embd", layers="n_layer", heads="n_head", context="n_positions"),
        # What its files call "gelu" is the approximation with tanh.
        activation=raw.choice("afn", {**ACTIVATIONS, "gelu": "gelu_tanh"}, default="gelu"),
        norm_placement="sum",
        tied_head=raw.boolean("tie_word_embeddings", default=True),
        norm_eps=raw.positive("layer_norm_epsilon", default=1e-5),
    )


def _sources(config: ModelConfig) -> dict[str, Source]:
    hidden, ffn = config.hidden_size, config.ffn_size
    sources = layout.table("embed", "tokens_embed", config.vocab_size, hidden)
    sources |= layout.table("position", "positions_embed", config.max_position, hidden)
    for layer in range(config.num_layers):
        block, stored = f"blocks.{layer}.", f"h.{layer}."
        sources |= layout.conv1d(f"{block}qkv", f"{stored}attn.c_attn", hidden, 3 * hidden)
        sources |= layout.conv1d(f"{block}attn_out", f"{stored}attn.c_proj", hidden, hidden)
        sources |= layout.norm(config, f"{block}attn_norm", f"{stored}ln_1")
        sources |= layout.conv1d(f"{block}ffn_up", f"{stored}mlp.c_fc", hidden, ffn)
        sources |= layout.conv1d(f"{block}ffn_down", f"{stored}mlp.c_proj", ffn, hidden)
        sources |= layout.norm(config, f"{block}ffn_norm", f"{stored}ln_2")
    return sources | layout.head(config, "lm_head")


OPENAI_GPT = Family(
    model_type="openai-gpt",
    read_config=_read_config,
    sources=_sources,
    prefixes=("transformer.",),
    # The causal mask, the numbers of the positions, and the head's second copy of the embedding.
    ignored=re.compile(r"h\.\d+\.attn\.bias|position_ids|lm_head\.weight"),
)
