"""Attention on the CPU: the compiled kernel of csrc/attention.cpp, called through ctypes.

This file packs pointers and sizes, and checks what the kernel does not check. The arithmetic is in attention_kernel.h.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from ctypes import Array, Structure, addressof, byref, c_int64, c_void_p
from struct import Struct
from typing import Literal

import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.program import Attend
from gptserve.engine.model.attention import AttentionMetadata, AttentionSpec
from gptserve.engine.model.kv_rows import row_size

Instructions = Literal["generic", "avx2", "avx512", "avx512_bf16"]

INSTRUCTIONS: tuple[Instructions, ...] = ("generic", "avx2", "avx512", "avx512_bf16")
"""The index is the kernel's number. A CPU that supports one supports those before it."""
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)


class CpuAttention:
    """The AttentionBackend for fp32 and bf16 models on a CPU, also with a cache in int8; head sizes are multiples of 8.

    The bits of a row depend only on its own tokens, as AttentionBackend requires, and not on the number of threads.
    They may differ between instruction sets. Only one thread at a time may use an instance.
    """

    name = "cpu"

    def __init__(self, instructions: Instructions | None = None) -> None:
        """Load the kernel. `instructions` is one of supported_instructions(); None means the fastest."""
        assert native.is_available(), "CpuAttention needs is_available()"
        library = self._library = native.library()
        fastest = library.native_fastest_instructions()
        self._instructions = fastest if instructions is None else INSTRUCTIONS.index(instructions)
        assert self._instructions <= library.native_best_instructions(), f"this CPU has no {instructions}"
        self.build = f"{INSTRUCTIONS[self._instructions]} {native.digest()}"
        self._scratch = torch.empty(0, 0)
        self._reserved = _NONE
        self._metadata: AttentionMetadata | None = None
        self._batch = _Batch()
        self._layers: list[Tensor] = []
        self._caches: list[_Cache] = []
        self._widest = _Cache()
        self._addresses = (c_void_p * 0)()

    @staticmethod
    def is_available() -> bool:
        """Return whether the library is built and loads."""
        return native.is_available()

    @staticmethod
    def supported_instructions() -> tuple[Instructions, ...]:
        """Return the instruction sets of this CPU, the best last; none without the kernel."""
        return INSTRUCTIONS[: native.library().native_best_instructions() + 1] if native.is_available() else ()

    def scratch_bytes(self, max_model_len: int, head_size: int, num_threads: int) -> int:
        """Return the bytes of the scratch after computing a sequence of this length."""
        return num_threads * self._scratch_floats(max_model_len, head_size) * torch.float32.itemsize

    def write(self, key_TGD: Tensor, value_TGD: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata) -> None:
        """Store key and value, which may be strided views of one projection."""
        cache = _describe(cache_2NGBD)
        batch = self._pack(metadata, cache)
        _check_rows(key_TGD, cache_2NGBD, batch)
        _check_rows(value_TGD, cache_2NGBD, batch)
        assert key_TGD.shape[1] == value_TGD.shape[1] == cache.num_kv_heads
        token_stride = key_TGD.stride(0)
        assert value_TGD.stride(0) == token_stride
        rows = key_TGD.data_ptr(), value_TGD.data_ptr(), token_stride, key_TGD.element_size()
        self._library.native_write(byref(batch), byref(cache), *rows)

    def attend(
        self, query_THD: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Return attention as [T, H, D], contiguous; the query may be a strided view."""
        cache = _describe(cache_2NGBD)
        batch = self._pack(metadata, cache)
        _check_rows(query_THD, cache_2NGBD, batch)
        assert query_THD.shape[1] == spec.num_heads and spec.num_heads % spec.num_kv_heads == 0
        assert cache.num_kv_heads == spec.num_kv_heads and cache.head_size == spec.head_size
        out_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        self._library.native_attend(
            byref(batch),
            byref(cache),
            query_THD.data_ptr(),
            query_THD.stride(0),
            out_THD.data_ptr(),
            out_THD.element_size(),
            spec.num_heads,
            spec.scale,
            spec.window or 0,
            _per_head(spec.alibi_slopes, spec),
            _per_head(spec.sinks, spec),
            spec.softcap or 0,
            self._instructions,
        )
        return out_THD

    def operation(self, spec: AttentionSpec, layer: int) -> Attend:
        """Return `write` and `attend` of a layer as data of a program, which gets `step_data` at each run.

        A layer that reads the keys of another one does not write.
        """
        key, writes = spec.num_heads * spec.head_size, not spec.reads_other
        return Attend(
            *(_per_head(spec.alibi_slopes, spec), _per_head(spec.sinks, spec)),
            *(layer, key, key + spec.num_kv_heads * spec.head_size, spec.num_heads, spec.window or 0, writes),
            *(spec.scale, spec.softcap or 0, self._instructions),
        )

    def step_data(
        self,
        layers: list[Tensor],
        starts_S1: array[int],
        lens_S: array[int],
        tables_SN: array[int],
        slots_T: array[int],
    ) -> tuple[Structure, Array[c_void_p]]:
        """Return the step's Batch and the addresses of all layers' Caches; both are valid until the next call.

        The arrays have the numbers of AttentionMetadata; the caller keeps them alive until the next call. It calls
        nothing of torch but where scratch grows, for program_steps.py.
        """
        addresses = self._addresses_of(layers)
        num_seqs, max_kv_len, cache = len(lens_S), max(lens_S), self._widest
        assert len(starts_S1) == num_seqs + 1 and len(tables_SN) % num_seqs == 0
        sizes, num_threads = (len(tables_SN) // num_seqs, num_seqs, len(slots_T)), native.num_threads()
        arrays = [numbers.buffer_info()[0] for numbers in (starts_S1, lens_S, tables_SN, slots_T)]
        self._fill(arrays, sizes, max_kv_len, cache, num_threads)
        return self._batch, addresses

    def _addresses_of(self, layers: list[Tensor]) -> Array[c_void_p]:
        if layers is not self._layers:
            self._layers, self._caches = layers, [_describe(cache_2NGBD) for cache_2NGBD in layers]
            self._addresses = (c_void_p * len(layers))(*map(addressof, self._caches))
            self._widest = max(self._caches, key=lambda cache: cache.head_size)  # scratch is large enough for all
        return self._addresses

    def _pack(self, metadata: AttentionMetadata, cache: _Cache) -> _Batch:
        """Return the metadata in the kernel's format, with scratch for heads of this cache.

        It is packed once a step, as all layers share one metadata, or once more if a later layer's heads are larger.
        """
        num_threads = native.num_threads()
        is_packed = metadata is self._metadata and num_threads == self._batch.num_threads
        if is_packed and cache.head_size <= self._reserved[2]:
            return self._batch
        starts_S1, lens_S = metadata.query_starts_S1, metadata.kv_lens_S
        tables_SN, slots_T = metadata.block_tables_SN, metadata.slots_T
        for ints in (starts_S1, lens_S, tables_SN):
            assert ints.dtype is torch.int32 and ints.is_contiguous() and ints.device.type == "cpu"
        assert slots_T.dtype is torch.int64 and slots_T.is_contiguous() and slots_T.device.type == "cpu"
        assert len(starts_S1) == len(lens_S) + 1 == len(tables_SN) + 1
        arrays = [tensor.data_ptr() for tensor in (starts_S1, lens_S, tables_SN, slots_T)]
        sizes = tables_SN.shape[1], len(lens_S), len(slots_T)
        self._fill(arrays, sizes, max(metadata.kv_lens, default=0), cache, num_threads)
        self._metadata = metadata
        return self._batch

    def _fill(
        self, arrays: Iterable[int], sizes: tuple[int, int, int], max_kv_len: int, cache: _Cache, num_threads: int
    ) -> None:
        """Make the Batch of arrays at these addresses, of these sizes, in the order of its members."""
        assert sizes[0] * cache.block_size >= max_kv_len
        self._metadata = None
        scratch = self._reserve(max_kv_len, cache.head_size, num_threads)
        _BATCH.pack_into(self._batch, 0, *arrays, *sizes, *scratch, max_kv_len, num_threads)

    def _reserve(self, max_kv_len: int, head_size: int, num_threads: int) -> tuple[int, int]:
        """Make scratch at least as large as needed; return its address and a thread's floats."""
        threads, positions, size, place = self._reserved
        if num_threads > threads or max_kv_len > positions or head_size > size:
            threads, size = max(threads, num_threads), max(size, head_size)
            positions = max(positions, _next_power(max_kv_len))
            self._reserved, self._scratch = _NONE, torch.empty(0, 0)  # frees it before the new one is allocated
            self._scratch = torch.empty(threads, self._scratch_floats(positions, size))
            place = self._scratch.data_ptr(), self._scratch.shape[1]
            self._reserved = threads, positions, size, place
        return place

    def _scratch_floats(self, max_kv_len: int, head_size: int) -> int:
        """Return a thread's scratch for the next power of two of positions, so that it seldom grows."""
        floats: int = self._library.native_scratch_floats(_next_power(max_kv_len), head_size)
        return floats


class _Batch(Structure):
    """AttentionBatch of csrc/attention.h."""

    _fields_ = native.members(
        (c_void_p, "query_starts kv_lens block_tables slots"),
        (c_int64, "table_stride num_seqs num_tokens"),
        (c_void_p, "scratch"),
        (c_int64, "scratch_stride max_kv_len num_threads"),
    )


_NONE = 0, 0, 0, (0, 0)
"""Threads, positions and head size that a scratch is large enough for, then its address and a thread's floats."""
_BATCH = Struct("4P3qP3q")
"""The members of a _Batch, which it writes at once and faster than ctypes."""


class _Cache(Structure):
    """AttentionCache of csrc/attention.h."""

    _fields_ = native.members(
        (c_void_p, "data"), (c_int64, "num_blocks num_kv_heads block_size head_size element_size")
    )


def _next_power(num: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, num - 1).bit_length()


def _describe(cache_2NGBD: Tensor) -> _Cache:
    assert cache_2NGBD.dtype in (*SUPPORTED_DTYPES, torch.int8)
    assert cache_2NGBD.is_contiguous() and cache_2NGBD.device.type == "cpu"
    (two, *shape, size), element_size = cache_2NGBD.shape, cache_2NGBD.element_size()
    head_size = size - row_size(0, element_size)
    assert two == 2 and head_size % 8 == 0
    return _Cache(cache_2NGBD.data_ptr(), *shape, head_size, element_size)


def _check_rows(rows_TXD: Tensor, cache_2NGBD: Tensor, batch: _Batch) -> None:
    """Assert that a query, key or value has the kernel's layout; only the token stride is free."""
    num_tokens, _, head_size = rows_TXD.shape
    assert cache_2NGBD.dtype in (rows_TXD.dtype, torch.int8)
    assert rows_TXD.dtype in SUPPORTED_DTYPES and rows_TXD.device.type == "cpu"
    assert num_tokens == batch.num_tokens and row_size(head_size, cache_2NGBD.element_size()) == cache_2NGBD.shape[4]
    assert rows_TXD.stride()[1:] == (head_size, 1)


def _per_head(floats_H: Tensor | None, spec: AttentionSpec) -> int | None:
    """Return the address of one float for each query head."""
    if floats_H is None:
        return None
    assert floats_H.dtype is torch.float32 and floats_H.is_contiguous() and floats_H.device.type == "cpu"
    assert floats_H.shape == (spec.num_heads,)
    return floats_H.data_ptr()
