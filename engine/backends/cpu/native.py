"""The compiled parts of a step on a CPU: programs, products, attention, draws, logprobs, and their team of threads.

This file opens the library and mirrors its structures. The installation builds it if there is a C++ compiler. Without
it the supported variants are none and callers use what torch has. Torch-free: callers pass addresses.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_bool, c_float, c_int, c_int32, c_int64, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from gptserve.weights.quantized.coded import CodeFormat

logger = logging.getLogger(__name__)

Variant = Literal["generic", "avx2", "avx512", "avx512_bf16", "avx_vnni", "avx512_vnni", "amx"]

ABI = 38
"""native_abi() of the version that `PackedWeight` and the structures of program.py mirror."""
VARIANTS: dict[int, tuple[Variant, ...]] = {
    32: ("generic", "avx2", "avx512"),
    16: ("generic", "avx2", "avx512", "avx512_bf16", "amx"),
    4: ("generic", "avx2", "avx_vnni", "avx512_vnni"),
}
"""Of products by the bits of a weight's element: fp32 and bf16; 4 stands for codes in groups. The library's number of a
variant is its index plus 1. Those of codes give the same bits, but for the activations of "generic"."""
COLUMNS = 32
"""What belongs to the outputs is padded to a multiple of this many."""
WIDE_OUT, WIDE_X, WIDE_RESIDUAL = 1, 2, 4
"""Of native_multiply's last argument: which of the result, x and the residual are in fp32."""
PACKED_ROWS, CODED_ROWS = 1, 2
"""Kinds of a Table whose rows are those of a linear."""
ACTIVATIONS = (None, "gelu", "gelu_tanh", "gelu_sigmoid", "relu", "relu2", "silu", "tanh")
"""The index is the library's number."""
CODE_FORMATS = (
    *(CodeFormat(bits, kind) for bits in (4, 8) for kind in ("scales", "scales and leasts", "scales and zeros")),
    *(CodeFormat(5, kind) for kind in ("scales", "scales and leasts")),
    *(CodeFormat(bits, "scales and leasts", 32) for bits in (4, 5)),
    CodeFormat(6, "scales", 16),
    *(CodeFormat(4, "scales", sub_group, has_table=True) for sub_group in (0, 32)),
)
"""Those that products take. The index is the library's number."""
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""GGUF's types that are packed as their blocks lie. The index is the library's number."""
CODED_VARIANTS = 4
"""The key of VARIANTS for codes in groups."""
ROW_MULTIPLE = 32
"""Rows of x are padded with zeros to a multiple of this many elements."""


def members(*declarations: tuple[type[Any], str]) -> list[tuple[str, type[Any]]]:
    """Return the _fields_ of a Structure from declarations as in C: a type and the names of members of that type."""
    return [(name, kind) for kind, names in declarations for name in names.split()]


class CodedRows(Structure):
    """CodedRows of linear.h."""

    _fields_ = members((c_void_p, "weight"), (c_int64, "panel format"))


class NumbersOfCodes(Structure):
    """NumbersOfCodes of groups.h."""

    _fields_ = members((c_void_p, "codes scales others sub_scales sub_leasts"))


class PackedWeight(Structure):
    """Linear of linear.h."""

    _fields_ = members(
        (c_void_p, "weight bias"),
        (c_int64, "num_in num_out"),
        (c_int32, "activation variant element_bits num_parts"),
        (POINTER(CodedRows), "parts"),
    )


Functions = Mapping[str, tuple[Any, ...]]
"""By name, the type of a function's result (None: void), then those of its arguments."""
FUNCTIONS: Functions = {
    "native_has_variant": (c_bool, c_int64, c_int),
    "native_fastest_variant": (c_int, c_int64),
    "native_packed_size": (c_int64, c_int64, c_int64, c_int64),
    "native_populate": (None, c_void_p, c_int64),
    "native_populate_first": (None, c_void_p, c_int64, c_int64),
    "native_pack": (None, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "native_unpack": (None, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p),
    "native_unpack_codes": (None, POINTER(CodedRows), c_int64, c_void_p, c_int64, c_void_p),
    "native_grouped_size": (c_int64, c_int64, c_int64, c_int64),
    "native_pack_groups": (None, POINTER(NumbersOfCodes), c_int64, c_int64, c_int64, c_void_p),
    "native_pack_blocks": (c_bool, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "native_round_groups": (
        *(None, c_void_p, c_bool, c_void_p, c_int64, c_int64, c_int64),
        *(c_int, c_void_p),
    ),
    "native_multiply": (None, POINTER(PackedWeight), c_void_p, c_void_p, c_void_p, c_int64, c_int),
    "native_best_instructions": (c_int,),
    "native_fastest_instructions": (c_int,),
    "native_scratch_floats": (c_int64, c_int64, c_int64),
    "native_write": (None, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64),
    "native_attend": (
        *(None, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64),
        *(c_int64, c_float, c_int64, c_void_p, c_void_p, c_float, c_int),
    ),
    "native_draw": (None, c_void_p),
    "native_score": (None, c_void_p),
    "native_run": (None, c_void_p, c_void_p),
    "native_stop": (c_bool,),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library; only where is_available()."""
    found = _load()
    assert found is not None
    return found


@functools.cache
def supported_variants(element_bits: int) -> tuple[Variant, ...]:
    """Return those of VARIANTS that are built and that this CPU has, the fastest last."""
    found, variants = _load(), VARIANTS[element_bits]
    if found is None:
        return ()
    numbers = [number for number, _ in enumerate(variants, 1) if found.native_has_variant(element_bits, number)]
    fastest = found.native_fastest_variant(element_bits)
    return tuple(variants[number - 1] for number in sorted(numbers, key=fastest.__eq__))


@functools.cache
def is_available() -> bool:
    """Return whether the library is built and loads. There is a variant for any CPU."""
    return _load() is not None


@functools.cache
def digest() -> str:
    """Return the SHA-256 of the library in hexadecimal."""
    return hashlib.sha256(Path(library()._name).read_bytes()).hexdigest()


def set_num_threads(num_threads: int) -> None:
    """Set how many threads the team's calls use that this thread makes; at first one."""
    if is_available():
        library().native_set_num_threads(num_threads)


def num_threads() -> int:
    """Return what set_num_threads has set for this thread; 1 without the library."""
    num: int = library().native_num_threads() if is_available() else 1
    return num


def stop() -> bool:
    """End the threads of the team; the next call starts them anew. Return False if a call is under way."""
    stopped: bool = library().native_stop()
    return stopped


def _load() -> ctypes.CDLL | None:
    """Return the library that the installation built beside this file, None if there is none of this ABI."""
    spec = find_spec("gptserve.engine.backends.cpu._native")
    if spec is None or spec.origin is None:
        return None
    try:
        found = ctypes.CDLL(spec.origin)
        if found.native_abi() != ABI:
            raise OSError(f"its version is {found.native_abi()}, not {ABI}: install the package again")
        for function, (result, *arguments) in FUNCTIONS.items():
            getattr(found, function).restype = result
            getattr(found, function).argtypes = arguments
    except (OSError, AttributeError) as error:
        logger.warning("the compiled library %s is not used: %s", spec.origin, error)
        return None
    return found
