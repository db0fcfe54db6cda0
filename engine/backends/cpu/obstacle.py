"""What keeps a model from a program of engine/backends/cpu, so that torch runs the operations of its steps.

decoder.py asks before it writes one.
"""

from __future__ import annotations

from itertools import chain

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.cpu.linear import NativeLinear
from gptserve.engine.backends.cpu.program import MAX_KEY_SIZE, MAX_STREAMS
from gptserve.engine.model.attention import AttentionBackend
from gptserve.engine.model.loading import StreamedTensors
from gptserve.weights.config import LinearAttention, ModelConfig


def find_obstacle(config: ModelConfig, parts: StreamedTensors, backend: AttentionBackend) -> str | None:
    """Return why no program can compute this model; None if one can."""
    if not all(isinstance(linear, NativeLinear) for linear in parts.linears.values()):
        return "its products are not those of engine/backends/cpu"
    mixtures = [number for number, layer in enumerate(config.layers) if layer.experts is not None]
    if any(f"blocks.{number}.experts.0.ffn_up" not in parts.linears for number in mixtures):
        return "its experts are multiplied by kernels of a GPU"
    if not isinstance(backend, CpuAttention):
        return f"attention is {backend.name!r}"
    if config.parallel_residual and config.norm_placement != "input":
        return f"its residual is parallel, its norms are at {config.norm_placement!r}"
    recurrences = [layer.recurrence for layer in config.distinct_layers if layer.recurrence is not None]
    if any(isinstance(its, LinearAttention) and its.key_size > MAX_KEY_SIZE for its in recurrences):
        return f"its linear attention has keys of more than {MAX_KEY_SIZE}"
    if (config.streams or 0) > MAX_STREAMS:
        return f"it has more than {MAX_STREAMS} streams"
    of_layers = [(layer.q_size, layer.ffn_size, layer.dense_size or 0) for layer in config.distinct_layers]
    of_layers += [(its.out_width, 0, 0) for its in recurrences]
    others = config.embed_size or 0, config.layer_input_size or 0, config.side_rank or 0
    widths = (config.hidden_size, *others, *chain.from_iterable(of_layers))
    if any(width % native.ROW_MULTIPLE for width in widths):
        return f"a linear's input is not a multiple of {native.ROW_MULTIPLE} wide"
    return None
