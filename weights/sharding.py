"""Splits a decoder among ranks: which rows and columns of each canonical tensor a rank has, for all families.

Every rank has all layers, with its share of their heads and of their feed-forward's width. What it computes of
attention and of a feed-forward is one term of a sum over the ranks. The first rank adds the bias of each sum and alone
has what is outside the layers: embedding, positions, head. Checkpoint reads what `Share` leaves, and
engine/runner/memory.py counts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

from gptserve.weights.config import LayerConfig, ModelConfig
from gptserve.weights.errors import UnsupportedModelError
from gptserve.weights.families.family import Source

Span = tuple[int, int]
"""Start and end."""
_Rules = tuple[Mapping[str, tuple[int, ...]], Mapping[str, Span]]
_NO_RULES: _Rules = {}, {}
_WIDTHS = ("ffn_size", "dense_size")
"""Of the experts of a layer, and of a feed-forward beside them or alone."""


@dataclass(frozen=True, slots=True)
class Share:
    """What rank `rank` of `size` has of a model; without arguments, all of it."""

    rank: int = 0
    size: int = 1

    def of_config(self, config: ModelConfig) -> ModelConfig:
        """Return the rank's model: `config` with its heads and its width. Raises UnsupportedModelError."""
        _check(config, self.size)
        return config.change_layers(self._of_layer)

    def _of_layer(self, layer: LayerConfig) -> LayerConfig:
        if layer.recurrence is not None:
            return layer
        start, end = self._span(layer.num_heads)
        first_kv, last_kv = self._kv_span(layer)
        return replace(
            layer,
            num_heads=end - start,
            num_kv_heads=last_kv - first_kv,
            ffn_size=layer.ffn_size // self.size,
            dense_size=None if layer.dense_size is None else layer.dense_size // self.size,
            alibi_slopes=layer.alibi_slopes[start:end],
        )

    def of_sources(self, config: ModelConfig, sources: Mapping[str, Source]) -> dict[str, Source]:
        """Return the sources of the rank's tensors, given those of the whole model `config`."""
        if self.size == 1:
            return dict(sources)
        rules = {
            (layer, name): self._rules(config, layer, name) for layer in config.distinct_layers for name in _WIDTHS
        }
        found: dict[str, Source] = {}
        for name, source in sources.items():
            tensor, _, kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
            if self.rank > 0 and not tensor.startswith("blocks."):
                continue
            number = tensor.split(".")[1] if tensor.startswith("blocks.") else None
            width = "ffn_size" if ".experts." in f"{tensor}." else "dense_size"
            rows, columns = _NO_RULES if number is None else rules[config.layers[int(number)], width]
            if kind in rows:
                order = source.row_order
                source = replace(source, row_order=rows[kind] if order is None else tuple(order[i] for i in rows[kind]))
            elif kind in columns:
                is_bias = name.endswith(".bias")
                span = columns[kind] if source.columns is None else _moved(columns[kind], source.columns[0])
                source = replace(source, is_zero=self.rank > 0) if is_bias else replace(source, columns=span)
            found[name] = source
        return found

    def _rules(self, config: ModelConfig, layer: LayerConfig, width_name: str) -> _Rules:
        """Return the rows and the columns of a layer that the rank has, by kind of tensor; it has all of any other.

        They are those of the experts or, with the other of _WIDTHS, of all beside them. The rows are also those of the
        bias. A bias of a tensor split by columns is the first rank's.
        """
        size, ffn = layer.head_size, (layer.dense_size if width_name == "dense_size" else None) or layer.ffn_size
        heads, width, kv_heads = self._span(layer.num_heads), self._span(ffn), self._kv_span(layer)
        first_key, first_value = layer.num_heads, layer.num_heads + layer.num_kv_heads
        of_keys = (_moved(kv_heads, first_key, size), _moved(kv_heads, first_value, size))
        qkv = (_moved(heads, 0, size), *(of_keys if layer.kv_layer is None else ()))
        halves = [_moved(width, ffn * half) for half in range(1 + config.gated_ffn)]
        rows = {"qkv": _indices(*qkv), "sinks": _indices(heads), "ffn_up": _indices(*halves)}
        rows["attn_gate"] = _indices(_moved(heads, 0, 1 if config.gates_heads else size))
        if config.qk_norm == "own":
            rows |= {"q_norm": _indices(_moved(heads, 0, size)), "k_norm": _indices(_moved(kv_heads, 0, size))}
        return rows, {"attn_out": _moved(heads, 0, size), "ffn_down": width}

    def _span(self, number: int) -> Span:
        return self.rank * number // self.size, (self.rank + 1) * number // self.size

    def _kv_span(self, layer: LayerConfig) -> Span:
        """Return the key-value heads of the rank's heads; with more ranks than these, several ranks have the same."""
        first = self.rank * layer.num_kv_heads // self.size
        return first, first + max(1, layer.num_kv_heads // self.size)


WHOLE = Share()


def _check(config: ModelConfig, size: int) -> None:
    """Raise UnsupportedModelError if the model cannot be split evenly."""
    for layer in config.distinct_layers:
        heads, kv_heads = layer.num_heads, layer.num_kv_heads
        why = None
        if heads % size:
            why = f"its {heads} heads are no multiple of {size}"
        elif kv_heads % size and size % kv_heads:
            why = f"{size} is neither a divisor nor a multiple of its {kv_heads} key-value heads"
        elif layer.ffn_size % size:
            why = f"its feed-forward's width of {layer.ffn_size} is no multiple of {size}"
        elif (layer.dense_size or 0) % size:
            why = f"its feed-forward's width of {layer.dense_size} is no multiple of {size}"
        elif size > 1 and config.layer_input_size is not None:
            why = "its layers have inputs of their own"
        elif size > 1 and layer.recurrence is not None:
            why = "its layers that keep a state are not split"
        elif size > 1 and config.qk_norm == "projection":
            why = "its norm of queries and keys (qk_norm) is over all heads"
        if why is not None:
            what = f"a {config.model_type} of this shape"
            raise UnsupportedModelError(f"{what} cannot be split among {size} ranks: {why}")


def _moved(span: Span, offset: int, size: int = 1) -> Span:
    """Return the rows of a span of units of `size` rows that begins after `offset` units."""
    return (span[0] + offset) * size, (span[1] + offset) * size


def _indices(*spans: Span) -> tuple[int, ...]:
    return tuple(chain.from_iterable(range(*span) for span in spans))
