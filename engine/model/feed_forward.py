"""Feed-forwards: one for all rows, a mixture of experts, or both side by side.

layers.py builds that of each block. No part knows a model family.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from gptserve.engine.model.activation import Xielu, activate, cut_gates
from gptserve.engine.model.experts import GroupedExperts, MixtureOfExperts, stack
from gptserve.engine.model.loading import StreamedTensors, take_linear, take_norm
from gptserve.engine.model.operations import BlockWriter, WritePart
from gptserve.engine.model.routing import take_route
from gptserve.weights.config import Experts, LayerConfig, ModelConfig


class FeedForward:
    """act(x W_up) W_down; if gated, (act(x W_gate) * x W_up) W_down."""

    def __init__(self, config: ModelConfig, source: StreamedTensors, name: str, cut: float | None = None) -> None:
        fused = None if config.gated_ffn or config.xielu else config.activation
        self._up = take_linear(source, f"{name}.ffn_up", bias=config.ffn_bias, activation=fused)
        self._activate = _activation(config, source, name, cut) if fused is None else None
        self._down = take_linear(source, f"{name}.ffn_down", bias=config.ffn_bias)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the feed-forward of x, added to residual if given."""
        h = self._up(x)
        return self._down(h if self._activate is None else self._activate(h), residual)


class DenseAndExperts:
    """A feed-forward and a mixture side by side, as LayerConfig.dense_size says; each is one term of a sum of ranks."""

    def __init__(self, config: ModelConfig, experts: Experts, source: StreamedTensors, name: str) -> None:
        self._group = source.group
        self._norm = take_norm(config, source, f"{name}.ffn_norm")
        self._dense = FeedForward(config, source, name)
        self._dense_norm = take_norm(config, source, f"{name}.dense_output_norm")
        self._router_norm = take_norm(config, source, f"{name}.router_norm", config.hidden_size**-0.5)
        self._experts_norm = take_norm(config, source, f"{name}.experts_norm")
        self._mixture = take_mixture(config, experts, source, name)
        self._mixture_norm = take_norm(config, source, f"{name}.experts_output_norm")

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return both for x [T, hidden], which has no norm yet, added to residual if given; whole with ranks, too."""
        dense = self._dense(self._norm(x))
        mixed = self._mixture(self._experts_norm(x), routed=self._router_norm(x))
        if self._group is not None:
            dense, mixed = self._group.sum(dense), self._group.sum(mixed)
        y = self._mixture_norm(mixed, self._dense_norm(dense))
        return y if residual is None else residual + y

    @staticmethod
    def write(name: str, writer: BlockWriter, logits: str, dense: WritePart, mixture: WritePart) -> None:
        """Write what __call__ computes for x, into h; `mixture` reads the router's `logits`."""
        writer.norm(f"{name}.ffn_norm", "x", "h")
        dense("h", "h", "")
        writer.norm(f"{name}.dense_output_norm", "h", "h")
        writer.norm(f"{name}.router_norm", "x", "h2")
        writer.linear(f"{name}.router", "h2", logits)
        writer.norm(f"{name}.experts_norm", "x", "h2")
        mixture("h2", "h2", "")
        writer.norm(f"{name}.experts_output_norm", "h2", "h2")
        writer.add("h", "h2")


def _activation(
    config: ModelConfig, source: StreamedTensors, name: str, cut: float | None = None
) -> Callable[[Tensor], Tensor]:
    """Return the function from outputs of ffn_up to inputs of ffn_down, of the feed-forward of this name.

    `cut` is LayerConfig.gate_cut.
    """
    if cut is not None:
        return lambda x: source.operations.gate(cut_gates(x, cut), config.activation, config.ffn_limit)
    if config.xielu:
        return source.xielus.setdefault(name, Xielu.of(source.take(f"{name}.xielu")))
    if config.gated_ffn:
        return lambda x: source.operations.gate(x, config.activation, config.ffn_limit)
    return partial(activate, activation=config.activation)


def take_feed_forward(
    config: ModelConfig, layer: LayerConfig, source: StreamedTensors, name: str
) -> FeedForward | MixtureOfExperts | GroupedExperts | DenseAndExperts | None:
    """Return the feed-forward of the block of this name, as its layer has it; None if it has none."""
    if not layer.ffn_size:
        return None
    if layer.experts is None:
        return FeedForward(config, source, name, layer.gate_cut)
    take = take_mixture if layer.dense_size is None else DenseAndExperts
    return take(config, layer.experts, source, name)


def take_mixture(
    config: ModelConfig, experts: Experts, source: StreamedTensors, name: str
) -> MixtureOfExperts | GroupedExperts:
    """Return the mixture of the block of this name."""
    route, operations = take_route(experts, source, f"{name}.router", bias=config.ffn_bias), source.operations
    if operations.experts is not None:
        weights = stack(source.take, name, experts.num_all, config.ffn_bias)
        return GroupedExperts(route, weights, _activation(config, source, name), operations.experts)
    ffns = [FeedForward(config, source, f"{name}.experts.{e}") for e in range(experts.num_all)]
    return MixtureOfExperts(route, ffns)
