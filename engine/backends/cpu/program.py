"""Programs: the operations of a step as data, which the library runs in one call.

It mirrors the structures of program.h, and keeps alive what they point to. Torch-free: callers pass addresses.
decoder.py writes programs.
"""

from __future__ import annotations

from collections.abc import Container
from ctypes import Array, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p
from functools import cached_property
from typing import Any, Literal, get_args

from gptserve.engine.backends.cpu import native
from gptserve.weights.config import AttentionGate
from gptserve.weights.config import Experts as Mixture

Kind = Literal[
    "linear",
    "attend",
    "experts",
    "convolve",
    "recur",
    "take",
    "embed",
    "add_position",
    "norm",
    "clamp",
    "scale",
    "multiply",
    "rotate",
    "gate",
    "gate_heads",
    "xielu",
    "add",
    "copy",
    "scale_each",
    "cut_gate",
    "match",
    "predict",
    "correct",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The index is the library's number."""
HEAD_GATES: tuple[AttentionGate, ...] = get_args(AttentionGate)
"""The index is the library's number."""
_OF_STREAMS: tuple[Kind, ...] = ("scale_each", "cut_gate", "match", "predict", "correct")
_READS_WIDE: tuple[Kind, ...] = (
    *("take", "embed", "add_position", "norm", "scale", "gate", "xielu", "add", "copy"),
    *_OF_STREAMS,
)
_WRITES_WIDE: tuple[Kind, ...] = (*_READS_WIDE, "linear", "experts")


class Table(Structure):
    """Table of program.h."""

    _fields_ = native.members((c_void_p, "rows"), (c_float, "scale"), (c_int32, "kind"), (c_int64, "num_rows"))


class Factors(Structure):
    """Factors of program.h."""

    _fields_ = native.members((c_void_p, "factors"))


class Mixing(Structure):
    """Mixing of program.h."""

    _fields_ = native.members((c_void_p, "factors"), (c_int64, "num"), (c_int32, "logits"))


class Norm(Structure):
    """Norm of program.h."""

    _fields_ = native.members(
        (c_void_p, "weight bias"), (c_int64, "first count width"), (c_float, "eps"), (c_int32, "centred")
    )


class Rotation(Structure):
    """Rotation of program.h."""

    _fields_ = native.members((c_void_p, "waves"), (c_int64, "num_heads head_size num_pairs"))


class Gate(Structure):
    """Gate of program.h."""

    _fields_ = native.members((c_float, "limit"), (c_int32, "activation"))


class Attend(Structure):
    """Attend of program.h."""

    _fields_ = native.members(
        (c_void_p, "slopes sinks"),
        (c_int64, "layer key value num_heads window writes"),
        (c_float, "scale softcap"),
        (c_int32, "instructions"),
    )


class Router(Structure):
    """Router of program.h."""

    _fields_ = native.members(
        (c_void_p, "correction factors"),
        (c_int64, "num_groups num_active_groups"),
        (c_float, "min_sum sum_offset scale shared_weight"),
        (c_int32, "plain sigmoid renormalised shared_gate"),
    )


ROUTE_BYTES = 12
"""Of a pair in the buffer of Experts.routes."""
SCORE_BYTES = 4
"""Of a score, and of a group's, in that buffer."""


def route_bytes(experts: Mixture) -> int:
    """Return the bytes of a row of the buffer of Experts.routes."""
    num_scores = 0 if experts.router.is_plain else 2 * experts.num + experts.router.num_groups
    return experts.num_per_row * ROUTE_BYTES + num_scores * SCORE_BYTES


class Experts(Structure):
    """Experts of program.h."""

    _fields_ = native.members(
        (c_void_p, "ups downs router gate ends"),
        (c_int64, "num num_active num_shared"),
        (c_int32, "scores routes pairs up gated"),
    )


def router_data(experts: Mixture, correction: int | None, factors: int | None = None) -> Router:
    """Return how a mixture chooses; `correction` and `factors` are the addresses of its router's, if it has them.

    Each is fp32 [experts.num].
    """
    router = experts.router
    return Router(
        correction=correction,
        factors=factors,
        num_groups=router.num_groups,
        num_active_groups=router.num_active_groups,
        min_sum=router.min_sum,
        sum_offset=router.sum_offset,
        scale=router.scale,
        shared_weight=experts.shared_weight,
        plain=router.is_plain,
        sigmoid=router.score == "sigmoid",
        renormalised=router.renormalised,
        shared_gate=experts.has_shared_gate,
    )


class Convolve(Structure):
    """Convolve of program.h."""

    _fields_ = native.members((c_void_p, "factors bias"), (c_int64, "layer size"), (c_int32, "gated"))


class Recur(Structure):
    """Recur of program.h."""

    _fields_ = native.members(
        (c_void_p, "decay step skip"),
        (c_int64, "layer num_key_heads num_value_heads key_size value_size group"),
        (c_float, "least_step most_step"),
        (c_int32, "rates"),
    )


class StateCache(Structure):
    """StateCache of program.h."""

    _fields_ = native.members((c_void_p, "latest memory"))


MAX_KEY_SIZE, MAX_STREAMS = 1024, 16
"""Of program.h."""


class _Buffer(Structure):
    """Buffer of program.h."""

    _fields_ = native.members((c_void_p, "data"), (c_int64, "width"), (c_int32, "wide"))


class _Operation(Structure):
    """Operation of program.h."""

    _fields_ = native.members((c_int32, "kind source target residual"), (c_void_p, "data"))


class _Program(Structure):
    """Program of program.h."""

    _fields_ = native.members(
        (c_void_p, "operations"), (c_int64, "num_operations"), (c_void_p, "buffers"), (c_int32, "variant element_bytes")
    )


class _Step(Structure):
    """Step of program.h."""

    _fields_ = native.members(
        (c_int64, "num_rows"),
        (c_void_p, "token_ids positions batch caches"),
        (c_int64, "num_taken"),
        (c_void_p, "taken states state_caches"),
    )


class Program:
    """Operations over buffers that are known by name; the caller allocates the buffers."""

    def __init__(
        self,
        widths: dict[str, int],
        element_bytes: int,
        variant: native.Variant | None = None,
        wide: Container[str] = (),
    ) -> None:
        """Begin an empty program over buffers of these names and widths, in elements of 4 bytes (fp32) or 2 (bf16).

        The buffers in `wide` are in fp32. `variant` is one of native.supported_variants(8 * element_bytes), whose
        instructions compute all but products and attention; None means the fastest.
        """
        self._element_bytes, self._variant = element_bytes, variant or native.supported_variants(8 * element_bytes)[-1]
        self._numbers = {name: number for number, name in enumerate(widths)}
        buffers = (_Buffer(None, width, element_bytes == 4 or name in wide) for name, width in widths.items())
        self._buffers = (_Buffer * len(widths))(*buffers)
        self._operations: list[_Operation] = []
        self._kept: list[object] = []

    def add(self, kind: Kind, source: str, target: str, data: Any = None, *, residual: str = "") -> None:
        """Append an operation; `data` is the ctypes object that program.h names for its kind, kept alive here."""
        buffers = [self._numbers[name] if name else -1 for name in (source, target, residual)]
        reads_wide = kind in _READS_WIDE or (kind == "linear" and data.element_bits < 16)
        assert self._element_bytes == 4 or reads_wide or not self._buffers[buffers[0]].wide, "it reads a wide buffer"
        assert self._element_bytes == 4 or kind in _WRITES_WIDE or not self._buffers[buffers[1]].wide
        assert kind != "gate" or self._buffers[buffers[0]].wide == self._buffers[buffers[1]].wide, "it has one width"
        address = None if data is None else addressof(data)
        self._operations.append(_Operation(KINDS.index(kind), *buffers, address))
        self.keep(data)

    def number(self, name: str) -> int:
        """Return the index of a buffer, by which the data of an operation names it."""
        return self._numbers[name]

    def keep(self, owner: object) -> None:
        """Keep alive what an address in the data of an operation belongs to."""
        self._kept.append(owner)

    def place(self, name: str, address: int) -> None:
        """Set where a buffer lies."""
        self._buffers[self._numbers[name]].data = address

    def run(
        self,
        num_rows: int,
        token_ids: int | None = None,
        positions: int | None = None,
        batch: Structure | None = None,
        caches: Array[c_void_p] | None = None,
        num_taken: int = 0,
        taken: int | None = None,
        states: int | None = None,
        state_caches: Array[c_void_p] | None = None,
    ) -> None:
        """Compute rows [0, num_rows) of all buffers, [0, num_taken) of those after "take".

        Step in program.h says what the addresses point to.
        """
        *of_attention, of_states = [None if data is None else addressof(data) for data in (batch, caches, state_caches)]
        step = _Step(num_rows, token_ids, positions, *of_attention, num_taken, taken, states, of_states)
        native.library().native_run(byref(self._program), byref(step))

    @cached_property
    def _program(self) -> _Program:
        """The program as the library reads it; made by the first run, after the last `add`."""
        operations = (_Operation * len(self._operations))(*self._operations)
        self.keep(operations)
        kind = native.VARIANTS[8 * self._element_bytes].index(self._variant) + 1, self._element_bytes
        return _Program(addressof(operations), len(operations), addressof(self._buffers), *kind)
