"""The linear of low rank beside attention, as ModelConfig.side_rank says. layers.py builds it."""

from __future__ import annotations

import math

from torch import Tensor

from gptserve.engine.model.loading import StreamedTensors, take_linear, take_norm
from gptserve.engine.model.operations import BlockWriter
from gptserve.weights.config import ModelConfig


class Side:
    """Adds h + n'(L R h) to x and divides the sum by the root of 2."""

    def __init__(self, config: ModelConfig, source: StreamedTensors, block: str) -> None:
        self._in = take_linear(source, f"{block}.side_in", bias=False)
        self._out = take_linear(source, f"{block}.side_out", bias=False)
        self._norm = take_norm(config, source, f"{block}.side_norm")
        self._scale = source.scales[f"{block}.side"] = math.sqrt(0.5)

    def __call__(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the sum for x [T, hidden], which has attention, and the input h of that."""
        return (self._norm(self._out(self._in(h)), x) + h) * self._scale

    @staticmethod
    def keep(config: ModelConfig, name: str, writer: BlockWriter) -> None:
        """Write that the input of the part of this name is kept, if it has a side."""
        if _block(config, name) is not None:
            writer.copy("h", "h2")

    @staticmethod
    def write(config: ModelConfig, name: str, writer: BlockWriter) -> None:
        """Write what __call__ computes for x and the input that was kept, if the part has a side."""
        if (block := _block(config, name)) is None:
            return
        writer.linear(f"{block}.side_in", "h2", "side")
        writer.linear(f"{block}.side_out", "side", "h")
        writer.norm(f"{block}.side_norm", "h", "h")
        writer.add("x", "h")
        writer.add("x", "h2")
        writer.scale(f"{block}.side", "x")


def take_side(config: ModelConfig, source: StreamedTensors, name: str) -> Side | None:
    """Return what is beside the part of this name: attention alone has it, of a model with a side_rank."""
    block = _block(config, name)
    return None if block is None else Side(config, source, block)


def _block(config: ModelConfig, name: str) -> str | None:
    """Return the block of a part with a side."""
    block, _, part = name.rpartition(".")
    return block if part == "attn" and config.side_rank is not None else None
