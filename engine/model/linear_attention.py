"""Linear attention in torch, which defines it: each head of a sequence keeps a matrix of fixed size, its memory.

backends/cpu/csrc/states.cpp computes the same. Shape letters: T tokens of the step, H value heads, G key heads, K and V
the sizes of a key and a value, C channels of the convolution, N slots of states. layers.py calls it once a layer.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from gptserve.engine.model.activation import activate, decay, gate_heads, sigmoid, softplus
from gptserve.engine.model.attention import AttentionMetadata
from gptserve.engine.model.convolution import convolve
from gptserve.engine.model.loading import StreamedTensors, take_linear
from gptserve.engine.model.norm import Norm
from gptserve.engine.model.states import HeadNumbers, State
from gptserve.engine.state_place import StatePlace, places_of
from gptserve.weights.config import GatedDelta, LinearAttention, ModelConfig, StateSpace

NORM_EPS = 1e-6
"""Added to the sum of a query's squares, and of a key's, before it is divided by its length."""


class LinearHeads:
    """What takes the place of Attention in a layer: its heads, and the linears around them.

    Queries, keys and values are convolved over time, each channel alone, and activated by SiLU. `recur` says what a
    head makes of them. By the gated delta rule queries and keys become vectors of length 1 before, and queries are
    divided by sqrt(K); what a head gives is normalised, and then multiplied by SiLU of the gate. A state space gates
    first, and normalises what all value heads of a key head give, if it has a norm.
    """

    def __init__(self, config: ModelConfig, layer: int, source: StreamedTensors) -> None:
        shape = config.layers[layer].recurrence
        assert isinstance(shape, GatedDelta | StateSpace)
        self._shape, name = shape, f"blocks.{layer}"
        self._in = take_linear(source, f"{name}.memory_in", bias=False)
        self._gate = take_linear(source, f"{name}.memory_gate", bias=False)
        self._rates = take_linear(source, f"{name}.memory_rates", bias=False)
        is_space, has_bias = isinstance(shape, StateSpace), isinstance(shape, StateSpace) and shape.has_conv_bias
        numbers = source.heads[name] = HeadNumbers(
            source.take(f"{name}.memory_conv.weight").view(shape.conv_width, -1).t().contiguous(),
            source.take(f"{name}.memory_decay").exp(),
            source.take(f"{name}.memory_step"),
            source.take(f"{name}.memory_conv.bias") if has_bias else None,
            source.take(f"{name}.memory_skip") if is_space else None,
        )
        self._numbers = numbers
        self._norm = _take_norm(config, source, name, shape)
        self._norms = key_norms(shape, numbers.decay_H.device) if isinstance(shape, GatedDelta) else None
        self._out = take_linear(source, f"{name}.memory_out", bias=False)

    def __call__(self, x: Tensor, residual: Tensor | None, state: State, metadata: AttentionMetadata) -> Tensor:
        """Return what the layer gives for x [T, hidden], added to residual if given, and change the states."""
        shape = self._shape
        learned_TH, decays_TH = self._learned_and_decays(self._rates(x).float())
        mixed = self._in(x)
        heads_THV = mixed.new_empty(len(x), shape.num_value_heads, shape.value_size)
        places = places_of(metadata.states, metadata.query_starts, metadata.kv_lens)
        for place, (start, end) in zip(places, pairwise(metadata.query_starts), strict=True):
            rows = slice(start, end)
            q_TGK, k_TGK, v_THV = self._convolve(mixed[rows], state.latest_NSC, place)
            q_THK, k_THK = (of_value_heads(its.float(), shape) for its in (q_TGK, k_TGK))
            of_tokens = q_THK, k_THK, v_THV.float(), decays_TH[rows], learned_TH[rows]
            heads_THV[rows] = recur(state.memory_NHKV, place, *of_tokens, self._numbers.skip_H).to(mixed.dtype)
        heads_THV[metadata.query_starts[-1] :] = 0  # padding
        if self._norm is not None and isinstance(shape, GatedDelta):
            heads_THV = self._norm(heads_THV)
        gated = gate_heads(heads_THV, self._gate(x), "silu")
        if self._norm is not None and isinstance(shape, StateSpace):
            gated = self._norm(gated.view(len(x), shape.num_key_heads, -1)).flatten(1)
        return self._out(gated, residual)

    def _learned_and_decays(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Return how much each head learns of each token, and by what it multiplies its memory before, [T, H] each."""
        step_H, decay_H = self._numbers.step_H, self._numbers.decay_H
        if isinstance(self._shape, GatedDelta):
            learned, forgotten = rates.chunk(2, dim=1)
            return sigmoid(learned), decay(softplus(forgotten + step_H), decay_H)
        steps_TH = softplus(rates + step_H).clamp(*self._shape.step_limits)
        return steps_TH, decay(steps_TH, decay_H)

    def _convolve(self, mixed_TC: Tensor, latest_NSC: Tensor, place: StatePlace) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a sequence's tokens; keep the latest inputs."""
        shape, num = self._shape, len(mixed_TC)
        convolved = convolve(mixed_TC, self._numbers.conv_SC, latest_NSC, place, self._numbers.bias_C)
        mixed_TC = activate(convolved, "silu").to(mixed_TC.dtype)
        q, k, v = mixed_TC.split_with_sizes((shape.key_width, shape.key_width, shape.value_width), dim=1)
        q_TGK, k_TGK = (part.view(num, shape.num_key_heads, shape.key_size) for part in (q, k))
        if self._norms is not None:
            query_norm, key_norm = self._norms
            q_TGK, k_TGK = query_norm(q_TGK), key_norm(k_TGK)
        return q_TGK, k_TGK, v.view(num, shape.num_value_heads, shape.value_size)


def _take_norm(config: ModelConfig, source: StreamedTensors, name: str, shape: GatedDelta | StateSpace) -> Norm | None:
    """Return the norm of what heads give, if any: of a value head, or of those of a key head, with its weights."""
    if isinstance(shape, StateSpace) and not shape.has_norm:
        return None
    weight, eps = source.take(f"{name}.memory_norm.weight").float(), config.norm_eps
    if isinstance(shape, StateSpace):
        weight, eps = weight.view(shape.num_key_heads, -1), shape.norm_eps
    norm = source.norms[f"{name}.memory_norm"] = Norm("rmsnorm", weight, None, eps, source.operations.normalize)
    return norm


def key_norms(delta: GatedDelta, device: torch.device) -> tuple[Norm, Norm]:
    """Return what makes vectors of length 1 of queries, and divides them by sqrt(K), and of keys.

    x / sqrt(sum of squares + e) is the root mean square norm of x, with e / K, divided by sqrt(K).
    """
    size = delta.key_size
    factors = (torch.full((size,), factor, device=device) for factor in (1 / size, size**-0.5))
    query, key = (Norm("rmsnorm", factor, None, NORM_EPS / size) for factor in factors)
    return query, key


def of_value_heads(x_TGK: Tensor, shape: LinearAttention) -> Tensor:
    """Return for each value head what its key head has."""
    heads = torch.arange(shape.num_value_heads, device=x_TGK.device) // shape.group % shape.num_key_heads
    return x_TGK[:, heads]


def recur(
    memory_NHKV: Tensor,
    place: StatePlace,
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    decays_TH: Tensor,
    learned_TH: Tensor,
    skip_H: Tensor | None = None,
) -> Tensor:
    """Return what the heads give for the tokens of a sequence, one after the other, fp32 [T, H, V]; keep its memory.

    With a token's decay d and what is learned of it, b, a head's memory M [K, V] becomes d M + k (b (v - (d M)^T k))^T,
    and the head gives M^T q (Yang et al. 2024, equation 10). With skip_H, D, it becomes d M + k (b v)^T, and the head
    gives M^T q + D v (Dao and Gu 2024, section 7).
    """
    memory = memory_NHKV[place.source] if place.source >= 0 else torch.zeros_like(memory_NHKV[place.slot])
    given = torch.empty_like(v_THV)
    of_keys = q_THK[..., None], k_THK[..., None]
    for t, (q, k, v, factor, learned) in enumerate(zip(*of_keys, v_THV, decays_TH, learned_TH, strict=True)):
        memory = memory * factor[:, None, None]
        change = (v if skip_H is not None else v - (memory * k).sum(1)) * learned[:, None]
        memory = memory + k * change[:, None]
        given[t] = (memory * q).sum(1)
        if t == place.kept_row:
            memory_NHKV[place.kept_slot] = memory
    memory_NHKV[place.slot] = memory
    return given if skip_H is None else given + v_THV * skip_H[:, None]
