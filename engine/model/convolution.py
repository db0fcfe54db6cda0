"""Causal convolutions over time, in torch, which defines them: each sequence keeps the latest inputs of each channel.

backends/cpu/csrc/states.cpp computes the same. Shape letters: T tokens, C channels, S numbers of a channel, N slots of
states. layers.py calls GatedConvolution once a layer, linear_attention.py the function.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from gptserve.engine.model.attention import AttentionMetadata
from gptserve.engine.model.loading import StreamedTensors, take_linear
from gptserve.engine.model.states import State
from gptserve.engine.state_place import StatePlace, places_of
from gptserve.weights.config import ModelConfig, ShortConvolution


class GatedConvolution:
    """What takes the place of Attention in a layer: c * convolution(b * x), for linears b, c and x of its input."""

    def __init__(self, config: ModelConfig, layer: int, source: StreamedTensors) -> None:
        convolution, name = config.layers[layer].recurrence, f"blocks.{layer}"
        assert isinstance(convolution, ShortConvolution)
        self._in = take_linear(source, f"{name}.conv_in", bias=False)
        factors_SC = source.take(f"{name}.conv_factors").view(convolution.conv_width, -1).t().contiguous()
        self._factors_SC = source.convolutions[name] = factors_SC
        self._out = take_linear(source, f"{name}.conv_out", bias=False)

    def __call__(self, x: Tensor, residual: Tensor | None, state: State, metadata: AttentionMetadata) -> Tensor:
        """Return what the layer gives for x [T, hidden], added to residual if given, and change the states."""
        b_TC, c_TC, x_TC = (part.float() for part in self._in(x).chunk(3, dim=1))
        inputs_TC = b_TC * x_TC
        convolved_TC = torch.zeros_like(inputs_TC)  # of padding, too
        places = places_of(metadata.states, metadata.query_starts, metadata.kv_lens)
        for place, (start, end) in zip(places, pairwise(metadata.query_starts), strict=True):
            convolved_TC[start:end] = convolve(inputs_TC[start:end], self._factors_SC, state.latest_NSC, place)
        return self._out((convolved_TC * c_TC).to(x.dtype), residual)


def convolve(
    inputs_TC: Tensor, factors_SC: Tensor, latest_NSC: Tensor, place: StatePlace, bias_C: Tensor | None = None
) -> Tensor:
    """Return the sums of the latest inputs of a sequence's tokens times their factors, fp32 [T, C]; keep the latest."""
    before = latest_NSC[place.source] if place.source >= 0 else torch.zeros_like(latest_NSC[place.slot])
    inputs = torch.cat([before, inputs_TC.float()])
    num, size = len(inputs_TC), len(factors_SC)
    convolved_TC = torch.zeros_like(inputs[:num]) if bias_C is None else bias_C.repeat(num, 1)
    for i, factors_C in enumerate(factors_SC):
        convolved_TC += inputs[i : i + num] * factors_C
    latest_NSC[place.slot] = inputs[num:]
    if place.kept_row >= 0:
        latest_NSC[place.kept_slot] = inputs[place.kept_row + 1 :][: size - 1]
    return convolved_TC
