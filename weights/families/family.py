"""A family turns config.json into a ModelConfig, and the tensors of a file into canonical ones.

Torch-free, because the server reads configurations too. layout.py makes the Sources. These are the canonical tensors,
each present only where ModelConfig has it (H query heads, G key-value heads, D head size, ffn width: those of the
layer; linears are [out, in]):

    embed.weight         [vocab, embed]
    position.weight      [max_position, hidden]
    embed_in, embed_out  [hidden, embed] and [embed, hidden]
    embed_norm, final_norm
    input_embed          [vocab or fewer, layers * input]
    input_proj           [layers * input, hidden]
    input_norm           [input]
    head                 [vocab, embed]
    blocks.{i}.
        attn_norm, attn_output_norm, ffn_norm, ffn_output_norm
        qkv              [(H + 2G) * D, hidden]: all query heads, then all key heads, then all value heads
        sinks            [H]
        q_norm, k_norm   [D] and [D], or [H * D] and [G * D]
        attn_gate        [H * D, hidden], or [H, hidden]
        attn_out         [hidden, H * D]
        memory_in        [2 * K + V, hidden]: all queries, then all keys, then all values, of widths K, K and V
        memory_gate      [V, hidden]
        memory_rates     [2 * heads, hidden]: of each value head how much it learns, then how much it forgets; of
                         Mamba-2 [heads, hidden]: the step
        memory_conv      [(2 * K + V) * conv_size], fp32: the factors of a channel, that of the newest token last; of
                         Mamba-2 a bias, too, if it has one
        memory_decay, memory_step [heads] and [heads], fp32: A and dt of Mamba, A as its logarithm
        memory_skip      [heads], fp32: D of Mamba-2
        memory_norm      [value_size]; of Mamba-2 [V]
        memory_out       [hidden, V]
        conv_in          [3 * C, hidden]: b, c and x of a convolution of C channels
        conv_factors     [C * conv_size], fp32: of a channel, that of the newest token last
        conv_out         [hidden, C]
        ffn_up           [ffn, hidden]; gated: [2 * ffn, hidden], all gates first
        xielu            [4], fp32: alpha_p and alpha_n before their softplus, beta, eps
        ffn_down         [hidden, ffn]
        router           [experts, hidden], with one more row for a gate of the shared experts
        router.correction [experts], fp32
        scale            [1], fp32: the layer's, of its output
        router.factors   [experts], fp32
        experts.{e}.     ffn_up and ffn_down of each instead of those above, the shared ones last
        dense_output_norm, experts_norm, experts_output_norm, router_norm: where both are
        side_in, side_out, side_norm: [rank, hidden], [hidden, rank] and [hidden]
        stream_norm      [hidden]
        stream_router    [streams, hidden]
        stream_predict   [streams * streams, streams], fp32: P_0, then P_1, ... of ModelConfig.streams
        stream_correct   [streams, streams], fp32
        stream_scale     [hidden], fp32
        streams.{s}.     stream_in of the first block and stream_out of the last, [hidden, hidden], but of the first
        input_gate       [input, hidden]
        input_out        [hidden, input]
        input_output_norm
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gptserve.weights.config import Activation, LayerConfig, ModelConfig
from gptserve.weights.raw_config import MAX_LAYERS as MAX_LAYERS
from gptserve.weights.raw_config import MAX_WIDTH as MAX_WIDTH
from gptserve.weights.raw_config import RawConfig as RawConfig  # families take these from here, beside Family
from gptserve.weights.stored_tensor import Shape as Shape

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


@dataclass(frozen=True, slots=True)
class Source:
    """The steps to one canonical tensor: transpose or flatten each part if asked, join the parts, choose the rows.

    parts are (name in the file, shape in the file). entry, if given, selects that entry of each part's first dimension:
    one expert of all that are stored as one tensor. row_order, if given, lists the joined row for each canonical row:
    a fused projection may be stored with its heads interleaved, and a rank may have some of the rows. columns, if
    given, are the start and end of those that it has. is_zero: it has zeros, since another rank has the values.
    is_wide: it stays in fp32, whatever the dtype of computation. is_flat: of each part all numbers are rows. factors
    has those of the canonical rows, each with the number of rows that it multiplies; none where it is empty.
    """

    parts: tuple[tuple[str, Shape], ...]
    transpose: bool = False
    entry: int | None = None
    row_order: tuple[int, ...] | None = None
    columns: tuple[int, int] | None = None
    is_zero: bool = False
    is_wide: bool = False
    is_flat: bool = False
    factors: tuple[tuple[int, float], ...] = ()

    @property
    def joined_shape(self) -> Shape:
        """The shape of the joined parts."""
        shapes = [shape if self.entry is None else shape[1:] for _, shape in self.parts]
        shapes = [shape[::-1] if self.transpose else shape for shape in shapes]
        shapes = [(math.prod(shape),) if self.is_flat else shape for shape in shapes]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def is_of_rows(self) -> bool:
        """Whether it has whole rows of its parts, with their numbers as they are."""
        return not (self.is_zero or self.is_wide or self.is_flat or self.columns or self.factors)

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
    models: str = field(kw_only=True)
    """The published models, as docs/models.md lists them."""


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
