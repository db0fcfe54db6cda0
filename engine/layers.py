"""The parts of a decoder: norms, attention with its projections, feed-forward, and the block that joins them.

Each is built from ModelConfig and a source of named tensors, and called with the rows of one step: T tokens of all
sequences, one after the other, [T, hidden]. Only decoder.py builds them. No part knows a model family.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from engine.attention import AttentionBackend, AttentionMetadata, AttentionSpec
from engine.linear import Linear, make_linear
from weights.config import Activation, ModelConfig


class TensorSource(Protocol):
    """Hands out each canonical tensor once."""

    def take(self, name: str) -> Tensor:
        """Return the tensor of this canonical name, in the model's dtype and on its device."""


class LayerNorm:
    """Layer normalisation over the last dimension (Ba et al. 2016, equation 4)."""

    def __init__(self, source: TensorSource, name: str, eps: float) -> None:
        self._weight, self._bias, self._eps = source.take(f"{name}.weight"), source.take(f"{name}.bias"), eps

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class Attention:
    """Causal self-attention with its projections: softmax(scale * q k) v over the cached past and the step itself."""

    def __init__(self, config: ModelConfig, layer: int, source: TensorSource, backend: AttentionBackend) -> None:
        name = f"blocks.{layer}"
        self._qkv = _take_linear(source, f"{name}.qkv", bias=config.attention_bias)
        self._out = _take_linear(source, f"{name}.attn_out", bias=config.attention_bias)
        self._backend = backend
        self._spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            scale=config.attention_scales[layer],
            window=config.attention_windows[layer],
        )

    def __call__(self, x: Tensor, residual: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return residual + attention(x) and store the step's keys and values in the cache."""
        spec = self._spec
        heads_THD = self._qkv(x).view(len(x), spec.num_heads + 2 * spec.num_kv_heads, spec.head_size)
        first_key, first_value = spec.num_heads, spec.num_heads + spec.num_kv_heads
        q_THD, k_TGD = heads_THD[:, :first_key], heads_THD[:, first_key:first_value]
        v_TGD = heads_THD[:, first_value:]
        self._backend.write(k_TGD, v_TGD, cache_2NGBD, metadata)
        return self._out(self._backend.attend(q_THD, cache_2NGBD, metadata, spec).flatten(1), residual)


class FeedForward:
    """act(x W_up) W_down."""

    def __init__(self, config: ModelConfig, layer: int, source: TensorSource) -> None:
        name = f"blocks.{layer}"
        self._up = _take_linear(source, f"{name}.ffn_up", bias=config.ffn_bias, activation=config.activation)
        self._down = _take_linear(source, f"{name}.ffn_down", bias=config.ffn_bias)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._down(self._up(x), residual)


class Block:
    """One pre-norm layer: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, source: TensorSource, backend: AttentionBackend) -> None:
        name = f"blocks.{layer}"
        self._attn_norm = LayerNorm(source, f"{name}.attn_norm", config.norm_eps)
        self._attention = Attention(config, layer, source, backend)
        self._ffn_norm = LayerNorm(source, f"{name}.ffn_norm", config.norm_eps)
        self._ffn = FeedForward(config, layer, source)

    def __call__(self, x: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata) -> Tensor:
        x = self._attention(self._attn_norm(x), x, cache_2NGBD, metadata)
        return self._ffn(self._ffn_norm(x), x)


def _take_linear(source: TensorSource, name: str, *, bias: bool, activation: Activation | None = None) -> Linear:
    weight = source.take(f"{name}.weight")
    return make_linear(weight, source.take(f"{name}.bias") if bias else None, activation)
