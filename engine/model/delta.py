"""Linear attention by the gated delta rule, in torch, which defines it: each sequence keeps a state of fixed size.

backends/cpu/csrc/states.cpp computes the same. Shape letters: T tokens of the step, H value heads, K and V the sizes of
a key and a value, C channels of the convolution, N slots of states. layers.py calls it once a layer.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from gptserve.engine.model.activation import activate, decay, gate_heads, sigmoid
from gptserve.engine.model.attention import AttentionMetadata
from gptserve.engine.model.convolution import convolve
from gptserve.engine.model.loading import StreamedTensors, take_linear
from gptserve.engine.model.norm import Norm
from gptserve.engine.model.states import DeltaNumbers, State
from gptserve.engine.state_place import StatePlace, places_of
from gptserve.weights.config import GatedDelta, ModelConfig

NORM_EPS = 1e-6
"""Added to the sum of a query's squares, and of a key's, before it is divided by its length."""


class DeltaAttention:
    """What takes the place of Attention in a layer.

    Queries, keys and values are convolved over time, each channel alone, and activated by SiLU; queries and keys become
    vectors of length 1, and queries are divided by sqrt(K). With a token's decay d and rate b, a head's memory M [K, V]
    becomes d M + k (b (v - (d M)^T k))^T, and the head gives M^T q (Yang et al. 2024, equation 10). That is normalised
    and multiplied by SiLU of the gate.
    """

    def __init__(self, config: ModelConfig, layer: int, source: StreamedTensors) -> None:
        delta = config.layers[layer].recurrence
        assert isinstance(delta, GatedDelta)
        self._delta, name = delta, f"blocks.{layer}"
        self._in = take_linear(source, f"{name}.delta_in", bias=False)
        self._gate = take_linear(source, f"{name}.delta_gate", bias=False)
        self._rates = take_linear(source, f"{name}.delta_rates", bias=False)
        numbers = source.deltas[name] = DeltaNumbers(
            source.take(f"{name}.delta_conv.weight").view(delta.conv_width, -1).t().contiguous(),
            source.take(f"{name}.delta_decay").exp(),
            source.take(f"{name}.delta_step"),
        )
        self._numbers = numbers
        normalize, weight = source.operations.normalize, source.take(f"{name}.delta_norm.weight").float()
        self._norm = source.norms[f"{name}.delta_norm"] = Norm("rmsnorm", weight, None, config.norm_eps, normalize)
        self._norms = key_norms(delta, weight.device)
        self._out = take_linear(source, f"{name}.delta_out", bias=False)

    def __call__(self, x: Tensor, residual: Tensor | None, state: State, metadata: AttentionMetadata) -> Tensor:
        """Return what the layer gives for x [T, hidden], added to residual if given, and change the states."""
        delta, rates = self._delta, self._rates(x).float()
        learned, forgotten = rates.chunk(2, dim=1)
        learned_TH, decays_TH = sigmoid(learned), decay(forgotten + self._numbers.step_H, self._numbers.decay_H)
        mixed = self._in(x)
        heads_THV = mixed.new_empty(len(x), delta.num_value_heads, delta.value_size)
        places = places_of(metadata.states, metadata.query_starts, metadata.kv_lens)
        for place, (start, end) in zip(places, pairwise(metadata.query_starts), strict=True):
            rows = slice(start, end)
            q_TGK, k_TGK, v_THV = self._convolve(mixed[rows], state.latest_NSC, place)
            q_THK, k_THK = (of_value_heads(its.float(), delta) for its in (q_TGK, k_TGK))
            of_tokens = q_THK, k_THK, v_THV.float(), decays_TH[rows], learned_TH[rows]
            heads_THV[rows] = recur(state.memory_NHKV, place, *of_tokens).to(mixed.dtype)
        heads_THV[metadata.query_starts[-1] :] = 0  # padding
        return self._out(gate_heads(self._norm(heads_THV), self._gate(x), "silu"), residual)

    def _convolve(self, mixed_TC: Tensor, latest_NSC: Tensor, place: StatePlace) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a sequence's tokens; keep the latest inputs."""
        delta, num = self._delta, len(mixed_TC)
        convolved = convolve(mixed_TC, self._numbers.conv_SC, latest_NSC, place)
        mixed_TC = activate(convolved, "silu").to(mixed_TC.dtype)
        q, k, v = mixed_TC.split_with_sizes((delta.key_width, delta.key_width, delta.value_width), dim=1)
        query_norm, key_norm = self._norms
        q_TGK, k_TGK = (part.view(num, delta.num_key_heads, delta.key_size) for part in (q, k))
        return query_norm(q_TGK), key_norm(k_TGK), v.view(num, delta.num_value_heads, delta.value_size)


def key_norms(delta: GatedDelta, device: torch.device) -> tuple[Norm, Norm]:
    """Return what makes vectors of length 1 of queries, and divides them by sqrt(K), and of keys.

    x / sqrt(sum of squares + e) is the root mean square norm of x, with e / K, divided by sqrt(K).
    """
    size = delta.key_size
    factors = (torch.full((size,), factor, device=device) for factor in (1 / size, size**-0.5))
    query, key = (Norm("rmsnorm", factor, None, NORM_EPS / size) for factor in factors)
    return query, key


def of_value_heads(x_TGK: Tensor, delta: GatedDelta) -> Tensor:
    """Return for each value head what its key head has."""
    heads = torch.arange(delta.num_value_heads, device=x_TGK.device) // delta.group % delta.num_key_heads
    return x_TGK[:, heads]


def recur(
    memory_NHKV: Tensor,
    place: StatePlace,
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    decays_TH: Tensor,
    learned_TH: Tensor,
) -> Tensor:
    """Return what the heads give for the tokens of a sequence, one after the other, fp32 [T, H, V]; keep its memory."""
    memory = memory_NHKV[place.source] if place.source >= 0 else torch.zeros_like(memory_NHKV[place.slot])
    given = torch.empty_like(v_THV)
    of_keys = q_THK[..., None], k_THK[..., None]
    for t, (q, k, v, factor, learned) in enumerate(zip(*of_keys, v_THV, decays_TH, learned_TH, strict=True)):
        memory = memory * factor[:, None, None]
        change = (v - (memory * k).sum(1)) * learned[:, None]
        memory = memory + k * change[:, None]
        given[t] = (memory * q).sum(1)
        if t == place.kept_row:
            memory_NHKV[place.kept_slot] = memory
    memory_NHKV[place.slot] = memory
    return given
