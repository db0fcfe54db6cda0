"""nanoGPT: GPT-2 with plain linears, with or without biases, exact GELU; the arguments of its GPT as config.json.

Karpathy, "nanoGPT" (2022). `gptserve convert` makes such a folder of a training checkpoint: config.json holds
model_type "nanogpt" and n_layer, n_head, n_embd, block_size, bias and vocab_size; tensors keep their names.
"""

from __future__ import annotations

import re
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig, Source, plain_config


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("tie_word_embeddings", True, "nanoGPT's head is its embedding")
    has_bias = raw.boolean("bias", default=True)
    return replace(
        plain_config(raw, width="n_embd", layers="n_layer", heads="n_head", context="block_size"),
        qkv_bias=has_bias,
        attn_out_bias=has_bias,
        activation="gelu",
        ffn_bias=has_bias,
        norm_bias=has_bias,
    )


def _sources(config: ModelConfig) -> dict[str, Source]:
    hidden, ffn, bias = config.hidden_size, config.ffn_size, config.qkv_bias
    sources = layout.table("embed", "wte", config.vocab_size, hidden)
    sources |= layout.table("position", "wpe", config.max_position, hidden)
    for layer in range(config.num_layers):
        block, stored = f"blocks.{layer}.", f"h.{layer}."
        sources |= layout.norm(config, f"{block}attn_norm", f"{stored}ln_1")
        sources |= layout.linear(f"{block}qkv", [(f"{stored}attn.c_attn", 3 * hidden)], hidden, bias=bias)
        sources |= layout.linear(f"{block}attn_out", [(f"{stored}attn.c_proj", hidden)], hidden, bias=bias)
        sources |= layout.norm(config, f"{block}ffn_norm", f"{stored}ln_2")
        sources |= layout.linear(f"{block}ffn_up", [(f"{stored}mlp.c_fc", ffn)], hidden, bias=bias)
        sources |= layout.linear(f"{block}ffn_down", [(f"{stored}mlp.c_proj", hidden)], ffn, bias=bias)
    return sources | layout.norm(config, "final_norm", "ln_f")


NANOGPT = Family(
    model_type="nanogpt",
    read_config=_read_config,
    sources=_sources,
    # torch.compile and torch's data parallelism put theirs before the model's own.
    prefixes=("_orig_mod.transformer.", "module.transformer.", "transformer.", "_orig_mod.", "module."),
    ignored=re.compile(r"h\.\d+\.attn\.bias|lm_head\.weight"),
)
