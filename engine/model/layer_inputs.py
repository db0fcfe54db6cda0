"""What each layer is given of a row's token beside the stream, as ModelConfig.layer_input_size says.

decoder.py makes these inputs once a step, layers.py adds what a layer makes of its own.

Shape letters: T rows, L layers, I width of an input.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from gptserve.engine.model.linear import Affine, LinearMaker, Rows, Weight
from gptserve.engine.model.loading import StreamedTensors, table_of, take_linear, take_norm
from gptserve.engine.model.operations import BlockWriter
from gptserve.engine.model.trial import AwaitedLinear
from gptserve.weights.config import ModelConfig


class LayerInputs:
    """The inputs of all layers: of a row's token by a table, and of its embedding by a projection."""

    def __init__(self, config: ModelConfig, source: StreamedTensors) -> None:
        assert config.layer_input_size is not None
        self._shape = config.num_layers, config.layer_input_size
        self._num_tokens = config.num_layer_inputs
        self._table = _rows_of(source.take_weight("input_embed.weight"), source.maker)
        self._scale = math.sqrt(config.layer_input_size / 2)
        source.tables["input_embed"] = self._table, self._scale, self._num_tokens or config.vocab_size
        self._project = take_linear(source, "input_proj", bias=False)
        norm = take_norm(config, source, "input_norm", math.sqrt(0.5))
        # P x / sqrt(hidden) is what is normalised: P x with an eps so much larger gives the same.
        self._norm = source.norms["input_norm"] = replace(norm, eps=norm.eps * config.hidden_size)

    def __call__(self, token_ids_T: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs [T, I] of each layer, for embedded tokens x [T, hidden], in their dtype."""
        projected_TLI = self._norm(self._project(x).view(len(x), *self._shape))
        if self._num_tokens is not None:
            token_ids_T = torch.where(token_ids_T < self._num_tokens, token_ids_T, 0)
        return (self._table[token_ids_T].view(projected_TLI.shape) * self._scale + projected_TLI).unbind(1)

    @staticmethod
    def write(writer: BlockWriter) -> None:
        """Write what __call__ computes for x to the buffer of inputs."""
        writer.embed("input_embed", "inputs")
        writer.copy("x", "h")
        writer.linear("input_proj", "h", "projected")
        writer.norm("input_norm", "projected", "projected")
        writer.add("inputs", "projected")


def _rows_of(weight: Weight, maker: LinearMaker) -> Rows:
    """Return the rows of a table: those of a linear, never multiplied with, if it is to be held in codes."""
    if isinstance(weight, Tensor):
        return weight
    linear = maker.make("input_embed", Affine(weight))
    rows = maker.rows_of(linear.made() if isinstance(linear, AwaitedLinear) else linear)
    return table_of(weight) if rows is None else rows


class LayerInput:
    """What a layer adds to x: norm(W (act(G x) * input))."""

    def __init__(self, config: ModelConfig, source: StreamedTensors, name: str) -> None:
        self._gate = take_linear(source, f"{name}.input_gate", bias=False, activation=config.activation)
        self._out = take_linear(source, f"{name}.input_out", bias=False)
        self._norm = take_norm(config, source, f"{name}.input_output_norm")

    def __call__(self, x: Tensor, input_TI: Tensor | None) -> Tensor:
        """Return x [T, hidden] with what is added to it."""
        return self.term(x, input_TI, x)

    def term(self, x: Tensor, input_TI: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """Return what is added to x, added to the residual if given."""
        assert input_TI is not None, "a decoder has inputs for all layers or for none"
        return self._norm(self._out(self._gate(x) * input_TI), residual)

    @staticmethod
    def write(config: ModelConfig, number: int, writer: BlockWriter) -> None:
        """Write what __call__ computes for the layer of this number."""
        LayerInput.write_term(config, number, writer)
        writer.add("x", "h")

    @staticmethod
    def write_term(config: ModelConfig, number: int, writer: BlockWriter) -> None:
        """Write what is added to x, to h."""
        assert config.layer_input_size is not None
        name = f"blocks.{number}"
        writer.copy("x", "h")
        writer.linear(f"{name}.input_gate", "h", "input")
        writer.multiply("input", "inputs", number * config.layer_input_size)
        writer.linear(f"{name}.input_out", "input", "h")
        writer.norm(f"{name}.input_output_norm", "h", "h")
