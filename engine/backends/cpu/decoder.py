"""The decoder as a program of engine/backends/cpu, which computes a step in one call, from token ids to logits.

It computes what decoder.py and layers.py define, with the same weights, without Python between the operations; the
order of a block's norms, parts and sums stands in layers.py, beside torch's. In bf16 it rounds where they do, but keeps
the residual stream in fp32. If all weights are integers, it also keeps in fp32 what norms and activations return:
products of integers quantize it anyway. Where no program can compute a model, `native_decoder` returns None, and those
two files compute it.
Decoder and program_steps.py call it. Shape letters as in engine/model/attention.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from ctypes import Array, Structure, addressof, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.cpu.buffers import buffer_name, buffer_widths, layer_widths, scores_kind, wide_kinds
from gptserve.engine.backends.cpu.draw import LogitsAt
from gptserve.engine.backends.cpu.linear import NativeLinear, PackedRows
from gptserve.engine.backends.cpu.obstacle import find_obstacle
from gptserve.engine.backends.cpu.program import HEAD_GATES, Experts, Gate, Norm, Program, Rotation, Table, router_data
from gptserve.engine.backends.fallback import warn_of_fallback
from gptserve.engine.model.activation import soft_cap
from gptserve.engine.model.attention import AttentionBackend, Cache
from gptserve.engine.model.feed_forward import DenseAndExperts
from gptserve.engine.model.layer_inputs import LayerInputs
from gptserve.engine.model.layers import Block
from gptserve.engine.model.layout import StepArrays
from gptserve.engine.model.linear import Rows
from gptserve.engine.model.loading import StreamedTensors
from gptserve.engine.model.operations import WritePart
from gptserve.engine.model.rotary import rotations_of
from gptserve.weights.config import Experts as Mixture
from gptserve.weights.config import ModelConfig
from gptserve.weights.torch_threads import torch_threads

logger = logging.getLogger(__name__)


def native_decoder(
    config: ModelConfig,
    parts: StreamedTensors,
    embedding: Rows,
    positions: Tensor | None,
    tables: list[Tensor | None],
    backend: AttentionBackend,
) -> NativeDecoder | None:
    """Return a decoder that runs programs, or None if none can compute this model.

    `parts` has made all linears and norms. `positions` is the table that is added to the embedding; `tables` has the
    rotary table of each layer.
    """
    obstacle = find_obstacle(config, parts, backend)
    if parts.group is not None and obstacle is None:
        warn_of_fallback("decoder", "'torch', which is slower, is", "'program'", "a program has no ranks")
        return None
    if obstacle is not None:
        logger.debug("decoder: torch runs the operations of a step, not a program: %s", obstacle)
        return None
    assert isinstance(backend, CpuAttention)
    dtype = embedding.dtype
    widths = buffer_widths(config, dtype)
    kinds = wide_kinds(parts)
    wide = tuple(name for name in (*widths, "logits") if name.partition(" ")[0] in kinds)
    step, head = (_Writer(config, parts, {**widths, "logits": config.vocab_size}, dtype, wide) for _ in range(2))
    step.begin(embedding, positions)
    for layer, rotations in enumerate(rotations_of(tables)):
        step.block(layer, rotations, backend)
    step.program.add("take", "x", "taken")
    for writer in (step, head):
        writer.head()
    dtypes = {name: torch.float32 if name in wide else dtype for name in widths}
    sizes = config.vocab_size, config.logit_softcap
    return NativeDecoder(widths, dtypes, *sizes, step.program, head.program, backend)


class NativeDecoder:
    """The program of a model's steps and that of its head alone, with their buffers; for one thread at a time."""

    def __init__(
        self,
        widths: dict[str, int],
        dtypes: dict[str, torch.dtype],
        vocab_size: int,
        softcap: float | None,
        step: Program,
        head: Program,
        backend: CpuAttention,
    ) -> None:
        self._widths, self._dtypes, self._vocab_size, self._softcap = widths, dtypes, vocab_size, softcap
        self._step, self._head, self._backend = step, head, backend
        self._buffers: dict[str, Tensor] = {}
        self._num_rows = self._num_logits = 0
        self._logits, self._logits_at = torch.empty(0), LogitsAt(0, vocab_size, vocab_size)
        """What `run` has computed; room for _num_logits rows."""

    def run(self, arrays: StepArrays, cache: Cache) -> LogitsAt:
        """Compute a step; return where the logits of its sampled rows lie, valid until the next call.

        It calls nothing of torch, for program_steps.py, but where its buffers grow and for a soft cap.
        """
        token_ids, positions, sampled, *of_attention = arrays
        num_rows, num_sampled = len(token_ids), len(sampled)
        self._reserve(num_rows)
        if num_sampled > self._num_logits:
            self._num_logits, self._logits = 0, torch.empty(0)  # frees the old ones first
            self._logits = torch.empty(num_sampled, self._vocab_size)
            self._num_logits, self._logits_at = num_sampled, LogitsAt.of(self._logits)
        self._step.place("logits", self._logits_at.address)
        batch, caches = self._backend.step_data(cache.layers, *of_attention)
        of_tokens, taken = (token_ids.buffer_info()[0], positions.buffer_info()[0]), sampled.buffer_info()[0]
        self._step.run(num_rows, *of_tokens, batch, caches, num_sampled, taken)
        if self._softcap is not None:
            _cap(self._logits[:num_sampled], self._softcap)
        return self._logits_at

    def sampled_logits(self, num_rows: int) -> Tensor:
        """Return the logits of the latest `run` as a tensor [num_rows, vocab_size], valid until the next one."""
        return self._logits[:num_rows]

    def hidden_states(self, num_rows: int) -> Tensor:
        """Return the last block's output of the latest `run`, fp32 [num_rows, hidden], valid until the next one."""
        return self._buffers["x"][:num_rows]

    def logits(self, rows: slice) -> Tensor:
        """Return the fp32 logits [rows, vocab_size] of consecutive rows of the latest `run`."""
        hidden = self._buffers["x"][rows]
        logits = torch.empty(len(hidden), self._vocab_size)
        self._head.place("logits", logits.data_ptr())
        self._head.place("taken", hidden.data_ptr())
        self._head.run(len(hidden))
        if self._softcap is not None:
            _cap(logits, self._softcap)
        return logits

    def _reserve(self, num_rows: int) -> None:
        """Make the buffers at least this many rows long; to the next power of two, so that they seldom grow."""
        if num_rows <= self._num_rows:
            return
        self._num_rows, self._buffers = 0, {}  # frees the old ones before the new ones are allocated
        size = 1 << (num_rows - 1).bit_length()
        for name, width in self._widths.items():
            buffer = self._buffers[name] = torch.empty(size, width, dtype=self._dtypes[name])
            self._step.place(name, buffer.data_ptr())
            self._head.place(name, buffer.data_ptr())
        self._num_rows = size


@torch.inference_mode()
def _cap(logits: Tensor, cap: float) -> None:
    """Cap the logits in place, on one thread: those of torch's pool would spin in the way of the library's team."""
    with torch_threads(1):
        logits.copy_(soft_cap(logits, cap))


class _Writer:
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
        attention, buffers = self._attention(number, rotations, backend), self._buffers[layer]
        if layer.experts is None:
            ffn = self._feed_forward(name, buffers)
        elif layer.dense_size is None:
            ffn = self._mixture(name, layer.experts, buffers)
        else:
            ffn = self._dense_and_experts(name, layer.experts, buffers)
        Block.write(self._config, number, self, attention, ffn)

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

    def _embed(self, target: str, rows: Rows, scale: float) -> None:
        if isinstance(rows, PackedRows):
            self.program.keep(rows.linear)
            table = Table(rows.address, scale, rows.kind)
        else:
            assert isinstance(rows, Tensor)
            table = Table(self._address(rows), scale)
        self.program.add("embed", target, target, table)

    def multiply(self, target: str, factors: str, first: int) -> None:
        self.program.add("multiply", factors, target, c_int64(first))

    def scale(self, name: str, target: str) -> None:
        self.program.add("scale", target, target, c_float(self._parts.scales[name]))

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

    def _feed_forward(self, name: str, buffers: Mapping[str, str]) -> WritePart:
        def append(source: str, target: str, residual: str) -> None:
            hidden = buffers["up"]
            self.linear(f"{name}.ffn_up", source, hidden)
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
        norm = self._parts.norms[name]
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
