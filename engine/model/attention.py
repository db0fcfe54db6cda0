"""Attention over the paged KV cache: the interface of its backends.

Shape letters: T tokens of the step, S sequences, H query heads, G KV heads, D head size, N blocks, B block size.
A backend knows only tensors: no scheduler and no model family. attention_choice.py chooses it, layers.py calls it once
a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gptserve.engine.model.states import State


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer: how query position i scores key position j, and which positions it sees.

    The score is scale * q.k; softcap c makes that c * tanh(score / c); a slope adds slope * (j - i) (ALiBi, Press et
    al. 2022). A query sees the latest `window` tokens (None: all). A sink is one more logit of its head: it takes a
    share of the softmax and has no value.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None = None
    alibi_slopes: Tensor | None = None
    """fp32 [H], device of the model"""
    sinks: Tensor | None = None
    """fp32 [H], device of the model; not scaled"""
    softcap: float | None = None
    reads_other: bool = False
    """The layer reads the keys and values of another one, and has none to write."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which tokens of the step belong to which sequence and where their keys and values lie.

    Sequence s owns rows query_starts[s]:query_starts[s+1] of the step. They are the last of its kv_lens[s] tokens, so
    its row i is at position kv_lens[s] - query_len + i and sees positions 0 to its own. Position p of sequence s is in
    block block_tables[s, p // B], at offset p % B. Rows from query_starts[S] on are padding: their slot is -1, nothing
    is stored for them and their output is zero.

    Tuples and tensors hold the same: tuples for code on the host, tensors (on the model's device) for kernels.
    """

    query_starts: tuple[int, ...]
    kv_lens: tuple[int, ...]
    query_starts_S1: Tensor
    """int32 [S + 1]"""
    kv_lens_S: Tensor
    """int32 [S]"""
    block_tables_SN: Tensor
    """int32 [S, N], N the largest number of blocks of a sequence; rows are padded with 0"""
    slots_T: Tensor
    """int64 [T], block * B + offset; -1 for a padding row"""
    states: tuple[int, ...] = ()
    """StepArrays.states, for layers that keep a state"""


class Cache(Protocol):
    """The tensors that hold keys and values, and states."""

    @property
    def layers(self) -> list[Tensor]:
        """Of each layer [2, N, G, B, D]: keys, then values. All of each step are stored there.

        In int8 [2, N, G, B, D + SCALE_BYTES]: codes, then their scale, as kv_rows.py says.
        """

    @property
    def states(self) -> list[State | None]:
        """Of each layer the states of sequences, None if it has keys and values."""


class AttentionBackend(Protocol):
    """Stores the step's keys and values, then computes attention. It mutates only the cache.

    On a CPU the bits of a row depend only on the tokens of its sequence: not on the other sequences of the step, the
    chunks of the sequence or the places of its blocks.
    """

    name: str
    build: str
    """Whatever else decides its bits, such as its instruction set; empty if torch decides."""

    def scratch_bytes(self, max_model_len: int, head_size: int, num_threads: int) -> int:
        """Return the maximum bytes that it keeps between steps."""

    def write(self, key_TGD: Tensor, value_TGD: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata) -> None:
        """Store key and value (model dtype) at metadata.slots_T of cache_2NGBD ([0] keys, [1] values)."""

    def attend(
        self, query_THD: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Return softmax(scores of the spec + causal mask) v as [T, H, D] in the query's dtype; softmax in fp32."""
