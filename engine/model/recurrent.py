"""What a layer that keeps a state has in place of attention or beside it, by its kind. layers.py asks."""

from __future__ import annotations

from gptserve.engine.model.convolution import GatedConvolution
from gptserve.engine.model.linear_attention import LinearHeads
from gptserve.engine.model.loading import StreamedTensors
from gptserve.weights.config import LinearAttention, ModelConfig


def take_recurrent(config: ModelConfig, layer: int, source: StreamedTensors) -> LinearHeads | GatedConvolution | None:
    """Build it with the weights of the layer of this number; return None if that keeps no state."""
    recurrence = config.layers[layer].recurrence
    if recurrence is None:
        return None
    has_heads = isinstance(recurrence, LinearAttention)
    return LinearHeads(config, layer, source) if has_heads else GatedConvolution(config, layer, source)
