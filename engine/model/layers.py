"""The parts of a decoder: norms, attention with its projections, and the block that joins them to a feed-forward.

Each is built from ModelConfig and a source of named tensors. It is called with the rows of one step, [T, hidden]: the
tokens of all sequences, one after the other. Only decoder.py builds them. No part knows a model family.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gptserve.engine.model.activation import gate_heads
from gptserve.engine.model.attention import AttentionBackend, AttentionMetadata
from gptserve.engine.model.attention_specs import attention_spec
from gptserve.engine.model.feed_forward import take_feed_forward
from gptserve.engine.model.layer_inputs import LayerInput
from gptserve.engine.model.loading import StreamedTensors, bare_norm, take_linear, take_norm, take_scale
from gptserve.engine.model.norm import Norm, normalize_heads_
from gptserve.engine.model.operations import BlockWriter, WritePart
from gptserve.engine.model.recurrent import take_recurrent
from gptserve.engine.model.rotary import Rotation, grow_, rotate_
from gptserve.engine.model.side import Side, take_side
from gptserve.engine.model.states import State
from gptserve.weights.config import ModelConfig


class Attention:
    """Causal self-attention with its projections: softmax(scale * q k) v over cached tokens and those of the step."""

    def __init__(
        self, config: ModelConfig, layer: int, source: StreamedTensors, backend: AttentionBackend, device: torch.device
    ) -> None:
        name = f"blocks.{layer}"
        self._qkv = take_linear(source, f"{name}.qkv", bias=config.qkv_bias)
        self._gate_kind = config.attention_gate
        self._gate = None if self._gate_kind is None else take_linear(source, f"{name}.attn_gate", bias=False)
        self._out = take_linear(source, f"{name}.attn_out", bias=config.attn_out_bias)
        self._clip, self._qk_norm, self._backend = config.qkv_clip, config.qk_norm, backend
        self._norm_is_last = config.qk_norm_after_rotation
        self._num_kv_heads = 0 if config.layers[layer].kv_layer is not None else config.layers[layer].num_kv_heads
        is_apart = self._norm_is_last or self._num_kv_heads == 0
        self._rotate_and_write = None if is_apart else source.operations.rotate_and_write
        own_size = config.layers[layer].head_size if config.qk_norm == "own" else None
        parts = ("qk" if self._num_kv_heads else "q") if config.qk_norm else ""
        self._norms = [take_norm(config, source, f"{name}.{part}_norm", own_size=own_size) for part in parts]
        if config.v_norm and self._num_kv_heads:
            self._norms.append(bare_norm(config, source, f"{name}.v_norm"))
        sinks = source.take(f"{name}.sinks").float() if config.attention_sinks else None
        self._spec = source.attentions[layer] = attention_spec(config, config.layers[layer], device, sinks)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Rotation | None,
        cache_2NGBD: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Return attention(x), added to residual if given; store the step's keys and values, if it has any."""
        spec, num_kv_heads = self._spec, self._num_kv_heads
        qkv = self._qkv(x)
        if self._clip is not None:
            qkv = qkv.clamp(-self._clip, self._clip)
        heads_THD = qkv.view(len(x), spec.num_heads + 2 * num_kv_heads, spec.head_size)
        q_THD, k_TGD, v_TGD = heads_THD.split_with_sizes((spec.num_heads, num_kv_heads, num_kv_heads), dim=1)
        if not self._norm_is_last:
            normalize_heads_(self._norms, (q_THD, k_TGD, v_TGD), of_each=self._qk_norm != "projection")
        if rotation is not None and self._rotate_and_write is not None:
            self._rotate_and_write(heads_THD, rotation, cache_2NGBD, metadata.slots_T)
        else:
            if rotation is not None:
                rotate_(heads_THD[:, : spec.num_heads + num_kv_heads], rotation)
            if self._norm_is_last:
                normalize_heads_(self._norms, (q_THD, k_TGD, v_TGD), of_each=self._qk_norm != "projection")
            if num_kv_heads:
                self._backend.write(k_TGD, v_TGD, cache_2NGBD, metadata)
        grow_(q_THD, rotation)
        attended_THD = self._backend.attend(q_THD, cache_2NGBD, metadata, spec)
        if self._gate is None or self._gate_kind is None:
            return self._out(attended_THD.flatten(1), residual)
        return self._out(gate_heads(attended_THD, self._gate(x), self._gate_kind), residual)


class Residual:
    """A residual connection around a part f (attention or feed-forward), with norms by ModelConfig.norm_placement.

    - "input": x + f(norm(x)) (GPT-2, Llama)
    - "output": x + norm(f(x)) (OLMo 2)
    - "both": x + norm'(f(norm(x))) (Gemma 2)
    - "sum": norm(x + f(x)) (GPT-1)
    """

    def __init__(
        self, config: ModelConfig, source: StreamedTensors, name: str, norm: Norm | None = None, is_inner: bool = False
    ) -> None:
        """Take the norms of part `name` from the source; `norm`, if given, replaces the one called {name}_norm.

        With `is_inner` the part has that norm itself, before it, and sums over ranks.
        """
        placement, self._group = ("output", None) if is_inner else (config.norm_placement, source.group)
        self._add_normalize = source.operations.add_normalize
        self.norm = norm = norm or (None if placement == "output" else take_norm(config, source, f"{name}_norm"))
        self._before = norm if placement in ("input", "both") else None
        self._of_sum = norm if placement == "sum" else None
        self._after = take_norm(config, source, f"{name}_output_norm") if placement in ("output", "both") else None
        self._side = take_side(config, source, name)

    def __call__(self, part: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, base: Tensor) -> Tensor:
        """Return the formula of the class with base in place of the x that is added.

        `part(input, residual)` returns f(input) + residual, or f(input) if residual is None.
        """
        h = x if self._before is None else self._before(x)
        if self._group is None and self._after is None:
            y = part(h, base)
        else:
            y = part(h, None) if self._group is None else self._group.sum(part(h, None))
            y = base + y if self._after is None else self._after(y, base)
        y = y if self._side is None else self._side(y, h)
        return y if self._of_sum is None else self._of_sum(y)

    @staticmethod
    def write(config: ModelConfig, name: str, writer: BlockWriter, part: WritePart, *, is_inner: bool = False) -> None:
        """Write the formula of the class: what __call__ computes for a base that is x, with h for the part's input."""
        placement, source = config.norm_placement, "x" if is_inner else "h"
        if placement in ("input", "both") and not is_inner:
            writer.norm(f"{name}_norm", "x", "h")
        elif not is_inner:
            writer.copy("x", "h")
        Side.keep(config, name, writer)
        if placement in ("output", "both") or is_inner:
            part(source, "h", "")
            writer.norm(f"{name}_output_norm", "h", "h")
            writer.add("x", "h")
        else:
            part("h", "x", "x")
        Side.write(config, name, writer)
        if placement == "sum":
            writer.norm(f"{name}_norm", "x", "x")

    def of_sum(
        self, part: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, term: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return s = x + term and f(norm(s)), whose sum is "input" of the class: the next norm adds them."""
        assert self.norm is not None and self._add_normalize is not None
        total, h = (x, self.norm(x)) if term is None else self._add_normalize(x, term, self.norm)
        y = part(h, None)
        return total, y if self._group is None else self._group.sum(y)


class Block:
    """One layer: attention and feed-forward, each with a residual connection.

    - sequential: a = x + attention(x); return a + ffn(a) (GPT-2)
    - parallel: return x + attention(x) + ffn(x) (GPT-J, GPT-NeoX)

    Norms are left out; `Residual` has them.
    """

    def __init__(
        self, config: ModelConfig, layer: int, source: StreamedTensors, backend: AttentionBackend, device: torch.device
    ) -> None:
        name, its, self._parallel = f"blocks.{layer}", config.layers[layer], config.parallel_residual
        is_more = config.parallel_residual or config.layer_input_size or config.layer_scale
        self._norms_add = not is_more and config.norm_placement == "input" and bool(source.operations.add_normalize)
        self._attn_residual = Residual(config, source, f"{name}.attn") if its.mixes else None
        self._attention = Attention(config, layer, source, backend, device) if its.num_heads else None
        self._recurrent = take_recurrent(config, layer, source)
        shared = self._attn_residual.norm if self._attn_residual and (config.shared_norm or not its.ffn_size) else None
        self._ffn_residual = Residual(config, source, f"{name}.ffn", shared, bool(its.dense_size))
        self._ffn = take_feed_forward(config, its, source, name)
        self._input = LayerInput(config, source, name) if config.layer_input_size and not config.streams else None
        self._scale = take_scale(source, name) if config.layer_scale else None

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
        """Return the layer's output [T, hidden] and store the step's keys and values in the cache, or its state.

        Input and output are each a sum of x and a term, if there is one, which the next norm adds. `input_TI` is what
        the layer is given beside them.
        """

        def attend(h: Tensor, residual: Tensor | None) -> Tensor:
            if self._attention is not None:
                residual = self._attention(h, residual, rotation, cache_2NGBD, metadata)
            if self._recurrent is not None and state is not None:
                residual = self._recurrent(h, residual, state, metadata)
            assert residual is not None
            return residual

        if self._norms_add:
            total = self._attn_residual.of_sum(attend, x, term) if self._attn_residual else (x, term)
            return total if self._ffn is None else self._ffn_residual.of_sum(self._ffn, *total)
        y = attended = self._attn_residual(attend, x, x) if self._attn_residual else x
        if self._ffn is not None:
            y = self._ffn_residual(self._ffn, x if self._parallel else attended, attended)
        y = y if self._input is None else self._input(y, input_TI)
        return y if self._scale is None else y * self._scale, None

    @staticmethod
    def write(config: ModelConfig, number: int, writer: BlockWriter, attention: WritePart, ffn: WritePart) -> None:
        """Write what __call__ computes, for parts of the layer of this number; a parallel one has norms of inputs."""
        name, is_inner = f"blocks.{number}", config.layers[number].dense_size is not None
        if config.parallel_residual:
            writer.norm(f"{name}.attn_norm", "x", "h")
            if not config.shared_norm:  # before attention is added to x
                writer.norm(f"{name}.ffn_norm", "x", "h2")
            attention("h", "x", "x")
            ffn("h" if config.shared_norm else "h2", "x", "x")
        else:
            if config.layers[number].mixes:
                Residual.write(config, f"{name}.attn", writer, attention)
            if config.layers[number].ffn_size:
                Residual.write(config, f"{name}.ffn", writer, ffn, is_inner=is_inner)
        if config.layer_input_size and not config.streams:
            LayerInput.write(config, number, writer)
        if config.layer_scale:
            writer.scale(name, "x")
