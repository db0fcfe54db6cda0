"""How large a model and its KV cache are, from its shape alone.

Torch-free arithmetic: it knows no device and allocates nothing. KVCache sizes itself with `kv_bytes_per_token`;
`gptserve inspect` shows the rest before any weight is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import find_family

_PARTS = {
    "embedding": ("embed", "embed_in"),
    "position": ("position",),
    "attention": ("qkv", "attn_out", "sinks"),
    "feed-forward": ("ffn_up", "ffn_down", "router"),
    "norms": (
        "embed_norm",
        "attn_norm",
        "attn_output_norm",
        "ffn_norm",
        "ffn_output_norm",
        "q_norm",
        "k_norm",
        "final_norm",
    ),
    "head": ("head", "embed_out"),
}
"""The canonical tensors of each part (weights/families/family.py names them)."""


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """What a KV cache of a given size holds; sequences are counted at full context."""

    num_blocks: int
    num_tokens: int
    num_full_sequences: int


def parameter_counts(model: ModelConfig) -> dict[str, int]:
    """Return the number of parameters by part, in the order they are used; a tied head counts nothing."""
    part_of = {tensor: part for part, tensors in _PARTS.items() for tensor in tensors}
    counts = dict.fromkeys(_PARTS, 0)
    for name, source in find_family(model.model_type).sources(model).items():
        tensor = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        counts[part_of[tensor]] += math.prod(source.shape)
    return counts


def linear_shapes(model: ModelConfig) -> set[tuple[int, int]]:
    """Return the shapes (in, out) of the model's matrix products."""
    attention = model.num_heads * model.head_size
    return {
        (model.hidden_size, attention + 2 * model.num_kv_heads * model.head_size),
        (attention, model.hidden_size),
        (model.hidden_size, model.ffn_size * (2 if model.gated_ffn else 1)),
        (model.ffn_size, model.hidden_size),
        (model.embed_size or model.hidden_size, model.vocab_size),
    }


def kv_bytes_per_token(model: ModelConfig, dtype_bytes: int) -> int:
    """Return the bytes the keys and values of one token take, over all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_size * dtype_bytes


def cache_capacity(
    model: ModelConfig, cache_bytes: int, dtype_bytes: int, block_size: int, max_model_len: int
) -> CacheCapacity:
    """Return what fits into `cache_bytes`; a sequence occupies whole blocks."""
    num_blocks = max(0, cache_bytes) // (block_size * kv_bytes_per_token(model, dtype_bytes))
    blocks_per_sequence = -(-max_model_len // block_size)
    return CacheCapacity(num_blocks, num_blocks * block_size, num_blocks // blocks_per_sequence)
