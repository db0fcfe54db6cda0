"""What takes the place of attention in a layer that keeps a state, by the kind of its recurrence. layers.py asks."""

from __future__ import annotations

from gptserve.engine.model.convolution import GatedConvolution
from gptserve.engine.model.linear_attention import LinearHeads
from gptserve.engine.model.loading import StreamedTensors
from gptserve.weights.config import LinearAttention, ModelConfig


def take_recurrent(config: ModelConfig, layer: int, source: StreamedTensors) -> LinearHeads | GatedConvolution:
    """Build it with the weights of the layer of this number, which has a recurrence."""
    has_heads = isinstance(config.layers[layer].recurrence, LinearAttention)
    return LinearHeads(config, layer, source) if has_heads else GatedConvolution(config, layer, source)
