"""Which operations of a layer are Triton kernels on a GPU, and why others are torch's.

Each kernel is compared with torch on the model's own shapes before the weights are loaded: it is compiled on the spot,
for a device that no test has seen. That also compiles what steps need later. ModelRunner and the ranks call
`choose_operations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gptserve.engine.backends.fallback import warn_of_fallback
from gptserve.engine.backends.gpu.device_loss import WITHOUT_TRITON, end_if_lost
from gptserve.engine.backends.gpu.operations import TritonOperations
from gptserve.engine.backends.gpu.selfcheck.proofs import NO_PROOFS, Proofs, proofs_of
from gptserve.engine.model.feed_forward import take_mixture
from gptserve.engine.model.loading import StreamedTensors, bare_norm, take_norm
from gptserve.engine.model.norm import Norm
from gptserve.engine.model.operations import TORCH, Operations
from gptserve.engine.model.rotary import rotary_table, rotate_
from gptserve.weights.config import Experts, ModelConfig
from gptserve.weights.quantized.mxfp4 import MXFP4, held_shapes, unpack
from gptserve.weights.quantized.stored_type import StoredType
from gptserve.weights.stored_tensor import Shape

_ROWS = (2, 150)
"""A decoding step, and a prompt of which an expert has several tiles."""
_IDLE_EXPERTS = 3
"""So many more experts are made than a row chooses: all of a large model's would take gigabytes."""
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 1.2e-2}
"""Of 1 plus the size of an output: torch rounds more often between two products. What is wrong differs by about 1."""

_CODE_SIZE = 4
"""About the root mean square of random 4-bit numbers times random powers of two from 1/2 to 2."""
_INSTEAD = {"mxfp4_experts": "unpacked weights, which take more memory, are"}
"""By the name of a kernel; of all others torch's operation is used."""
_SLOWER = "torch, which is slower, is"

Compute = Callable[[Operations], Tensor]


def choose_operations(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, stored_types: Collection[StoredType]
) -> Operations:
    """Return the fastest operations for this model; warn of each kernel that fails, differs or is missing.

    `stored_types` are those of its weights in the files.
    """
    return TORCH if device.type != "cuda" else agreeing_kernels(model, device, dtype, stored_types, proofs_of(device))


def agreeing_kernels(
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    stored_types: Collection[StoredType] = (),
    proofs: Proofs = NO_PROOFS,
) -> Operations:
    """Return the kernels that compute this model as torch does; with a warning, torch's operations for others.

    Those that are proved to do so are not compared again.
    """
    chosen = TORCH
    for name, compute in _computations(model, device, dtype, MXFP4 in stored_types):
        try:
            kernels = TritonOperations()
            kernel = getattr(kernels.operations(), name)
            found = proofs.disagreement(name, (model, dtype), partial(_compare, compute, name, kernel))
            if name == "mxfp4_experts" and chosen.experts is None:
                found = "torch multiplies with the experts"
        except Exception as error:  # of a compiler, a driver or a GPU that Triton does not know: torch needs none
            end_if_lost(f"the Triton kernel '{name}'", error, WITHOUT_TRITON)
            found = f"it failed with {type(error).__name__}: {error}"
        if found is None:
            chosen = replace(chosen, **{name: kernel}, build=f"{chosen.build or kernels.build} {name}")
        else:
            warn_of_fallback(name, _INSTEAD.get(name, _SLOWER), "a Triton kernel", found)
    return chosen


def _compare(compute: Compute, name: str, kernel: object) -> str | None:
    """Return how an operation of this name differs from torch's, or None."""
    return _disagreement(compute(replace(TORCH, **{name: kernel})), compute(TORCH))  # type: ignore[arg-type]


def _disagreement(out: Tensor, expected: Tensor) -> str | None:
    """Return how they differ, or None."""
    difference = ((out.float() - expected.float()).abs() / (1 + expected.float().abs())).max().item()
    if not difference <= _TOLERANCES[expected.dtype]:  # as where it is NaN
        return f"it differs from torch by {difference:.1e}"
    return None


def _computations(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, in_mxfp4: bool
) -> Iterator[tuple[str, Compute]]:
    """Yield the operations that the model has, by the name of their field, and what they make of random numbers."""
    yield "normalize", lambda operations: _normalize(model, _Numbers(device, dtype), operations)
    if model.norm_placement == "input" and not model.parallel_residual:
        yield "add_normalize", lambda operations: _add_normalize(model, _Numbers(device, dtype), operations)
    if any(layer.rotary for layer in model.layers):
        yield "rotate_and_write", lambda operations: _rotate_and_write(model, _Numbers(device, dtype), operations)
    if model.gated_ffn:
        yield "gate", lambda operations: _gate(model, _Numbers(device, dtype), operations)
    few = _few_experts(model)
    if few:
        yield "experts", lambda operations: _mix_all(model, few, _Numbers(device, dtype), operations, False)
        if in_mxfp4:
            yield "mxfp4_experts", lambda operations: _mix_all(model, few, _Numbers(device, dtype), operations, True)


def _few_experts(model: ModelConfig) -> list[tuple[Experts, int]]:
    """Return the mixtures that layers have, with some of the experts that a row leaves idle, and an expert's width."""
    mixtures = ((layer.experts, layer.ffn_size) for layer in model.distinct_layers)
    return list(
        dict.fromkeys(
            (replace(experts, num=_few(experts)), ffn_size) for experts, ffn_size in mixtures if experts is not None
        )
    )


def _few(experts: Experts) -> int:
    """Return how many experts are made, with some that a row leaves idle: as many in each group."""
    router = experts.router
    num_chosen, num_idle = -(-experts.num_active // router.num_active_groups), -(-_IDLE_EXPERTS // router.num_groups)
    return router.num_groups * min(experts.num // router.num_groups, num_chosen + num_idle)


class _Numbers:
    """Random numbers, the same for each computation."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator, self.dtype = torch.Generator(device).manual_seed(0), dtype

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        numbers = torch.randn(*shape, generator=self._generator, device=self._generator.device)
        return (numbers * scale).to(self.dtype)

    def in_mxfp4(self, blocks: Shape, scales: Shape, size: float) -> tuple[Tensor, Tensor]:
        """Return blocks and scales of these shapes, of numbers of about this size."""
        power = 127 + round(math.log2(size / _CODE_SIZE))

        def draw(low: int, end: int, shape: Shape) -> Tensor:
            generator = self._generator
            return torch.randint(low, end, shape, generator=generator, device=generator.device, dtype=torch.uint8)

        return draw(0, 256, blocks), draw(power - 1, power + 2, scales)


def _normalize(model: ModelConfig, numbers: _Numbers, operations: Operations) -> Tensor:
    """Return rows with and without residuals and, if the model has such norms, heads: views of a projection."""
    norm = _norm(model, model.hidden_size, numbers, operations)
    x, residual = (numbers(_ROWS[0], model.hidden_size) for _ in range(2))
    found = [norm(x + 1), norm(x, residual)]
    if model.qk_norm is not None:
        for num_heads, size in dict.fromkeys((layer.num_heads, layer.head_size) for layer in model.layers):
            heads = numbers(_ROWS[0], num_heads + 1, size)[:, 1:]
            x = heads.flatten(1) if model.qk_norm == "projection" else heads
            own_size = size if model.qk_norm == "own" else None
            width = num_heads * size if own_size else x.shape[-1]
            found.append(_norm(model, width, numbers, operations, own_size)(x))
            if model.v_norm:
                found.append(bare_norm(model, StreamedTensors(iter(()), operations=operations), "norm")(heads))
    return torch.cat([y.flatten() for y in found])


def _add_normalize(model: ModelConfig, numbers: _Numbers, operations: Operations) -> Tensor:
    norm = _norm(model, model.hidden_size, numbers, operations)
    x, term = (numbers(_ROWS[0], model.hidden_size) for _ in range(2))
    if operations.add_normalize is None:
        return torch.cat([x + term, norm(x + term)])
    return torch.cat(operations.add_normalize(x, term, norm))


def _rotate_and_write(model: ModelConfig, numbers: _Numbers, operations: Operations) -> Tensor:
    """Return the queries and the cache of two blocks, for each rotary and its heads; one row is padding."""
    position, block_size = 100, 16
    found = []
    shapes = dict.fromkeys(
        (layer.rotary, layer.num_heads, layer.num_kv_heads, layer.head_size) for layer in model.layers if layer.rotary
    )
    for rotary, num_heads, num_kv_heads, head_size in shapes:
        heads = numbers(3, num_heads + 2 * num_kv_heads, head_size)
        cache = torch.zeros(2, 2, num_kv_heads, block_size, head_size, dtype=numbers.dtype, device=heads.device)
        slots = torch.tensor([block_size + 1, 3, -1], device=heads.device)
        rotation = rotary_table(rotary, position + 3, heads.device)[position:].unbind(1)
        if operations.rotate_and_write is not None:
            operations.rotate_and_write(heads, rotation, cache, slots)
        else:
            rotate_(heads[:, :-num_kv_heads], rotation)
            pair = heads[:, num_heads:].split_with_sizes((num_kv_heads, num_kv_heads), 1)
            for x_NGBD, x_TGD in zip(cache, pair, strict=True):
                x_NGBD[slots[:2] // block_size, :, slots[:2] % block_size] = x_TGD[:2]
        found += [heads[:, :num_heads].flatten(), cache.flatten()]
    return torch.cat(found)


def _norm(
    model: ModelConfig, width: int, numbers: _Numbers, operations: Operations, own_size: int | None = None
) -> Norm:
    tensors = ((f"norm.{kind}", numbers(width)) for kind in ("weight", "bias"))
    return take_norm(model, StreamedTensors(tensors, operations=operations), "norm", own_size=own_size)


def _gate(model: ModelConfig, numbers: _Numbers, operations: Operations) -> Tensor:
    widths = dict.fromkeys(width for layer in model.layers for width in (layer.ffn_size, layer.dense_size) if width)
    inputs = [numbers(_ROWS[0], 2 * width, scale=3) for width in widths]
    return torch.cat([operations.gate(x, model.activation, model.ffn_limit).flatten() for x in inputs])


def _mix_all(
    model: ModelConfig, mixtures: list[tuple[Experts, int]], numbers: _Numbers, operations: Operations, in_mxfp4: bool
) -> Tensor:
    return torch.cat([_mix(model, *mixture, numbers, operations, in_mxfp4) for mixture in mixtures])


def _mix(
    model: ModelConfig, experts: Experts, ffn: int, numbers: _Numbers, operations: Operations, in_mxfp4: bool
) -> Tensor:
    """Return the output of a mixture of random experts, each as large as the model's."""
    products = operations.mxfp4_experts

    def tensors() -> Iterator[tuple[str, Tensor]]:
        hidden = model.hidden_size
        linears = {"router": (experts.num_logits, hidden)}
        for e in range(experts.num_all):
            linears[f"experts.{e}.ffn_up"] = (ffn * (1 + model.gated_ffn), hidden)
            linears[f"experts.{e}.ffn_down"] = (hidden, ffn)
        for name, (num_out, num_in) in linears.items():
            shapes = held_shapes((num_out, num_in)) if in_mxfp4 and name != "router" else None
            if shapes is None:
                yield f"block.{name}.weight", numbers(num_out, num_in, scale=num_in**-0.5)
            else:
                blocks, scales = numbers.in_mxfp4(*shapes, num_in**-0.5)
                if products is None:
                    yield f"block.{name}.weight", unpack(blocks, scales, numbers.dtype).mT.contiguous()
                else:
                    yield f"block.{name}.weight", blocks
                    yield f"block.{name}.scales", scales
            if model.ffn_bias:
                yield f"block.{name}.bias", numbers(num_out)
            if name == "router" and experts.router.has_correction:
                yield "block.router.correction", numbers(experts.num).float()
            if name == "router" and experts.router.has_factors:
                yield "block.router.factors", numbers(experts.num).float()

    if products is not None:
        operations = replace(operations, experts=products)
    source = StreamedTensors(tensors(), operations=operations)
    mixture = take_mixture(model, experts, source, "block")
    rows = [(numbers(num, model.hidden_size), numbers(num, model.hidden_size)) for num in _ROWS]
    alone = mixture(rows[0][0])  # as where the next norm adds the residual
    return torch.cat([alone, *(mixture(x, residual) for x, residual in rows)])
