"""The tensors of a model while it loads, and the linears and norms that are made of them.

decoder.py, layers.py and the ranks of parallel/worker.py take from it, in the order in which the stream gives.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gptserve.engine.model.activation import Xielu
from gptserve.engine.model.attention import AttentionSpec
from gptserve.engine.model.classifier import Classifier
from gptserve.engine.model.group import Group
from gptserve.engine.model.linear import Affine, DenseLinears, Linear, LinearMaker, Rows, Weight
from gptserve.engine.model.norm import Norm
from gptserve.engine.model.operations import TORCH, Operations
from gptserve.engine.model.states import HeadNumbers
from gptserve.engine.model.stream_mixer import StreamMixer
from gptserve.engine.model.trial import AwaitedLinear, Trial
from gptserve.weights.config import Activation, ModelConfig
from gptserve.weights.huge_pages import mapped
from gptserve.weights.loading_threads import PIECE_ELEMENTS, map_pieces
from gptserve.weights.quantized.blocked import BlockedWeight
from gptserve.weights.quantized.coded import CodedWeight
from gptserve.weights.unread import UnreadWeight

Stream = Iterator[tuple[str, Weight]]
"""Weights by their canonical names, in the order in which they are taken."""


class StreamedTensors:
    """Gives tensors by name from a stream; keeps those that come before they are taken, and lists what is made.

    `maker` makes linears of the weights that are taken. `group` has the ranks, if any: then attention and feed-forwards
    are terms of sums. `operations` computes what is no product, and `trial` what is built.
    """

    def __init__(
        self,
        tensors: Stream,
        maker: LinearMaker | None = None,
        group: Group | None = None,
        operations: Operations = TORCH,
        trial: Trial | None = None,
    ) -> None:
        self._tensors, self.group, self.operations, self.trial = tensors, group, operations, trial or Trial()
        self.maker = maker or DenseLinears()
        self._waiting: dict[str, Weight] = {}
        self.linears: dict[str, Linear] = {}
        self.norms: dict[str, Norm] = {}
        self.corrections: dict[str, Tensor] = {}
        """What routers add to scores for the choice, fp32, by the router's name."""
        self.factors: dict[str, Tensor] = {}
        """By what routers multiply weights, fp32, by the router's name."""
        self.tables: dict[str, tuple[Rows, float, int]] = {}
        """Whose rows are read beside the embedding's, the factors of these rows, and how many there are."""
        self.scales: dict[str, float] = {}
        """Of the outputs of layers, by their names."""
        self.xielus: dict[str, Xielu] = {}
        """By the name of the feed-forward's block."""
        self.attentions: dict[int, AttentionSpec] = {}
        """By the number of the layer."""
        self.heads: dict[str, HeadNumbers] = {}
        self.convolutions: dict[str, Tensor] = {}
        """By the name of the block."""
        self.mixers: dict[str, StreamMixer] = {}
        """By the name of the block."""

    def take(self, name: str) -> Tensor:
        """Return the tensor of this name. The stream has it: Checkpoint has checked that."""
        tensor = self.take_weight(name)
        assert isinstance(tensor, Tensor)
        return tensor

    def take_weight(self, name: str) -> Weight:
        """Return the same of a linear's weight, which may come as codes."""
        while name not in self._waiting:
            other, tensor = next(self._tensors)
            self._waiting[other] = tensor
        return self._waiting.pop(name)

    def end(self) -> None:
        """Let the stream go, which holds the last tensor that it gave, and the trial: all linears have been made."""
        self._tensors, self.trial = iter(()), Trial()
        self.linears = {
            name: its.made() if isinstance(its, AwaitedLinear) else its for name, its in self.linears.items()
        }


def rows_of(embedding: Weight) -> Rows:
    """Return the rows of an embedding, which may stay in its files while the model loads."""
    return embedding if isinstance(embedding, UnreadWeight) else table_of(embedding)


def table_of(weight: Weight) -> Tensor:
    """Return the table [tokens, width] of an embedding, which may have come as codes, in the dtype of computation."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, UnreadWeight):
        return weight.whole()
    assert isinstance(weight, CodedWeight | BlockedWeight)
    codes, (num, width) = weight, weight.shape
    table = mapped(num * width * codes.dtype.itemsize).view(codes.dtype).view(num, width)
    size = max(1, PIECE_ELEMENTS // width)

    def fill(rows: slice) -> None:
        table[rows] = codes.values(rows)

    for _ in map_pieces(fill, [slice(start, start + size) for start in range(0, num, size)]):
        pass
    return table


def take_norm(
    config: ModelConfig, source: StreamedTensors, name: str, scale: float = 1.0, own_size: int | None = None
) -> Norm:
    """Return the norm of this name, multiplied by `scale`: its weights are, exactly for powers of 2.

    With `own_size` it is one of vectors of this size, which have weights of their own.
    """
    weight = source.take(f"{name}.weight") if config.norm_weight else None
    bias = source.take(f"{name}.bias") if config.norm_bias and own_size is None else None
    if weight is not None and own_size is not None:
        weight = weight.view(-1, own_size)
    if weight is not None and config.norm == "rmsnorm":
        weight = weight.float() + config.norm_weight_offset
    elif weight is not None and config.norm_weight_offset:
        weight = weight + config.norm_weight_offset
    if scale != 1:
        assert weight is not None
        weight, bias = weight * scale, None if bias is None else bias * scale
    norm = source.norms[name] = Norm(config.norm, weight, bias, config.norm_eps, source.operations.normalize)
    return norm


def bare_norm(config: ModelConfig, source: StreamedTensors, name: str) -> Norm:
    """Return a norm without weights, which is known by this name from now on."""
    norm = source.norms[name] = Norm(config.norm, None, None, config.norm_eps, source.operations.normalize)
    return norm


def take_scale(source: StreamedTensors, name: str) -> float:
    """Return the number by which the output of the layer of this name is multiplied."""
    scale = source.scales[name] = source.take(f"{name}.scale").item()
    return scale


def take_linear(
    source: StreamedTensors,
    name: str,
    *,
    bias: bool,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
    weight: Weight | None = None,
) -> Linear:
    """Return the linear of this name. `weight`, if given, is its weight, which the source then does not have."""
    weight = source.take_weight(f"{name}.weight") if weight is None else weight
    its_bias = source.take(f"{name}.bias") if bias else None
    linear = source.linears[name] = source.maker.make(name, Affine(weight, its_bias, activation, out_dtype))
    return linear


def take_classifier(config: ModelConfig, source: StreamedTensors) -> Classifier | None:
    """Return the classifier, if the model has one. Rows of its head keep what the head does to its logits."""
    if config.classifier is None:
        return None
    is_of_head = bool(config.classifier.token_ids)
    return Classifier(
        source.take("classifier.weight"),
        source.take("classifier.bias") if config.classifier.has_bias else None,
        scale=config.logit_scale if is_of_head else 1.0,
        softcap=config.logit_softcap if is_of_head else None,
    )


def take_head(
    config: ModelConfig, source: StreamedTensors, embedding: Weight, rows: Rows | None = None
) -> tuple[Linear, Rows]:
    """Return the head, and what rows of the embedding are read from: a tied head that holds them, `rows` or a table.

    Rows of an UnreadWeight are not read from files for longer than the model loads.
    """
    weight = embedding if config.tied_head else None
    head = take_linear(source, "head", bias=config.head_bias, out_dtype=torch.float32, weight=weight)
    own = source.maker.rows_of(head) if config.tied_head else None
    rows = rows if own is None else own
    return head, table_of(embedding) if rows is None or isinstance(rows, UnreadWeight) else rows
