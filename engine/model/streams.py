"""Blocks of a model with several streams in place of x, as ModelConfig.streams says.

Between two of them rows are [T, N, H]: the first block begins the streams, and the last one ends them, so the rest of a
decoder knows of one stream alone. decoder.py builds them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptserve.engine.model.attention import AttentionBackend, AttentionMetadata
from gptserve.engine.model.layer_inputs import LayerInput
from gptserve.engine.model.layers import Block
from gptserve.engine.model.loading import StreamedTensors, take_linear, take_norm
from gptserve.engine.model.operations import StreamWriter, WritePart
from gptserve.engine.model.rotary import Rotation
from gptserve.engine.model.states import State
from gptserve.engine.model.stream_mixer import StreamMixer, with_length_of
from gptserve.weights.config import ModelConfig


class StreamedBlock:
    """A Block that computes the first of the streams, and what it changes in the others."""

    def __init__(
        self, config: ModelConfig, layer: int, source: StreamedTensors, backend: AttentionBackend, device: torch.device
    ) -> None:
        assert config.streams is not None
        name, others = f"blocks.{layer}", range(1, config.streams)
        self._is_first, self._is_last = layer == 0, layer == config.num_layers - 1
        of_first, of_last = (others if its else () for its in (self._is_first, self._is_last))
        self._begin = [take_linear(source, f"{name}.streams.{i}.stream_in", bias=False) for i in of_first]
        self._norm = take_norm(config, source, f"{name}.stream_norm", 1 / config.hidden_size)
        self._router = take_linear(source, f"{name}.stream_router", bias=False, out_dtype=torch.float32)
        numbers = (source.take(f"{name}.stream_{kind}") for kind in ("predict", "correct", "scale"))
        self._mixer = source.mixers[name] = StreamMixer.of(*numbers)
        source.scales["streams"] = 1 / config.streams
        self._block = Block(config, layer, source, backend, device)
        self._input = LayerInput(config, source, name)
        self._end = [take_linear(source, f"{name}.streams.{i}.stream_out", bias=False) for i in of_last]

    def __call__(
        self,
        x: Tensor,
        term: Tensor | None,
        rotation: Rotation | None,
        cache_2NGBD: Tensor,
        state: State | None,
        metadata: AttentionMetadata,
        input_TI: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what Block returns, of all streams."""
        assert term is None
        if self._is_first:
            x = torch.stack([x, *(with_length_of(x, linear(x)) for linear in self._begin)], dim=1)
        predicted = self._mixer.predict(x, self._logits(x[:, 0]))
        y, _ = self._block(predicted[:, 0].contiguous(), None, rotation, cache_2NGBD, state, metadata)
        x = self._mixer.correct(predicted, y, self._logits(y))
        first = (x[:, 0].float() * self._mixer.scale_H).to(x.dtype)
        x[:, 1:] += self._input.term(first, input_TI)[:, None]
        return self._ended(x) if self._is_last else x, None

    def _logits(self, x_TH: Tensor) -> Tensor:
        return self._router(self._norm(x_TH))

    def _ended(self, x_TNH: Tensor) -> Tensor:
        first = x_TNH[:, 0]
        total = first.float()
        for i, linear in enumerate(self._end, 1):
            total = total + with_length_of(first, linear(x_TNH[:, i].contiguous())).float()
        return (total / x_TNH.shape[1]).to(x_TNH.dtype)

    @staticmethod
    def write(config: ModelConfig, number: int, writer: StreamWriter, attention: WritePart, ffn: WritePart) -> None:
        """Write what __call__ computes for the buffers of the streams; the first begins with x, the last ends there."""
        assert config.streams is not None
        name, others = f"blocks.{number}", range(1, config.streams)
        if number == 0:
            writer.copy("x", "stream 0")
            writer.copy("x", "h")
            for i in others:
                writer.linear(f"{name}.streams.{i}.stream_in", "h", f"stream {i}")
                writer.match(f"stream {i}", "x")
        writer.norm(f"{name}.stream_norm", "stream 0", "h")
        writer.linear(f"{name}.stream_router", "h", "stream_logits")
        writer.predict(name)
        writer.copy("stream 0", "x")
        Block.write(config, number, writer, attention, ffn)
        writer.norm(f"{name}.stream_norm", "x", "h")
        writer.linear(f"{name}.stream_router", "h", "stream_logits")
        writer.correct(name)
        writer.copy("stream 0", "x")
        writer.scale_each(name, "x")
        LayerInput.write_term(config, number, writer)
        for i in others:
            writer.add(f"stream {i}", "h")
        if number == config.num_layers - 1:
            writer.copy("stream 0", "x")
            for i in others:
                writer.copy(f"stream {i}", "h")
                writer.linear(f"{name}.streams.{i}.stream_out", "h", f"stream {i}")
                writer.match(f"stream {i}", "stream 0")
                writer.add("x", f"stream {i}")
            writer.scale("streams", "x")


def block_type(config: ModelConfig) -> type[Block] | type[StreamedBlock]:
    """Return what a layer of the model is."""
    return Block if config.streams is None else StreamedBlock
