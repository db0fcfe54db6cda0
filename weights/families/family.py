"""A family turns config.json into a ModelConfig, and the tensors of a file into canonical ones.

Torch-free, because the server reads configurations too. layout.py makes the Sources. These are the canonical tensors,
each present only where ModelConfig has it (H query heads, G key-value heads, D head size, ffn width: those of the
layer; linears are [out, in]):

    embed.weight         [vocab, embed]
    position.weight      [max_position, hidden]
    embed_in, embed_out  [hidden, embed] and [embed, hidden]
    embed_norm, final_norm
    head                 [vocab, embed]
    blocks.{i}.
        attn_norm, attn_output_norm, ffn_norm, ffn_output_norm, q_norm, k_norm
        qkv              [(H + 2G) * D, hidden]: all query heads, then all key heads, then all value heads
        sinks            [H]
        attn_out         [hidden, H * D]
        ffn_up           [ffn, hidden]; gated: [2 * ffn, hidden], all gates first
        ffn_down         [hidden, ffn]
        router           [experts, hidden]; ffn_up and ffn_down are then those of each experts.{e}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard, TypeVar

from gptserve.weights.config import Activation, LayerConfig, ModelConfig
from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError, shown

MAX_SIZE = 2**31 - 1
# Far above any model. They keep a wrong file from filling memory before its checkpoint is compared.
MAX_LAYERS = 4096
MAX_WIDTH = 2**20

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}

Shape = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """The steps to one canonical tensor: transpose each part if asked, join the parts along rows, choose the rows.

    parts are (name in the file, shape in the file). entry, if given, selects that entry of each part's first dimension:
    one expert of all that are stored as one tensor. row_order, if given, lists the joined row for each canonical row:
    a fused projection may be stored with its heads interleaved, and a rank may have some of the rows. columns, if
    given, are the start and end of those that it has. is_zero: it has zeros, since another rank has the values.
    """

    parts: tuple[tuple[str, Shape], ...]
    transpose: bool = False
    entry: int | None = None
    row_order: tuple[int, ...] | None = None
    columns: tuple[int, int] | None = None
    is_zero: bool = False

    @property
    def joined_shape(self) -> Shape:
        """The shape of the joined parts."""
        shapes = [shape if self.entry is None else shape[1:] for _, shape in self.parts]
        shapes = [shape[::-1] if self.transpose else shape for shape in shapes]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def shape(self) -> Shape:
        """The canonical tensor's shape."""
        rows, *columns = self.joined_shape
        columns = columns if self.columns is None else [self.columns[1] - self.columns[0]]
        return (rows if self.row_order is None else len(self.row_order), *columns)


@dataclass(frozen=True, slots=True)
class Family:
    """One lineage of models on disk. A tensor that no source uses must fully match the pattern `ignored`.

    Any name in the file may begin with one of `prefixes`: libraries differ in which they write.
    """

    model_type: str
    read_config: Callable[[RawConfig], ModelConfig]
    sources: Callable[[ModelConfig], dict[str, Source]]
    prefixes: tuple[str, ...] = ("model.",)
    ignored: str = ""
    quantizations: frozenset[str] = frozenset()
    """The quant_methods whose weights can be read."""


def plain_config(
    raw: RawConfig,
    *,
    width: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    head_size: str | None = None,
    context: str = "max_position_embeddings",
    default_context: int | None = None,
    norm_eps: str | None = "layer_norm_epsilon",
    tied_head: bool = True,
) -> ModelConfig:
    """Return GPT-2's choices with the sizes under these names; a family replaces the fields in which it differs.

    The head's size is the width divided by the heads, unless the family has a name for it and the file a value.
    `default_context` and `tied_head` are for a file that does not say. Every query head has its own key head, scores
    are scaled by 1 / sqrt(head size), no layer has a window, and the feed-forward is four times as wide as the model.
    """
    hidden_size, num_heads = raw.size(width, limit=MAX_WIDTH), raw.size(heads)
    num_layers = raw.size(layers, limit=MAX_LAYERS)
    size = raw.size(head_size, limit=MAX_WIDTH) if head_size and head_size in raw else raw.share(width, heads)
    layer = LayerConfig(num_heads, num_heads, size, attention_scale=size**-0.5, ffn_size=4 * hidden_size)
    return ModelConfig(
        model_type=raw.text("model_type"),
        vocab_size=raw.size("vocab_size"),
        hidden_size=hidden_size,
        max_position=raw.size(context, default=default_context),
        layers=(layer,) * num_layers,
        norm_eps=raw.positive(norm_eps, default=1e-5) if norm_eps else 1e-5,
        tied_head=raw.boolean("tie_word_embeddings", default=tied_head),
    )


def with_ffn(config: ModelConfig, size: int) -> ModelConfig:
    """Return the configuration with feed-forwards of this width on all layers."""
    return config.change_layers(lambda layer: replace(layer, ffn_size=size))


def with_kv_heads(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    """Return the configuration with num_key_value_heads on all layers, by default as many as query heads."""
    return config.change_layers(lambda layer: replace(layer, num_kv_heads=raw.kv_heads(layer.num_heads)))


def with_windows(raw: RawConfig, config: ModelConfig, slides: Callable[[int], bool]) -> ModelConfig:
    """Return the configuration with a window on the layers that `layer_types` says, or else `slides`."""
    kinds = raw.strings("layer_types", ("full_attention", "sliding_attention"), length=config.num_layers)
    has_window = [slides(i) if kinds is None else kinds[i] == "sliding_attention" for i in range(config.num_layers)]
    window = raw.size("sliding_window") if any(has_window) else None
    raw.skip("sliding_window")  # of no layer
    layers = zip(config.layers, has_window, strict=True)
    return replace(config, layers=tuple(replace(layer, window=window if its else None) for layer, its in layers))


class RawConfig:
    """The fields of a JSON configuration; null means absent. Readers raise InvalidConfigError naming the field.

    It remembers the fields that were read: any other may change the results.
    """

    def __init__(self, values: Mapping[str, object], file_name: str = "config.json") -> None:
        self._values = dict(values)
        self._file_name = file_name
        self._read: set[str] = set()
        self._sections: dict[str, RawConfig] = {}

    def unread(self) -> dict[str, object]:
        """Return the fields that were not read, by name; those inside a section as "section: name"."""
        fields = {name: value for name, value in self._values.items() if name not in self._read}
        for section_name, section in self._sections.items():
            fields |= {f"{section_name}: {name}": value for name, value in section.unread().items()}
        return fields

    def default(self, *, replaces_null: bool = False, **values: object) -> None:
        """Take these values for fields that the file does not name, as transformers' class does.

        A field that is null there stays null, unless `replaces_null`.
        """
        for name, value in values.items():
            if name not in self._values or (replaces_null and self._values[name] is None):
                self._values[name] = value

    def skip(self, *names: str) -> None:
        """Count fields as read that have no effect, given the values of others."""
        self._read.update(names)

    def size(self, name: str, *, default: int | None = None, limit: int = MAX_SIZE) -> int:
        """Return an integer in [1, limit]."""
        value = self.value(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= limit:
            raise self.error(name, f"an integer in [1, {limit}]")
        return value

    def positive(self, name: str, *, default: float) -> float:
        """Return a finite number above 0."""
        value = self.value(name, default)
        if not _is_positive(value):
            raise self.error(name, "a finite number above 0")
        return float(value)

    def share(self, name: str, divisor: str) -> int:
        """Return the width `name` divided by the size `divisor`, which must divide it."""
        size, num = self.size(name, limit=MAX_WIDTH), self.size(divisor)
        if size % num:
            raise self.error(name, f"a multiple of {divisor} ({num})")
        return size // num

    def kv_heads(self, num_heads: int) -> int:
        """Return num_key_value_heads, a divisor of num_heads and by default the same."""
        num_kv_heads = self.size("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise self.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
        return num_kv_heads

    def number(self, name: str) -> float | None:
        """Return a finite number above 0, or None where it is absent."""
        return None if self.value(name) is None else self.positive(name, default=1.0)

    def value(self, name: str, default: object = None) -> object:
        """Return the value, or `default` where it is absent."""
        self._read.add(name)
        found = self._values.get(name)
        return default if found is None else found

    def section(self, name: str) -> RawConfig:
        """Return the fields of an object inside this one; none where it is absent."""
        value = self.value(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return self._sections.setdefault(name, RawConfig(value, f"{self._file_name}: {name}"))

    def strings(self, name: str, choices: Iterable[str], *, length: int) -> tuple[str, ...] | None:
        """Return a list of `length` strings out of `choices`, or None where it is absent."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(entry in choices for entry in value):
            raise self.error(name, f"a list of {length}, each one of {', '.join(choices)}")
        return tuple(value)

    def numbers(self, name: str, *, length: int) -> tuple[float, ...]:
        """Return a list of `length` finite numbers above 0."""
        value = self.value(name)
        if not isinstance(value, list) or len(value) != length or not all(map(_is_positive, value)):
            raise self.error(name, f"a list of {length} finite numbers above 0")
        return tuple(map(float, value))

    def forbid(self, name: str, default: object, why: str) -> None:
        """Raise UnsupportedModelError unless the field is absent or has the value given."""
        value = self.value(name)
        if value is not None and value != default:
            raise UnsupportedModelError(
                f"{self._file_name}: {name} must be {json.dumps(default)}, got {shown(value)}: {why}"
            )

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def boolean(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self.value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str) -> str:
        """Return a string that is not empty."""
        value = self.value(name)
        if not isinstance(value, str) or not value:
            raise self.error(name, "a string")
        return value

    def choice(self, name: str, choices: Mapping[str, T], *, default: str) -> T:
        """Return the entry of `choices` for the string."""
        value = self.value(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, f"one of {', '.join(choices)}")
        return choices[value]

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids in [0, vocab_size): none, one, or a list of them."""
        value = self.value(name, [])
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise self.error(name, f"token ids in [0, {vocab_size})")
        return tuple(ids)

    def error(self, name: str, rule: str) -> InvalidConfigError:
        """Return the error for a field that must be `rule`."""
        found = f"got {shown(self._values[name])}" if name in self._values else "but is missing"
        return InvalidConfigError(f"{self._file_name}: {name} must be {rule}, {found}")


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
