"""What takes the place of attention in a layer that keeps a state, by the kind of its recurrence. layers.py asks."""

from __future__ import annotations

from gptserve.engine.model.convolution import GatedConvolution
from gptserve.engine.model.delta import DeltaAttention
from gptserve.engine.model.loading import StreamedTensors
from gptserve.weights.config import GatedDelta, ModelConfig


def take_recurrent(config: ModelConfig, layer: int, source: StreamedTensors) -> DeltaAttention | GatedConvolution:
    """Build it with the weights of the layer of this number, which has a recurrence."""
    is_delta = isinstance(config.layers[layer].recurrence, GatedDelta)
    return DeltaAttention(config, layer, source) if is_delta else GatedConvolution(config, layer, source)
