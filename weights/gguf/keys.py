"""The keys of a GGUF file's architecture, read by kind. Torch-free. architecture.py and those beside it call it."""

from __future__ import annotations

from typing import Any

from gptserve.weights.errors import InvalidConfigError, shown
from gptserve.weights.gguf.reader import Header
from gptserve.weights.raw_config import MAX_LAYERS

Fields = dict[str, Any]
"""Of config.json."""


class Keys:
    """The keys of an architecture. Readers raise InvalidConfigError naming the key."""

    def __init__(self, header: Header, architecture: str, *, layers_differ: bool = False) -> None:
        """With `layers_differ` a size that lists those of all layers is that of the first one that has any."""
        self.header, self._architecture, self._layers_differ = header, architecture, layers_differ

    def get(self, name: str) -> object:
        """Return the value of {architecture}.{name}; None if there is none."""
        return self.header.keys.get(f"{self._architecture}.{name}")

    def number(self, name: str, default: float | None = None) -> int | float:
        """Return a number, not one for each layer."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fault(name, "a number")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Return an integer of at least 1; a list for all layers may have the same for each."""
        value = self.get(name)
        if isinstance(value, list) and value and (self._layers_differ or value.count(value[0]) == len(value)):
            value = next((entry for entry in value if entry != 0), 0)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise self.fault(name, "an integer of at least 1")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Return an integer of at least 0."""
        value = self.get(name)
        return 0 if value == 0 and type(value) is int else self.size(name, default)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a truth value."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(name, "true or false")
        return value

    def only(self, name: str, value: object, why: str) -> None:
        """Refuse any value of a key but this one; it may be missing."""
        if self.get(name) not in (None, value):
            raise self.fault(name, f"{shown(value)}, as {why}")

    @property
    def num_layers(self) -> int:
        """The layers without those behind the last one, which predict further tokens. Bounded: lists have so many."""
        num, num_behind = self.size("block_count"), self.count("nextn_predict_layers", 0)
        if num > MAX_LAYERS:
            raise self.fault("block_count", f"an integer in [1, {MAX_LAYERS}]")
        if num_behind >= num:
            raise self.fault("nextn_predict_layers", f"an integer in [0, {num})")
        return num - num_behind

    @property
    def num_heads(self) -> int:
        """Heads of queries, of the first layer where layers differ."""
        return self.heads_of_layers[0]

    @property
    def heads_of_layers(self) -> list[int]:
        """Heads of queries of each layer."""
        return self.sizes("attention.head_count")

    def sizes(self, name: str) -> list[int]:
        """Return an integer of at least 1 for each layer, all the same unless it is a list."""
        value, num = self.get(name), self.size("block_count")
        if not isinstance(value, list):
            return [self.size(name)] * self.num_layers
        if len(value) != num or not all(type(entry) is int and entry >= 1 for entry in value):
            raise self.fault(name, f"an integer of at least 1, or a list of {num}")
        return value[: self.num_layers]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.size("attention.head_count_kv", self.num_heads)

    @property
    def kv_heads_of_layers(self) -> list[int]:
        """Heads of keys and values of each layer, which a list has: num_kv_heads, or 0 in some."""
        name, num = "attention.head_count_kv", self.size("block_count")
        heads = self.get(name)
        are_counts = isinstance(heads, list) and len(heads) == num and all(type(its) is int for its in heads)
        if not isinstance(heads, list) or not are_counts or not set(heads) <= {0, self.num_kv_heads}:
            raise self.fault(name, f"a list of {num}, each of them 0 or the same integer")
        return heads[: self.num_layers]

    @property
    def has_attention_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.has("blk.0.attn_q.bias") or self.has("blk.0.attn_qkv.bias")

    def layer_types(self, period: int, *, begins_full: bool = False) -> list[str]:
        """Return which layers have windows; all but one of each `period`, for a file that does not say.

        That one is the last, or the first with `begins_full`.
        """
        value, num = self.get("attention.sliding_window_pattern"), self.size("block_count")
        if isinstance(value, list):
            # Layers behind the last one are in the list or, in files of K-EXAONE, not.
            if len(value) not in (num, self.num_layers) or not all(type(entry) in (bool, int) for entry in value):
                raise self.fault("attention.sliding_window_pattern", f"an integer or a list of {num}")
            slides = [bool(entry) for entry in value]
        else:
            period = self.size("attention.sliding_window_pattern", period)
            slides = [(i if begins_full else i + 1) % period > 0 for i in range(self.num_layers)]
        return ["sliding_attention" if its else "full_attention" for its in slides[: self.num_layers]]

    def fault(self, name: str, rule: str) -> InvalidConfigError:
        """Return the error for a key that must be `rule`."""
        value = self.get(name)
        found = "but is missing" if value is None else f"got {shown(value)}"
        return InvalidConfigError(f"{self.header.path}: {self._architecture}.{name} must be {rule}, {found}")

    def has(self, tensor: str) -> bool:
        """Return whether the file has this tensor."""
        return tensor in self.header.tensors
