"""Attention over the paged KV cache: one interface, several backends, one chooser.

Shape letters: T tokens of the step, S sequences, H query heads, G KV heads, D head size, N blocks, B block size.
A backend knows tensors only: no scheduler, no model family. layers.py calls it once a layer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gptserve.engine.config import AttentionBackendName
from gptserve.engine.errors import InvalidConfigurationError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention is: how query position i scores key position j, and which positions it sees.

    The score is scale * q.k; softcap c makes that c * tanh(score / c); a slope adds slope * (j - i) (ALiBi, Press et
    al. 2022). window is how many latest tokens are seen (None: all). A sink is one more logit of its head: it takes
    its share of the softmax and has no value.
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


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which tokens of the step belong to which sequence and where their keys and values lie.

    Sequence s owns rows query_starts[s]:query_starts[s+1] of the step; they are the last tokens of its kv_lens[s]
    tokens, so row i of it stands at position kv_lens[s] - query_len + i and sees positions 0 to its own. Position p
    of sequence s lies in block block_tables[s, p // B], at offset p % B. Rows from query_starts[S] on are padding:
    their slot is -1, nothing is stored for them and their output is zero.

    The tuples and the tensors say the same: tuples for code on the host, tensors (device of the model) for kernels.
    """

    query_starts: tuple[int, ...]
    kv_lens: tuple[int, ...]
    query_starts_S1: Tensor
    """int32 [S + 1]"""
    kv_lens_S: Tensor
    """int32 [S]"""
    block_tables_SN: Tensor
    """int32 [S, most blocks of any sequence], rows padded with 0"""
    slots_T: Tensor
    """int64 [T], block * B + offset; -1 for a padding row"""


class AttentionBackend(Protocol):
    """Store the step's keys and values, then attend. Both mutate nothing but the cache.

    On a CPU a row's result depends, bit for bit, only on that sequence's tokens: not on its neighbours in the step, on
    how the sequence was cut into chunks, or on where its blocks lie.
    """

    name: str
    build: str
    """What else decides its bits, such as the instructions it uses; empty where torch decides."""

    def scratch_bytes(self, max_model_len: int, head_size: int, num_threads: int) -> int:
        """Return the most bytes that it keeps between steps."""

    def write(self, key_TGD: Tensor, value_TGD: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata) -> None:
        """Store key and value (model dtype) at metadata.slots_T of cache_2NGBD ([0] keys, [1] values)."""

    def attend(
        self, query_THD: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Return softmax(scores of the spec + causal mask) v as [T, H, D] in the query's dtype; softmax in fp32."""


def choose_backend(
    name: AttentionBackendName, device: torch.device, dtype: torch.dtype, head_size: int
) -> AttentionBackend:
    """Return the named backend, or for "auto" the fastest that can compute this model on this device.

    Raises InvalidConfigurationError when the one named cannot. "auto" warns when it takes the reference: the result is
    right but slower.
    """
    from gptserve.engine.attention.cpu import SUPPORTED_DTYPES, CpuAttention
    from gptserve.engine.attention.reference import ReferenceAttention

    if name == "reference":
        return ReferenceAttention()
    if device.type != "cpu":
        obstacle = f"the device is {device}"
    elif dtype not in SUPPORTED_DTYPES or head_size % 8:
        obstacle = f"it computes fp32 and bf16 with head sizes divisible by 8, this is {dtype} with {head_size}"
    elif not CpuAttention.is_available():
        obstacle = "its library is missing or stale: the installation compiles it where there is a C++ compiler"
    else:
        return CpuAttention()
    if name == "cpu":
        raise InvalidConfigurationError(f"attention_backend 'cpu' cannot be used: {obstacle}")
    if device.type != "cpu":
        logger.warning(
            "attention: 'reference' is used on %s, which computes one sequence after another: only 'cpu' has a kernel, "
            "so answers are right, but far slower than the device could make them",
            device.type,
        )
        return ReferenceAttention()
    logger.warning("attention: the compiled CPU kernel is not used (%s) but the slower reference", obstacle)
    return ReferenceAttention()
