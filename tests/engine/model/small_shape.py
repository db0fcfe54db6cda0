"""A small shape, and the bytes of one of its blocks of 16 tokens in fp32."""

from __future__ import annotations

from gptserve.weights.config import LayerConfig, ModelConfig

MODEL = ModelConfig(
    model_type="test",
    vocab_size=10,
    hidden_size=64,
    max_position=128,
    layers=(LayerConfig(4, 2, 16, attention_scale=0.25, ffn_size=256),) * 3,
)
BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4  # both of keys and values, layers, KV heads, head size, tokens, bytes
