"""Activations in torch, elementwise; backends/cpu/csrc/activation.h has the same in vectors. Linears apply them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from gptserve.weights.config import Activation, AttentionGate

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

_OF_ALL_THREADS: tuple[Activation, ...] = ("gelu", "gelu_tanh")
"""Those that torch shares among all threads, however few elements each gets."""
_GRAIN = 32768  # elements: at::internal::GRAIN_SIZE
_VECTORS = 64  # elements that its loops take at once at most: two vectors of AVX-512 in bf16


def activate(x: Tensor, activation: Activation | None) -> Tensor:
    """Return the activation of x, elementwise; on a CPU the bits of an element depend on it alone."""
    return x if activation is None else _by_vectors(x, _ACTIVATIONS[activation], activation in _OF_ALL_THREADS)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x), elementwise; on a CPU the bits of an element depend on it alone."""
    return _by_vectors(x.contiguous(), torch.sigmoid)


def softplus(x: Tensor) -> Tensor:
    """Return ln(1 + e^x), elementwise; on a CPU the bits of an element depend on it alone."""
    return _by_vectors(x.contiguous(), functional.softplus)


def decay(steps: Tensor, factors: Tensor) -> Tensor:
    """Return e^(-factor * step), elementwise; on a CPU the bits of an element depend on it alone."""
    return _by_vectors(-(factors * steps), torch.exp)


_GATES: dict[AttentionGate, Callable[[Tensor], Tensor]] = {"softplus": functional.softplus, "silu": functional.silu}


def gate_heads(heads_THD: Tensor, gates: Tensor, function: AttentionGate) -> Tensor:
    """Return heads [T, H, D] times the function, in fp32, of gates [T, H * D], or [T, H] of whole heads, as [T, H * D].

    On a CPU the bits of an element depend on it alone.
    """
    wide = gates.float()
    factors = sigmoid(wide) if function == "sigmoid" else _by_vectors(wide.contiguous(), _GATES[function])
    of_heads_TH = factors.to(heads_THD.dtype).view(*heads_THD.shape[:2], -1)
    return (heads_THD * of_heads_TH).flatten(1)


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(x / cap), x itself without a cap."""
    return x if cap is None else cap * activate(x / cap, "tanh")


@dataclass(frozen=True, slots=True)
class Xielu:
    """xIELU of one layer (Huang & Schlag, "Deriving Activation Functions Using Integration", 2025).

    For x > 0 it is alpha_p x^2 + beta x, else alpha_n (e^min(x, eps) - 1 - x) + beta x.
    """

    numbers: Tensor
    """alpha_p, alpha_n, beta and eps, fp32 [4]."""

    @classmethod
    def of(cls, stored: Tensor) -> Xielu:
        """Return that of the canonical tensor, [4]: both alphas there are before their softplus, and alpha_n's beta."""
        alphas, others = functional.softplus(stored[:2]), stored[2:]
        return cls(torch.cat([alphas[:1], alphas[1:] + others[:1], others]))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the activation of x, elementwise in fp32, rounded once; its bits depend on the element alone."""
        return _by_vectors(x, self._compute)

    def _compute(self, x: Tensor) -> Tensor:
        alpha_p, alpha_n, beta, eps = self.numbers
        wide = x.float()
        below = (torch.expm1(torch.minimum(wide, eps)) - wide) * alpha_n
        y: Tensor = torch.where(wide > 0, alpha_p * wide * wide, below) + beta * wide
        return y.to(x.dtype)


def gated(x: Tensor, activation: Activation, limit: float | None) -> Tensor:
    """Return act(gate) * up for x = [gate, up]; with a limit, both are clamped to it and 1 is added to up (gpt-oss)."""
    gate, up = x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    return activate(gate, activation) * up


def cut_gates(x: Tensor, cut: float) -> Tensor:
    """Return x = [gate, up] with max(0, gate - mean(gate) - cut * deviation(gate)) in place of the gate."""
    gate, up = x.float().chunk(2, dim=-1)
    mean = gate.mean(-1, keepdim=True)
    deviation = torch.sqrt((gate - mean).square().mean(-1, keepdim=True))
    return torch.cat([functional.relu(gate - (mean + deviation * cut)), up], dim=-1).to(x.dtype)


def _by_vectors(x: Tensor, compute: Callable[[Tensor], Tensor], is_of_all_threads: bool = False) -> Tensor:
    """Return compute(x), an operation of each element; on a CPU all are computed in whole vectors."""
    size = _whole_vectors(x.numel(), is_of_all_threads) if x.device.type == "cpu" else x.numel()
    if size == x.numel():
        return compute(x)
    padded = functional.pad(x.flatten(), (0, size - x.numel()))
    return compute(padded)[: x.numel()].view(x.shape)


def _whole_vectors(size: int, is_of_all_threads: bool) -> int:
    """Return the next size that torch cuts into whole vectors for its threads.

    What is left of a thread's part after the last whole vector is computed by other code, which has other bits. There
    is a part for each thread, but most operations have none of less than _GRAIN.
    """
    num_parts = torch.get_num_threads()
    if not is_of_all_threads:
        num_parts = max(1, min(num_parts, math.ceil(size / _GRAIN)))
    unit = _VECTORS * num_parts
    return math.ceil(size / unit) * unit
