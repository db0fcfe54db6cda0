"""The reference attention against dense attention in float64, and its independence of everything but the sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.attention import AttentionSpec
from engine.attention.reference import ReferenceAttention
from tests.engine.steps import make_metadata, shuffled_tables


def dense(query_LHD: Tensor, key_KGD: Tensor, value_KGD: Tensor, spec: AttentionSpec) -> Tensor:
    group = spec.num_heads // spec.num_kv_heads
    q, k, v = (
        query_LHD.double(),
        key_KGD.double().repeat_interleave(group, 1),
        value_KGD.double().repeat_interleave(group, 1),
    )
    scores = torch.einsum("lhd,khd->hlk", q, k) * spec.scale
    keys = torch.arange(k.shape[0])
    last = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    hidden = keys > last
    if spec.window is not None:
        hidden |= keys <= last - spec.window
    return torch.einsum("hlk,khd->lhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


class Cached:
    """Random sequences whose keys and values were written through the backend into a scattered cache."""

    def __init__(self, kv_lens: list[int], spec: AttentionSpec, dtype: torch.dtype, block_size: int = 16) -> None:
        generator = torch.Generator().manual_seed(1)
        self.kv_lens, self.spec, self.block_size = kv_lens, spec, block_size
        total = sum(-(-k // block_size) for k in kv_lens) + 3
        self.tables = shuffled_tables(kv_lens, block_size, total)
        self.cache = torch.full((2, total, spec.num_kv_heads, block_size, spec.head_size), float("nan"), dtype=dtype)
        shape = (sum(kv_lens), spec.num_kv_heads, spec.head_size)
        self.keys, self.values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        self.queries = torch.randn((shape[0], spec.num_heads, spec.head_size), generator=generator).to(dtype)
        metadata = make_metadata(kv_lens, kv_lens, self.tables, block_size)
        ReferenceAttention().write(self.keys, self.values, self.cache, metadata)

    def rows(self, tensor: Tensor, s: int, query_len: int, hidden: int = 0) -> Tensor:
        end = sum(self.kv_lens[: s + 1]) - hidden
        return tensor[end - query_len : end]

    def attend(self, sequences: list[int], query_lens: list[int], pad: int = 0, hidden: int = 0) -> list[Tensor]:
        """Return the rows of each sequence before the last `hidden`, which are not yet computed."""
        kv_lens = [self.kv_lens[s] - hidden for s in sequences]
        metadata = make_metadata(query_lens, kv_lens, [self.tables[s] for s in sequences], self.block_size, pad)
        rows = [self.rows(self.queries, s, n, hidden) for s, n in zip(sequences, query_lens, strict=True)]
        query = torch.cat([*rows, torch.ones_like(self.queries[:1]).expand(pad, -1, -1)])
        out = ReferenceAttention().attend(query, self.cache, metadata, self.spec)
        assert not out[sum(query_lens) :].any()
        return list(out[: sum(query_lens)].split(query_lens))


MHA = AttentionSpec(num_heads=4, num_kv_heads=4, head_size=16, scale=0.25)
GQA = AttentionSpec(num_heads=6, num_kv_heads=2, head_size=8, scale=0.5)
WINDOWED = AttentionSpec(num_heads=4, num_kv_heads=4, head_size=16, scale=0.25, window=5)


@pytest.mark.parametrize("spec", [MHA, GQA, WINDOWED], ids=["mha", "gqa", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_equals_dense_attention(spec: AttentionSpec, dtype: torch.dtype) -> None:
    cached = Cached([1, 17, 40, 33], spec, dtype)
    query_lens = [1, 17, 1, 9]
    outputs = cached.attend([0, 1, 2, 3], query_lens, pad=2)
    for s, (query_len, out) in enumerate(zip(query_lens, outputs, strict=True)):
        expected = dense(
            cached.rows(cached.queries, s, query_len),
            cached.rows(cached.keys, s, cached.kv_lens[s]),
            cached.rows(cached.values, s, cached.kv_lens[s]),
            spec,
        )
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_have_the_same_bits_alone_and_in_a_batch_and_in_any_chunk(dtype: torch.dtype) -> None:
    cached = Cached([64, 100, 37], MHA, dtype)
    whole = cached.attend([0, 1, 2], [64, 100, 37])
    for s in range(3):
        for query_len in (1, 2, 3, 5, 16, 37):
            (alone,) = cached.attend([s], [query_len])
            assert torch.equal(alone, whole[s][-query_len:])
    assert not torch.equal(whole[0][-37:], whole[1][-37:])


@pytest.mark.parametrize("head_size", [12, 16, 64])
def test_rows_have_the_same_bits_before_the_sequence_goes_on(head_size: int) -> None:
    cached = Cached([64], replace(MHA, head_size=head_size), torch.float32)
    (whole,) = cached.attend([0], [64])
    for kv_len in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63):
        for query_len in {1, kv_len}:
            (early,) = cached.attend([0], [query_len], hidden=64 - kv_len)
            assert torch.equal(early, whole[kv_len - query_len : kv_len]), (kv_len, query_len)


def test_block_size_does_not_change_the_bits() -> None:
    outputs = [
        Cached([50, 21], MHA, torch.float32, block_size).attend([0, 1], [50, 1]) for block_size in (1, 8, 16, 32)
    ]
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))
