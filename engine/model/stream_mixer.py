"""How a layer mixes the streams of ModelConfig.streams, in torch; backends/cpu/csrc/streams_kernel.h has the same.

streams.py calls it. On a CPU the bits of a row depend on it alone: there are elementwise operations, and means of rows
as in norm.py.

Shape letters: T rows, N streams, H hidden, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gptserve.engine.model.activation import activate

_LEAST_SQUARE = 1e-5
"""The least mean square that a product is divided by the root of."""


class StreamMixer(NamedTuple):
    """The numbers of a layer that mix its streams, all fp32."""

    predict_NNN: Tensor
    """By what the weights j of a row are multiplied to be the factor of stream k in stream i: [i, j, k]."""
    correct_NN: Tensor
    """By what the weights j of a row are multiplied to be the factor of what stream i learns: [j, i]."""
    scale_H: Tensor
    """By what the first stream is multiplied for the layer's input."""

    @classmethod
    def of(cls, predict: Tensor, correct: Tensor, scale: Tensor) -> StreamMixer:
        """Return that of the canonical tensors, [N * N, N], [N, N] and [H]."""
        num = len(correct)
        return cls(predict.view(num, num, num).mT.contiguous(), correct.mT.contiguous(), scale)

    def predict(self, streams_TNH: Tensor, logits_TN: Tensor) -> Tensor:
        """Return p of ModelConfig.streams, given the logits of the first stream."""
        weights_TN, wide = _weights(logits_TN), streams_TNH.float()
        of_streams = [_sum(weights_TN, matrix_NN) for matrix_NN in self.predict_NNN]
        factors_TNN = torch.stack(of_streams, dim=1)
        total = wide
        for i in range(wide.shape[1]):
            total = total + factors_TNN[:, :, i, None] * wide[:, i, None]
        return total.to(streams_TNH.dtype)

    def correct(self, predicted_TNH: Tensor, y_TH: Tensor, logits_TN: Tensor) -> Tensor:
        """Return what a layer gives, given what it computes of p_0 and its logits."""
        factors_TN, wide = _sum(_weights(logits_TN), self.correct_NN) + 1, predicted_TNH.float()
        learnt_TH = y_TH.float() - wide[:, 0]
        return (wide + factors_TN[:, :, None] * learnt_TH[:, None]).to(predicted_TNH.dtype)


def with_length_of(x_TH: Tensor, y_TH: Tensor) -> Tensor:
    """Return y times a number of each row, so that it is as long as x."""
    wide = y_TH.float()
    length, own = x_TH.float().square().mean(-1, keepdim=True), wide.square().mean(-1, keepdim=True)
    return (wide * torch.sqrt(length / own.clamp(min=_LEAST_SQUARE))).to(y_TH.dtype)


def _weights(logits_TN: Tensor) -> Tensor:
    return activate(logits_TN.float().contiguous(), "tanh")


def _sum(weights_TN: Tensor, factors_NO: Tensor) -> Tensor:
    """Return the product [T, O], summed in the order of N: a product of matrices would sum by the number of rows."""
    total = weights_TN[:, :1] * factors_NO[0]
    for i in range(1, len(factors_NO)):
        total = total + weights_TN[:, i, None] * factors_NO[i]
    return total
