"""The Triton kernels of the engine, compiled to machine code for a GPU that need not be there.

The engine's own launches are compiled instead of run, by the compiler that Triton brings. So they have the arguments,
tiles and options that the engine chose. A row of the table is printed for each: shared memory, registers of a thread
and the bytes that it spills.

    python -m tests.engine.backends.gpu.compiled_kernels 90 [few] [PART ...]

compiles for compute capability 9.0, all or some of PARTS; with `few` one launch of each kernel.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any, get_args

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from gptserve.engine.backends.gpu.attention import TritonAttention
from gptserve.engine.backends.gpu.operations import TritonOperations
from gptserve.engine.backends.gpu.sampler import TritonSampler
from gptserve.engine.model.attention import AttentionMetadata, AttentionSpec
from gptserve.engine.model.experts import Routing
from gptserve.engine.model.norm import Norm
from gptserve.engine.sampling.adjustments import Adjustment
from gptserve.engine.sampling.choice import Choice
from gptserve.engine.sampling.token_counts import TokenCounts, TokensBefore
from gptserve.weights.config import Activation

SMALLEST_SHARED_BYTES = 99 << 10
"""What a program may have at most on the GPUs of capability 8.6, 8.9 and 12.0; others have more."""

CPU = torch.device("cpu")
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
HEAD_SIZES = (128, 64, 80, 256, 512)


@dataclass(frozen=True)
class Device:
    """What Triton asks a driver for before it compiles."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Compiles launches, one of each kernel if `few`, and writes a row of the table for each."""

    def __init__(self, few: bool) -> None:
        self.case, self.too_large = "", list[str]()
        self._few, self._compiled = few, set[str]()

    def take(self, part: Any) -> None:
        """Compile what this part of the engine launches from now on."""
        vars(part).update(_kernels=Kernels(part._kernels, self))

    def compile(self, name: str, kernel: Any, *args: Any, **options: Any) -> None:
        if self._few and name in self._compiled:
            return
        self._compiled.add(name)
        with contextlib.redirect_stdout(io.StringIO()) as log:
            shared = kernel.run(*args, warmup=True, **options).metadata.shared
        used = re.search(r"(\d+) bytes spill stores.*Used (\d+) registers", log.getvalue(), re.DOTALL)
        if used is None:
            return  # compiled before
        row = f"{name:16} {self.case:40} {shared:6} {used[2]:>9} {used[1]:>7}"
        sys.stdout.write(f"{row}\n")
        if shared > SMALLEST_SHARED_BYTES:
            self.too_large.append(row)


@dataclass(frozen=True)
class Kernels:
    """Stands in for a module of kernels."""

    module: ModuleType
    compiler: Compiler

    def __getattr__(self, name: str) -> Launches:
        return Launches(self, name)


@dataclass(frozen=True)
class Launches:
    """Stands in for a kernel: takes a grid, and then what it is launched with."""

    kernels: Kernels
    name: str

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        kernel = getattr(self.kernels.module, self.name)
        return partial(self.kernels.compiler.compile, self.name, kernel, grid=grid)


def attend(compiler: Compiler, dtype: torch.dtype, head_size: int, *, has_all: bool) -> None:
    """Launch what a layer of few rows and one of many do, with every feature or with none."""
    heads, kv_heads, context = 32, 8, 4096
    slopes, sinks = (torch.ones(heads), torch.ones(heads)) if has_all else (None, None)
    window, softcap = (1000, 50.0) if has_all else (None, None)
    spec = AttentionSpec(heads, kv_heads, head_size, head_size**-0.5, window, slopes, sinks, softcap)
    cache = torch.empty(2, 3, kv_heads, 16, head_size, dtype=dtype)
    backend = TritonAttention(exact=False)
    compiler.take(backend)
    for num_rows in (1, 2, 300):
        compiler.case = f"{dtype} {head_size} {num_rows} rows{', all features' if has_all else ''}"
        metadata = AttentionMetadata(
            *((0, num_rows), (context,), torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)),
            *(torch.zeros(1, context // 16, dtype=torch.int32), torch.zeros(num_rows, dtype=torch.int64)),
        )
        qkv = torch.empty(num_rows, heads + 2 * kv_heads, head_size, dtype=dtype)
        query, key, value = qkv.split([heads, kv_heads, kv_heads], 1)
        backend.write(key, value, cache, metadata)
        backend.attend(query, cache, metadata, spec)


def normalize(kernels: TritonOperations, dtype: torch.dtype, width: int) -> None:
    x, weight = torch.empty(3, width, dtype=dtype), torch.empty(width, dtype=dtype)
    rms, layer = Norm("rmsnorm", weight, None, 1e-5), Norm("layernorm", weight, weight, 1e-5)
    for norm in (rms, layer):
        kernels.add_normalize(x, x, norm)
        kernels.normalize(x, norm)
        kernels.normalize(x, norm, x)
    kernels.normalize(x.view(3, 2, -1), Norm("rmsnorm", weight[: width // 2], None, 1e-5))
    kernels.normalize(x.view(3, 2, -1), Norm("layernorm", weight.view(2, -1), None, 1e-5))


def rotate(kernels: TritonOperations, dtype: torch.dtype, head_size: int, num_pairs: int) -> None:
    heads = torch.empty(2, 32 + 2 * 8, head_size, dtype=dtype)
    cache, rotation = torch.empty(2, 3, 8, 16, head_size, dtype=dtype), torch.empty(2, 2, 1, num_pairs).unbind(1)
    kernels.rotate_and_write(heads, rotation, cache, torch.zeros(2, dtype=torch.int64))


def mix(kernels: TritonOperations, dtype: torch.dtype) -> None:
    """Launch the products and the sum of experts of gpt-oss's shapes, also of a rank of eight."""
    hidden, experts, pairs = 2880, 3, 8
    x, residual = torch.empty(2, hidden, dtype=dtype), torch.empty(2, hidden, dtype=dtype)
    routing = Routing(torch.zeros(pairs, dtype=torch.int64), torch.zeros(experts + 1, dtype=torch.int32))
    bias = torch.empty(experts, 2 * hidden, dtype=dtype)
    kernels.multiply(x, torch.empty(experts, 2 * hidden, hidden, dtype=dtype), bias, routing)
    of_128 = Routing(routing.pairs_P, torch.zeros(128 + 1, dtype=torch.int32))  # what the largest one has
    kernels.multiply(x, torch.empty(128, 32, hidden, dtype=dtype), torch.empty(128, 32, dtype=dtype), of_128)
    for num_out, num_in, group, out_dtype in ((2 * hidden, hidden, 32, None), (hidden, 360, 8, FP32)):
        scales = torch.empty(experts, num_out, num_in // group, dtype=torch.uint8)
        blocks = torch.empty(*scales.shape, group // 2, dtype=torch.uint8)
        its_x = torch.empty(pairs, num_in, dtype=dtype)
        kernels.multiply(its_x, blocks, bias[:, :num_out], routing, out_dtype, scales)
    for its_residual in (None, residual):
        kernels.sum(torch.empty(pairs, hidden), torch.empty(2, 4), its_residual, dtype)


def sample(compiler: Compiler, vocab_size: int) -> None:
    """Launch every kind of draw, with penalties, with masks and with both."""
    sampler = TritonSampler(vocab_size, 12, CPU)
    compiler.take(sampler)
    counted = TokensBefore(TokenCounts(1), [1, 2])
    penalties = Adjustment(1.3, 0.5, 0.0, counted, array("q"), array("f"), array("q"))
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    choices = [Choice(), Choice(top_p=0.5), Choice(top_k=3)]
    adjusted = [Choice(adjustment=penalties), Choice(allowed=mask), Choice(adjustment=penalties, allowed=mask)]
    for choice in (*choices, *adjusted):
        sampler.choose(torch.zeros(1, vocab_size), [choice])


def launch_attention(compiler: Compiler, dtype: torch.dtype, head_sizes: Sequence[int] = HEAD_SIZES) -> None:
    for head_size in head_sizes:
        for has_all in (False, True):
            attend(compiler, dtype, head_size, has_all=has_all)


def launch_operations(compiler: Compiler) -> None:
    kernels = TritonOperations()
    compiler.take(kernels)
    for dtype in (BF16, FP32, FP16):
        for width in (4096, 768, 16384):
            compiler.case = f"{dtype} {width}"
            normalize(kernels, dtype, width)
        for head_size, num_pairs in ((128, 64), (64, 32), (80, 16), (256, 32), (512, 256)):
            compiler.case = f"{dtype} {num_pairs} pairs of {head_size}"
            rotate(kernels, dtype, head_size, num_pairs)
        for activation, limit in product(get_args(Activation), (None, 7.0)):
            compiler.case = f"{dtype} {activation} {limit or ''}"
            kernels.gate(torch.empty(2, 2 * 3000, dtype=dtype), activation, limit)
        compiler.case = str(dtype)
        mix(kernels, dtype)


def launch_sampler(compiler: Compiler) -> None:
    for vocab_size in (128256, 50257):
        compiler.case = f"{vocab_size} tokens"
        sample(compiler, vocab_size)


PARTS: dict[str, Callable[[Compiler], None]] = {
    "attention-bf16": partial(launch_attention, dtype=BF16),
    "attention-fp32": partial(launch_attention, dtype=FP32),
    "attention-fp16": partial(launch_attention, dtype=FP16, head_sizes=HEAD_SIZES[:1]),
    "operations": launch_operations,
    "sampler": launch_sampler,
}


def main(capability: int, parts: Sequence[str], *, few: bool) -> None:
    """Compile for this capability; fail where a launch needs more shared memory than the smallest GPU has."""
    assert not triton.knobs.runtime.interpret
    triton.knobs.nvidia.dump_ptxas_log = True
    driver.set_active(Device(capability))
    compiler = Compiler(few)
    sys.stdout.write(f"{'kernel':16} {'case':40} shared registers spilled\n")
    for part in parts:
        PARTS[part](compiler)
    assert not compiler.too_large, f"more than {SMALLEST_SHARED_BYTES} bytes of shared memory: {compiler.too_large}"


if __name__ == "__main__":
    asked = sys.argv[2:]
    main(int(sys.argv[1]), [name for name in asked if name != "few"] or [*PARTS], few="few" in asked)
