"""GPT-2 as Hugging Face stores it: Conv1D weights are [in, out], the query, key and value projections are one tensor.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

import re
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, Source, plain_config


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("add_cross_attention", False, "there is no second text to attend to")
    config = plain_config(raw, width="n_embd", layers="n_layer", heads="n_head", context="n_positions")
    scale = config.head_size**-0.5 if raw.boolean("scale_attn_weights", default=True) else 1.0
    by_depth = raw.boolean("scale_attn_by_inverse_layer_idx", default=False)
    # reorder_and_upcast_attn changes rounding in half precision only; softmax and scores are fp32 here in any case.
    return replace(
        config,
        attention_scales=tuple(scale / (layer + 1) if by_depth else scale for layer in range(config.num_layers)),
        ffn_size=raw.size("n_inner", default=config.ffn_size),
        activation=raw.choice("activation_function", ACTIVATIONS, default="gelu_new"),
        norm_eps=raw.positive("layer_norm_epsilon", default=1e-5),
        tied_head=raw.boolean("tie_word_embeddings", default=True),
    )


def _sources(config: ModelConfig) -> dict[str, Source]:
    hidden, ffn = config.hidden_size, config.ffn_size
    sources = layout.table("embed", "wte", config.vocab_size, hidden)
    sources |= layout.table("position", "wpe", config.max_position, hidden)
    for layer in range(config.num_layers):
        block, stored = f"blocks.{layer}.", f"h.{layer}."
        sources |= layout.norm(config, f"{block}attn_norm", f"{stored}ln_1")
        sources |= layout.conv1d(f"{block}qkv", f"{stored}attn.c_attn", hidden, 3 * hidden)
        sources |= layout.conv1d(f"{block}attn_out", f"{stored}attn.c_proj", hidden, hidden)
        sources |= layout.norm(config, f"{block}ffn_norm", f"{stored}ln_2")
        sources |= layout.conv1d(f"{block}ffn_up", f"{stored}mlp.c_fc", hidden, ffn)
        sources |= layout.conv1d(f"{block}ffn_down", f"{stored}mlp.c_proj", ffn, hidden)
    return sources | layout.norm(config, "final_norm", "ln_f") | layout.head(config, "lm_head")


GPT2 = Family(
    model_type="gpt2",
    read_config=_read_config,
    sources=_sources,
    prefixes=("transformer.",),
    # Causal masks that old files carry, and the head's second copy of a tied embedding.
    ignored=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight"),
)
