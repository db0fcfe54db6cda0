"""The attention of each layer, from a model's configuration. layers.py and the checks at start ask."""

from __future__ import annotations

import torch
from torch import Tensor

from gptserve.engine.model.attention import AttentionSpec
from gptserve.weights.config import LayerConfig, ModelConfig


def attention_spec(
    config: ModelConfig, layer: LayerConfig, device: torch.device, sinks: Tensor | None
) -> AttentionSpec:
    """Return the attention of this layer."""
    return AttentionSpec(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        scale=layer.attention_scale,
        window=layer.window,
        alibi_slopes=torch.tensor(layer.alibi_slopes, device=device) if layer.alibi_slopes else None,
        sinks=sinks,
        softcap=config.attention_softcap,
        reads_other=layer.kv_layer is not None,
    )


def layer_specs(config: ModelConfig, device: torch.device) -> list[AttentionSpec]:
    """Return the attention of all layers that have it, with sinks of 0 where the model has any."""
    has_sinks = config.attention_sinks
    layers = [layer for layer in config.layers if layer.num_heads]
    sinks = [torch.zeros(layer.num_heads, device=device) if has_sinks else None for layer in layers]
    return [attention_spec(config, layer, device, its) for layer, its in zip(layers, sinks, strict=True)]
