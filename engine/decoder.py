"""The only model: embedding and position, N blocks, final norm, head; every choice is a field of ModelConfig.

It turns a step's tokens into hidden states and hidden states into logits. It knows neither requests nor sampling nor
who owns which block; ModelRunner calls it. A value of ModelConfig that is not computed here is refused at load.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.attention import AttentionBackend, AttentionMetadata
from engine.kv_cache import KVCache
from engine.layers import Block, LayerNorm
from engine.linear import make_linear
from weights.config import ModelConfig
from weights.errors import UnsupportedModelError

_COMPUTED: dict[str, tuple[object, ...]] = {
    "norm": ("layernorm",),
    "norm_placement": ("pre",),
    "norm_bias": (True,),
    "position": ("learned",),
    "rotary_scaling": (None,),
    "qk_norm": (False,),
    "attention_sinks": (False,),
    "gated_ffn": (False,),
    "num_experts": (0,),
    "parallel_residual": (False,),
    "head_bias": (False,),
    "logit_scale": (1.0,),
    "logit_softcap": (None,),
}
"""The values of ModelConfig's fields that this decoder computes; a field that is not here may take any value."""


class Decoder:
    """A decoder-only transformer on one device.

    `tensors` yields (canonical name, tensor) in the order they are taken here, so that at most one tensor waits.
    Raises UnsupportedModelError for a choice it does not compute.
    """

    def __init__(self, config: ModelConfig, tensors: Iterator[tuple[str, Tensor]], backend: AttentionBackend) -> None:
        check_supported(config)
        source = StreamedTensors(tensors)
        self._embedding = source.take("embed.weight")
        self._positions = source.take("position.weight")
        self._blocks = [Block(config, layer, source, backend) for layer in range(config.num_layers)]
        self._final_norm = LayerNorm(source, "final_norm", config.norm_eps)
        self._head = make_linear(self._embedding if config.tied_head else source.take("head.weight"), None)

    def hidden_states(
        self, token_ids_T: Tensor, positions_T: Tensor, cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Return the last block's output [T, hidden] and store the step's keys and values in the cache.

        token_ids and positions are int64 on the model's device, in [0, vocab_size) and [0, max_position).
        """
        x = self._embedding[token_ids_T] + self._positions[positions_T]
        for block, cache_2NGBD in zip(self._blocks, cache.layers, strict=True):
            x = block(x, cache_2NGBD, metadata)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [rows, vocab_size] of some rows (at least linear.MIN_ROWS) of the hidden states."""
        return self._head(self._final_norm(hidden)).to(torch.float32)


class StreamedTensors:
    """Tensors by name from a stream in a known order; names that come early wait until they are taken."""

    def __init__(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._tensors = tensors
        self._waiting: dict[str, Tensor] = {}

    def take(self, name: str) -> Tensor:
        """Return the tensor of this name; the stream has checked that it is there."""
        while name not in self._waiting:
            other, tensor = next(self._tensors)
            self._waiting[other] = tensor
        return self._waiting.pop(name)


def check_supported(config: ModelConfig) -> None:
    """Raise UnsupportedModelError unless every choice of `config` is computed by this decoder."""
    for field, values in _COMPUTED.items():
        value = getattr(config, field)
        if value not in values:
            raise UnsupportedModelError(
                f"a {config.model_type} model with {field} = {value!r} is not supported; "
                f"supported: {', '.join(repr(v) for v in values)}"
            )
