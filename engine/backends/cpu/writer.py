"""Writes a decoder's program: the operations of its embedding, its blocks and its head, over named buffers.

The order of a block's norms, parts and sums stands in engine/model/layers.py, beside torch's. decoder.py calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ctypes import Array, Structure, addressof, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.cpu.buffers import buffer_name, layer_widths, scores_kind
from gptserve.engine.backends.cpu.linear import NativeLinear, PackedRows
from gptserve.engine.backends.cpu.program import (
    HEAD_GATES,
    Convolve,
    Experts,
    Factors,
    Gate,
    Kind,
    Mixing,
    Norm,
    Program,
    Recur,
    Rotation,
    Table,
    router_data,
)
from gptserve.engine.model import norm as model_norm
from gptserve.engine.model.feed_forward import DenseAndExperts
from gptserve.engine.model.layer_inputs import LayerInputs
from gptserve.engine.model.linear import Rows
from gptserve.engine.model.linear_attention import key_norms
from gptserve.engine.model.loading import StreamedTensors
from gptserve.engine.model.operations import WritePart
from gptserve.engine.model.streams import block_type
from gptserve.weights.config import Experts as Mixture
from gptserve.weights.config import GatedDelta, ModelConfig, ShortConvolution, StateSpace


class Writer:
    """Writes a program: what is called here is appended, in the order of the calls. A BlockWriter."""

    def __init__(
        self,
        config: ModelConfig,
        parts: StreamedTensors,
        widths: dict[str, int],
        dtype: torch.dtype,
        wide: tuple[str, ...],
    ) -> None:
        self.program = Program(widths, dtype.itemsize, wide=wide)
        self._config, self._parts, self._widths, self._dtype = config, parts, widths, dtype
        shapes = {layer: layer_widths(config, layer, dtype).items() for layer in config.distinct_layers}
        self._buffers = {
            layer: {kind: buffer_name(kind, width) for kind, width in its} for layer, its in shapes.items()
        }
        """The buffers of each layer, by their kind."""

    def begin(self, embedding: Rows, positions: Tensor | None) -> None:
        """Write the embedded tokens to x."""
        config, target = self._config, "embedded" if self._config.embed_size else "x"
        scale = torch.tensor(config.embed_scale, dtype=self._dtype).item()  # rounded as in Decoder
        self._embed(target, embedding, scale)
        if config.embed_norm:
            self._norm("embed_norm", target, target)
        if config.embed_size:
            self.linear("embed_in", target, "x")
        if positions is not None:
            self.program.add("add_position", "x", "x", Table(self._address(positions), 1.0))
        if config.layer_input_size:
            LayerInputs.write(self)

    def block(self, number: int, rotations: tuple[Tensor, ...], backend: CpuAttention) -> None:
        """Put x through a layer, as `Block` in layers.py defines it."""
        name, layer = f"blocks.{number}", self._config.layers[number]
        buffers = self._buffers[layer]
        parts = [self._attention(number, rotations, backend)] if layer.num_heads else []
        if isinstance(layer.recurrence, ShortConvolution):
            parts.append(self._convolution(number, layer.recurrence, buffers))
        elif layer.recurrence is not None:
            parts.append(self._linear_attention(number, layer.recurrence, buffers))

        def mix(source: str, target: str, residual: str) -> None:
            for i, part in enumerate(parts):
                part(source, target, target if i else residual)

        if layer.experts is None:
            ffn = self._feed_forward(name, buffers, layer.gate_cut)
        elif layer.dense_size is None:
            ffn = self._mixture(name, layer.experts, buffers)
        else:
            ffn = self._dense_and_experts(name, layer.experts, buffers)
        block_type(self._config).write(self._config, number, self, mix, ffn)

    def head(self) -> None:
        """Write the logits of taken rows of x."""
        source = "h"
        if self._config.norm_placement == "sum":
            self.program.add("copy", "taken", source)
        else:
            self._norm("final_norm", "taken", source)
        if self._config.embed_size:
            self.linear("embed_out", source, "embedded")
            source = "embedded"
        self.linear("head", source, "logits")

    def norm(self, name: str, source: str, target: str) -> None:
        self._norm(name, source, target)

    def copy(self, source: str, target: str) -> None:
        self.program.add("copy", source, target)

    def add(self, target: str, term: str) -> None:
        self.program.add("add", target, target, residual=term)

    def embed(self, name: str, target: str) -> None:
        self._embed(target, *self._parts.tables[name])

    def _embed(self, target: str, rows: Rows, scale: float, num_rows: int = 0) -> None:
        """Write rows of tokens; those from num_rows on have the first row, unless it is 0."""
        if isinstance(rows, PackedRows):
            self.program.keep(rows.linear)
            table = Table(rows.address, scale, rows.kind, num_rows)
        else:
            assert isinstance(rows, Tensor)
            table = Table(self._address(rows), scale, 0, num_rows)
        self.program.add("embed", target, target, table)

    def multiply(self, target: str, factors: str, first: int) -> None:
        self.program.add("multiply", factors, target, c_int64(first))

    def scale(self, name: str, target: str) -> None:
        self.program.add("scale", target, target, c_float(self._parts.scales[name]))

    def match(self, target: str, like: str) -> None:
        self.program.add("match", like, target)

    def predict(self, name: str) -> None:
        self._mix("predict", "stream_logits", self._parts.mixers[name].predict_NNN)

    def correct(self, name: str) -> None:
        self._mix("correct", "x", self._parts.mixers[name].correct_NN)

    def scale_each(self, name: str, target: str) -> None:
        self.program.add("scale_each", target, target, Factors(self._address(self._parts.mixers[name].scale_H)))

    def _mix(self, kind: Kind, source: str, factors: Tensor) -> None:
        data = Mixing(self._address(factors), len(factors), self.program.number("stream_logits"))
        self.program.add(kind, source, "stream 0", data)

    def _attention(self, layer: int, rotations: tuple[Tensor, ...], backend: CpuAttention) -> WritePart:
        name, spec, config = f"blocks.{layer}", self._parts.attentions[layer], self._config
        num_heads, num_kv_heads, size = spec.num_heads, 0 if spec.reads_other else spec.num_kv_heads, spec.head_size
        buffers, gate = self._buffers[config.layers[layer]], config.attention_gate
        qkv, heads = buffers["qkv"], buffers["heads"]

        def normalize() -> None:
            if config.qk_norm is not None:
                of_keys = [("k", num_heads, num_kv_heads)] if num_kv_heads else []
                for part, first, count in (("q", 0, num_heads), *of_keys):
                    if config.qk_norm == "own":
                        for head in range(count):
                            place = (first + head) * size, 1, size
                            self._norm(f"{name}.{part}_norm", qkv, qkv, place, head)
                        continue
                    vectors = (count, size) if config.qk_norm == "head" else (1, count * size)
                    self._norm(f"{name}.{part}_norm", qkv, qkv, (first * size, *vectors))
            if config.v_norm and num_kv_heads:
                place = (num_heads + num_kv_heads) * size, num_kv_heads, size
                self._norm(f"{name}.v_norm", qkv, qkv, place)

        def append(source: str, target: str, residual: str) -> None:
            self.linear(f"{name}.qkv", source, qkv)
            if gate is not None:
                self.linear(f"{name}.attn_gate", source, buffers["gates"])
            if config.qkv_clip is not None:
                self.program.add("clamp", qkv, qkv, c_float(config.qkv_clip))
            if not config.qk_norm_after_rotation:
                normalize()
            for waves, count in zip(rotations, (num_heads + num_kv_heads, num_heads), strict=False):
                self.program.add("rotate", qkv, qkv, Rotation(self._address(waves), count, size, waves.shape[-1]))
            if config.qk_norm_after_rotation:
                normalize()
            self.program.add("attend", qkv, heads, backend.operation(spec, layer))
            if gate is not None:
                self.program.add("gate_heads", buffers["gates"], heads, c_int32(HEAD_GATES.index(gate)))
            self.linear(f"{name}.attn_out", heads, target, residual)

        return append

    def _linear_attention(self, layer: int, shape: GatedDelta | StateSpace, buffers: Mapping[str, str]) -> WritePart:
        name, heads = f"blocks.{layer}.memory", buffers["memory_heads"]
        mixed, gates = buffers["mixed"], buffers["memory_gates"]
        numbers = self._parts.heads[f"blocks.{layer}"]
        factors, decay, step, bias, skip = (None if its is None else self._address(its) for its in numbers)
        sizes = shape.num_key_heads, shape.num_value_heads, shape.key_size, shape.value_size, shape.group
        limits = shape.step_limits if isinstance(shape, StateSpace) else (0.0, 0.0)
        convolve = Convolve(factors, bias, layer, shape.conv_size, gated=False)
        recur = Recur(decay, step, skip, layer, *sizes, *limits, self.program.number(buffers["rates"]))
        norms = key_norms(shape, numbers.decay_H.device) if isinstance(shape, GatedDelta) else ()
        width = shape.value_width // shape.num_key_heads

        def append(source: str, target: str, residual: str) -> None:
            for part, buffer in (("in", buffers["unmixed"]), ("gate", gates), ("rates", buffers["rates"])):
                self.linear(f"{name}_{part}", source, buffer)
            self.program.add("convolve", buffers["unmixed"], mixed, convolve)
            for number, norm in enumerate(norms):
                self._normalise(norm, mixed, mixed, (number * shape.key_width, shape.num_key_heads, shape.key_size))
            self.program.add("recur", mixed, heads, recur)
            if isinstance(shape, GatedDelta):
                self._norm(f"{name}_norm", heads, heads, (0, shape.num_value_heads, shape.value_size))
            self.program.add("gate_heads", gates, heads, c_int32(HEAD_GATES.index("silu")))
            if isinstance(shape, StateSpace) and shape.has_norm:
                for number in range(shape.num_key_heads):
                    self._norm(f"{name}_norm", heads, heads, (number * width, 1, width), number)
            self.linear(f"{name}_out", heads, target, residual)

        return append

    def _convolution(self, layer: int, convolution: ShortConvolution, buffers: Mapping[str, str]) -> WritePart:
        name, factors = f"blocks.{layer}", self._address(self._parts.convolutions[f"blocks.{layer}"])
        convolve = Convolve(factors, None, layer, convolution.conv_size, gated=True)

        def append(source: str, target: str, residual: str) -> None:
            self.linear(f"{name}.conv_in", source, buffers["unmixed"])
            self.program.add("convolve", buffers["unmixed"], buffers["memory_heads"], convolve)
            self.linear(f"{name}.conv_out", buffers["memory_heads"], target, residual)

        return append

    def _feed_forward(self, name: str, buffers: Mapping[str, str], cut: float | None = None) -> WritePart:
        def append(source: str, target: str, residual: str) -> None:
            hidden = buffers["up"]
            self.linear(f"{name}.ffn_up", source, hidden)
            if cut is not None:
                self.program.add("cut_gate", hidden, hidden, c_float(cut))
            if self._config.gated_ffn:
                hidden = buffers["gated"]
                self.program.add("gate", buffers["up"], hidden, self._gate())
            if self._config.xielu:
                self.program.add("xielu", hidden, hidden, (c_float * 4)(*self._parts.xielus[name].numbers.tolist()))
            self.linear(f"{name}.ffn_down", hidden, target, residual)

        return append

    def _dense_and_experts(self, name: str, experts: Mixture, buffers: Mapping[str, str]) -> WritePart:
        of_dense = {**buffers, "up": buffers["dense_up"], "gated": buffers["dense_gated"]}
        dense, mixture = self._feed_forward(name, of_dense), self._mixture(name, experts, buffers, is_routed=True)
        logits = buffers[scores_kind(experts)]
        return lambda source, target, residual: DenseAndExperts.write(name, self, logits, dense, mixture)

    def _mixture(
        self, name: str, experts: Mixture, buffers: Mapping[str, str], *, is_routed: bool = False
    ) -> WritePart:
        """Return what writes a mixture; with `is_routed` its router has computed."""
        scores, correction = buffers[scores_kind(experts)], self._parts.corrections.get(f"{name}.router")
        factors = self._parts.factors.get(f"{name}.router")
        addresses = (None if its is None else self._address(its) for its in (correction, factors))
        data = Experts(
            ups=self._addresses(f"{name}.experts.{e}.ffn_up" for e in range(experts.num_all)),
            downs=self._addresses(f"{name}.experts.{e}.ffn_down" for e in range(experts.num_all)),
            router=self._kept(router_data(experts, *addresses)),
            gate=self._kept(self._gate()) if self._config.gated_ffn else None,
            ends=self._kept((c_int32 * experts.num_all)()),
            num=experts.num,
            num_active=experts.num_active,
            num_shared=experts.num_shared,
            scores=self.program.number(scores),
            **{kind: self.program.number(buffers[kind]) for kind in ("routes", "pairs", "up", "gated")},
        )

        def append(source: str, target: str, residual: str) -> None:
            if not is_routed:
                self.linear(f"{name}.router", source, scores)
            self.program.add("experts", source, target, data, residual=residual)

        return append

    def _gate(self) -> Gate:
        """Return the gate, as `gated` in activation.py defines it."""
        limit = torch.tensor(self._config.ffn_limit or 0.0, dtype=self._dtype).item()  # rounded, as torch clamps
        return Gate(limit, native.ACTIVATIONS.index(self._config.activation))

    def linear(self, name: str, source: str, target: str, residual: str = "") -> None:
        self.program.add("linear", source, target, self._weight(name), residual=residual)

    def _weight(self, name: str) -> native.PackedWeight:
        """Return the weight of a linear, which the program keeps alive."""
        linear = self._parts.linears[name]
        assert isinstance(linear, NativeLinear)
        self.program.keep(linear)
        return linear.weight

    def _addresses(self, names: Iterable[str]) -> int:
        """Return the address of an array of addresses of weights."""
        weights = [addressof(self._weight(name)) for name in names]
        return self._kept((c_void_p * len(weights))(*weights))

    def _kept(self, data: Structure | Array[Any]) -> int:
        """Return the address of data, which the program keeps alive."""
        self.program.keep(data)
        return addressof(data)

    def _norm(
        self, name: str, source: str, target: str, vectors: tuple[int, int, int] | None = None, own: int | None = None
    ) -> None:
        """Normalise whole rows, side by side as many as the weights have numbers, or vectors of a row.

        `vectors` says where the first of those begins, how many there are, and their width.

        `own`, if given, is the number of a vector with weights of its own.
        """
        self._normalise(self._parts.norms[name], source, target, vectors, own)

    def _normalise(
        self,
        norm: model_norm.Norm,
        source: str,
        target: str,
        vectors: tuple[int, int, int] | None = None,
        own: int | None = None,
    ) -> None:
        of_vector = norm.weight if own is None or norm.weight is None else norm.weight[own]
        weight, bias = (None if vector is None else self._address(vector.float()) for vector in (of_vector, norm.bias))
        width = self._widths[source]
        size = width if of_vector is None else len(of_vector)
        place = vectors or (0, width // size, size)
        self.program.add("norm", source, target, Norm(weight, bias, *place, norm.eps, norm.kind == "layernorm"))

    def _address(self, tensor: Tensor) -> int:
        """Return the address of a tensor, which the program keeps alive."""
        assert tensor.is_contiguous() and tensor.device.type == "cpu"
        self.program.keep(tensor)
        return tensor.data_ptr()
