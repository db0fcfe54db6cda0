"""A small shape, and the bytes of one of its blocks of 16 tokens in fp32."""

from __future__ import annotations

from gptserve.weights.config import ModelConfig

MODEL = ModelConfig(
    model_type="test",
    vocab_size=10,
    hidden_size=64,
    num_layers=3,
    max_position=128,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    attention_scales=(0.25,) * 3,
    attention_windows=(None,) * 3,
    ffn_size=256,
)
BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4  # both of keys and values, layers, KV heads, head size, tokens, bytes
