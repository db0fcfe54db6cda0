"""nanoGPT: GPT-2 with plain linears, with or without biases, and exact GELU.

Karpathy, "nanoGPT" (2022). `gptserve convert` makes such a folder from a training checkpoint: config.json holds
model_type "nanogpt" and n_layer, n_head, n_embd, block_size, bias and vocab_size; tensors keep their names.
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig, plain_config
from gptserve.weights.families.gpt2 import IGNORED, NAMES


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("tie_word_embeddings", True, "nanoGPT's head is its embedding")
    has_bias = raw.boolean("bias", default=True)
    return replace(
        plain_config(raw, width="n_embd", layers="n_layer", heads="n_head", context="block_size", norm_eps=None),
        qkv_bias=has_bias,
        attn_out_bias=has_bias,
        activation="gelu",
        ffn_bias=has_bias,
        norm_bias=has_bias,
    )


# torch.compile and torch's data parallelism add prefixes of their own.
PREFIXES = ("_orig_mod.transformer.", "module.transformer.", "transformer.", "_orig_mod.", "module.")
NANOGPT = Family(
    "nanogpt", _read_config, layout.decoder(NAMES), PREFIXES, IGNORED, models="nanoGPT, once converted (below)"
)
