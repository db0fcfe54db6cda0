"""What a family is: config.json to ModelConfig, and the file's tensors to canonical ones.

Canonical names, linear weights being [out, in] (H heads, G KV heads, D head size):
embed.weight [vocab, hidden]; position.weight [max_position, hidden]; for block i `blocks.{i}.` and attn_norm, ffn_norm;
qkv [(H + 2G) * D, hidden], all query heads, then all key heads, then all value heads; attn_out [hidden, H * D];
ffn_up [ffn, hidden]; ffn_down [hidden, ffn]; then final_norm, and head.weight [vocab, hidden] when it is not tied.
Torch-free: the server reads configurations too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

from weights.config import Activation, ModelConfig
from weights.errors import InvalidConfigError, shown

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 4096  # far above any model; a file that lies cannot fill memory before its checkpoint contradicts it

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

Shape = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """How one canonical tensor is made: each part transposed if asked, joined along rows, rows put in order.

    parts are (name in the file, shape in the file). row_order, where given, names for each canonical row the joined
    row it is: a fused projection whose heads are interleaved is a permutation of the canonical one.
    """

    parts: tuple[tuple[str, Shape], ...]
    transpose: bool = False
    row_order: tuple[int, ...] | None = None

    @property
    def shape(self) -> Shape:
        """The canonical tensor's shape."""
        shapes = [shape[::-1] if self.transpose else shape for _, shape in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True, slots=True)
class Family:
    """One lineage of models on disk. A tensor in no source must match `ignored` entirely.

    prefixes may stand before any name in the file, as the libraries that write them disagree about it.
    """

    model_type: str
    read_config: Callable[[RawConfig], ModelConfig]
    sources: Callable[[ModelConfig], dict[str, Source]]
    prefixes: tuple[str, ...]
    ignored: re.Pattern[str]


class RawConfig:
    """The fields of a JSON configuration; null means absent. Readers raise InvalidConfigError naming the field."""

    def __init__(self, values: Mapping[str, object], file_name: str = "config.json") -> None:
        self._values = values
        self._file_name = file_name

    def size(self, name: str, *, default: int | None = None, limit: int = MAX_SIZE) -> int:
        """Return an integer in [1, limit]."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not _is_int(value) or not 1 <= value <= limit:
            raise self.error(name, f"an integer in [1, {limit}]")
        return value

    def positive(self, name: str, *, default: float) -> float:
        """Return a finite number above 0."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.error(name, "a finite number above 0")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str) -> str:
        """Return a string that is not empty."""
        value = self._values.get(name)
        if not isinstance(value, str) or not value:
            raise self.error(name, "a string")
        return value

    def choice(self, name: str, choices: Mapping[str, T], *, default: str) -> T:
        """Return what `choices` says for the string."""
        value = self._values.get(name)
        if value is None:
            value = default
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, f"one of {', '.join(choices)}")
        return choices[value]

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids in [0, vocab_size): none, one, or a list of them."""
        value = self._values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if not _is_int(token_id) or not 0 <= token_id < vocab_size:
                raise self.error(name, f"token ids in [0, {vocab_size})")
        return tuple(ids)

    def error(self, name: str, rule: str) -> InvalidConfigError:
        """Return the error for a field that must be `rule`."""
        found = f"got {shown(self._values[name])}" if name in self._values else "but is missing"
        return InvalidConfigError(f"{self._file_name}: {name} must be {rule}, {found}")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
