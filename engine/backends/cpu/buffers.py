"""The buffers of a decoder's programs: their names, the elements of a row, and which are in fp32.

A buffer of a layer is named after its kind and its width, so layers of one width share it. decoder.py asks.
"""

from __future__ import annotations

import torch

from gptserve.engine.backends.cpu.linear import NativeLinear
from gptserve.engine.backends.cpu.program import route_bytes
from gptserve.engine.model.loading import StreamedTensors
from gptserve.weights.config import Experts, LayerConfig, LinearAttention, ModelConfig

_WIDE = ("x", "taken", "logits", "wide_scores", "stream", "stream_logits")
"""The buffers that are always in fp32: those of residual streams, the logits, and those of choices by scores."""


def buffer_widths(config: ModelConfig, dtype: torch.dtype) -> dict[str, int]:
    """Return the buffers of both programs: by name, the elements of a row."""
    buffers = dict.fromkeys(("x", "h", "h2", "taken"), config.hidden_size)
    buffers["embedded"] = config.embed_size or config.hidden_size
    if config.layer_input_size:
        buffers |= dict.fromkeys(("inputs", "projected"), config.num_layers * config.layer_input_size)
        buffers["input"] = config.layer_input_size
    if config.streams:
        buffers |= {f"stream {i}": config.hidden_size for i in range(config.streams)}
        buffers["stream_logits"] = config.streams
    if config.side_rank:
        buffers["side"] = config.side_rank
    for layer in config.distinct_layers:
        buffers |= {buffer_name(kind, width): width for kind, width in layer_widths(config, layer, dtype).items()}
    return buffers


def layer_widths(config: ModelConfig, layer: LayerConfig, dtype: torch.dtype) -> dict[str, int]:
    """Return the elements of a row of the buffers of a layer, by their kind."""
    experts = layer.experts
    num_ffns = 1 if experts is None else experts.num_per_row
    widths = dict[str, int]()
    if layer.num_heads:
        widths |= {"heads": layer.q_size, "qkv": layer.qkv_size}
        if config.attention_gate is not None:
            widths["gates"] = layer.num_heads if config.gates_heads else layer.q_size
    if layer.ffn_size:
        widths["up"] = num_ffns * layer.ffn_size * (2 if config.gated_ffn else 1)
        widths["gated"] = num_ffns * layer.ffn_size
    if layer.dense_size is not None:
        widths |= {"dense_up": layer.dense_size * (2 if config.gated_ffn else 1), "dense_gated": layer.dense_size}
    recurrence = layer.recurrence
    if isinstance(recurrence, LinearAttention):
        widths |= {
            "unmixed": recurrence.conv_width,
            "mixed": recurrence.conv_width,
            "rates": recurrence.rate_width,
            "memory_gates": recurrence.value_width,
        }
    elif recurrence is not None:
        widths["unmixed"] = recurrence.in_width
    if recurrence is not None:
        widths["memory_heads"] = recurrence.out_width
    if experts is not None:
        routes = route_bytes(experts) // dtype.itemsize
        widths |= {scores_kind(experts): experts.num_logits, "routes": routes, "pairs": num_ffns * config.hidden_size}
    return widths


def scores_kind(experts: Experts) -> str:
    """Return the kind of the buffer of the router's logits."""
    return "scores" if experts.router.is_plain else "wide_scores"


def buffer_name(kind: str, width: int) -> str:
    """Return the name of a layer's buffer of this width: layers of one width share it."""
    return f"{kind} {width}"


def wide_kinds(parts: StreamedTensors) -> tuple[str, ...]:
    """Return the kinds of buffers that are in fp32."""
    weights = [linear.weight for linear in parts.linears.values() if isinstance(linear, NativeLinear)]
    if any(weight.element_bits >= 16 for weight in weights):  # they read their own type; so does each mixture's router
        return _WIDE
    return *_WIDE, "embedded", "h", "h2", "up", "gated"
