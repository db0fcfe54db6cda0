"""How large a model and its KV cache are, from its shape alone.

Torch-free arithmetic: it knows no device and allocates nothing. KVCache sizes itself with `kv_bytes_per_token`;
`gptserve inspect` shows the rest before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from weights.config import ModelConfig


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """What a KV cache of a given size holds; sequences are counted at full context."""

    num_blocks: int
    num_tokens: int
    num_full_sequences: int


def parameter_counts(model: ModelConfig) -> dict[str, int]:
    """Return the number of parameters by part, in the order they are used; a tied head counts nothing."""
    hidden, attended = model.hidden_size, model.num_heads * model.head_size
    attention = hidden * (model.qkv_size + attended)
    if model.attention_bias:
        attention += model.qkv_size + hidden
    if model.attention_sinks:
        attention += model.num_heads
    norm = hidden * (2 if model.norm_bias else 1)
    norms_per_layer = 2 * norm + (2 * model.head_size if model.qk_norm else 0)
    final_norm = norm if model.norm_placement == "pre" else 0
    return {
        "embedding": model.vocab_size * hidden,
        "position": model.max_position * hidden if model.position == "learned" else 0,
        "attention": model.num_layers * attention,
        "feed-forward": model.num_layers * _feed_forward_parameters(model),
        "norms": model.num_layers * norms_per_layer + final_norm,
        "head": (0 if model.tied_head else model.vocab_size * hidden) + (model.vocab_size if model.head_bias else 0),
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


def _feed_forward_parameters(model: ModelConfig) -> int:
    """Count one layer's feed-forward: up, gate where there is one, down; times experts, plus their router."""
    num_up = 2 if model.gated_ffn else 1
    size = (num_up + 1) * model.hidden_size * model.ffn_size
    if model.ffn_bias:
        size += num_up * model.ffn_size + model.hidden_size
    if model.num_experts == 0:
        return size
    router = model.num_experts * (model.hidden_size + (1 if model.ffn_bias else 0))
    return model.num_experts * size + router
