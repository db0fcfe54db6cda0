"""Activations in torch, elementwise; engine/native/activation.h has the same in vectors. The linears apply them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from gptserve.weights.config import Activation

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "silu": functional.silu,
    "tanh": torch.tanh,
}
"""GELU and its approximations as in Hendrycks & Gimpel 2016, section 2."""


def activate(x: Tensor, activation: Activation | None) -> Tensor:
    """Return the activation of x, elementwise."""
    return x if activation is None else _ACTIVATIONS[activation](x)
