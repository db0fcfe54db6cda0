"""CpuAttention over a cache in int8: the rows that it stores, their attention, and the bits of that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.reference.attention import ReferenceAttention, decoded
from gptserve.engine.model.attention import AttentionSpec
from gptserve.engine.model.kv_rows import SCALE_BYTES
from tests.engine.backends.oracle import FEATURES, Feature, dense_attention, feature_id, with_features
from tests.engine.steps import make_metadata, shuffled_tables

pytestmark = [
    pytest.mark.skipif(not CpuAttention.is_available(), reason="the package was installed without a compiler"),
    pytest.mark.usefixtures("set_threads"),
]

DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (70, 33, 1, 16)
plain_and_all = pytest.mark.parametrize("features", [(), FEATURES], ids=feature_id)

Step = list[tuple[int, int]]
"""(index of a sequence, how many of its next tokens) for each sequence of the step."""


class Sequences:
    """Random queries, keys and values [L, heads, D] of sequences, and what a backend makes of them."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype, lengths: Sequence[int] = LENGTHS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.spec, self.dtype, self.lengths = spec, dtype, list(lengths)
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.rows = [[torch.randn(n, h, spec.head_size, generator=generator).to(dtype) for h in heads] for n in lengths]

    def attend(
        self, backend: CpuAttention, steps: list[Step], block_size: int = 16, seed: int = 0, num_padding: int = 0
    ) -> list[Tensor]:
        """Return the outputs of each sequence of `steps`, and leave the cache in self.cache."""
        spec, num_blocks = self.spec, sum(-(-n // block_size) for n in self.lengths) + 2
        self.tables = shuffled_tables(self.lengths, block_size, num_blocks, seed)
        shape = 2, num_blocks, spec.num_kv_heads, block_size, spec.head_size + SCALE_BYTES
        self.cache = torch.full(shape, -1, dtype=torch.int8)  # as a scale that is NaN
        outs, done = [list[Tensor]() for _ in self.lengths], [0] * len(self.lengths)
        for step in steps:
            rows = [slice(done[i], done[i] + n) for i, n in step]
            parts = [
                torch.cat([self.rows[i][kind][row] for (i, _), row in zip(step, rows, strict=True)])
                for kind in range(3)
            ]
            padded = (torch.cat([part, part.new_full((num_padding, *part.shape[1:]), math.nan)]) for part in parts)
            query, key, value = padded
            tables = [self.tables[i] for i, _ in step]
            metadata = make_metadata([n for _, n in step], [row.stop for row in rows], tables, block_size, num_padding)
            backend.write(key, value, self.cache, metadata)
            out = backend.attend(query, self.cache, metadata, spec)
            for (i, n), part in zip(step, out.split([*(n for _, n in step), num_padding]), strict=False):
                outs[i].append(part)
                done[i] += n
            assert not out[len(out) - num_padding :].any()
        return [torch.cat(parts) for parts in outs if parts]

    def expected(self, i: int) -> Tensor:
        """Return the attention of a sequence over what its stored rows stand for, in fp64."""
        blocks = self.cache[:, self.tables[i]].transpose(1, 2).flatten(2, 3)[:, :, : self.lengths[i]]
        keys, values = decoded(blocks).transpose(1, 2)
        return dense_attention(self.rows[i][0], keys, values, self.spec)


def whole(lengths: Sequence[int] = LENGTHS) -> list[Step]:
    return [list(enumerate(lengths))]


def chunks(size: int) -> list[Step]:
    return [[(i, min(size, n - at)) for i, n in enumerate(LENGTHS) if at < n] for at in range(0, max(LENGTHS), size)]


def spec_of(num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 64) -> AttentionSpec:
    return AttentionSpec(num_heads, num_kv_heads, head_size, head_size**-0.5)


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [8, 24, 64, 200])
def test_stored_rows_have_the_bytes_that_the_reference_stores(dtype: torch.dtype, head_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 300, 2, head_size, generator=generator)
    magnitudes = 10.0 ** torch.linspace(-38, 36, 300)[:, None, None]
    keys = (keys * magnitudes).to(dtype)
    values = values.round(decimals=1).to(dtype)  # many lie halfway between two codes
    keys[7], keys[8, 0], values[9, 1, 3], values[10, 0, 2], keys[11, 1, 4] = 0, 2.0**-100, math.nan, math.inf, -math.inf
    tables = shuffled_tables([300], 16, 20)
    metadata = make_metadata([300], [300], tables, 16)
    caches = [torch.full((2, 20, 2, 16, head_size + SCALE_BYTES), 5, dtype=torch.int8) for _ in range(2)]

    for backend, cache in zip((CpuAttention(), ReferenceAttention()), caches, strict=True):
        backend.write(keys, values, cache, metadata)

    scales = [cache[..., head_size:].contiguous().view(torch.float32) for cache in caches]
    assert torch.equal(caches[0][..., :head_size], caches[1][..., :head_size])
    assert torch.equal(scales[0].nan_to_num(-1.0), scales[1].nan_to_num(-1.0))
    assert (caches[0] != 5).any()


@pytest.mark.some(24)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_kv_heads", "head_size", "window"),
    [(1, 8, None), (2, 24, 17), (6, 64, None), (2, 64, 20), (1, 80, None), (2, 128, 40)],
)
@plain_and_all
def test_agrees_with_dense_attention_over_the_stored_rows(
    backend: CpuAttention,
    dtype: torch.dtype,
    num_kv_heads: int,
    head_size: int,
    window: int | None,
    features: tuple[Feature, ...],
) -> None:
    spec = with_features(replace(spec_of(6, num_kv_heads, head_size), window=window), features)
    sequences = Sequences(spec, dtype)
    # Queries have 16 bits. A bf16 output is rounded to 8: half a unit in the last place is 2^-9.
    rtol = 1e-4 if dtype is torch.float32 else 2**-8

    for i, out in enumerate(sequences.attend(backend, chunks(50))):
        torch.testing.assert_close(out.double(), sequences.expected(i), rtol=rtol, atol=3e-4)


def test_the_stored_rows_are_close_to_what_they_stand_for(backend: CpuAttention) -> None:
    sequences = Sequences(spec_of(), torch.float32)
    for i, out in enumerate(sequences.attend(backend, whole())):
        exact = dense_attention(*sequences.rows[i], sequences.spec)
        assert 0 < (out - exact).abs().max() < 0.03


@pytest.mark.some(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "window"), [(64, None), (24, 20)])
@plain_and_all
def test_bits_do_not_depend_on_batch_chunks_blocks_or_threads(
    backend: CpuAttention,
    dtype: torch.dtype,
    head_size: int,
    window: int | None,
    features: tuple[Feature, ...],
    set_threads: Callable[[int], None],
) -> None:
    spec = with_features(replace(spec_of(6, 2, head_size), window=window), features)
    sequences = Sequences(spec, dtype)
    alone = [sequences.attend(backend, [[(i, 1)] for _ in range(n)])[0] for i, n in enumerate(LENGTHS)]

    assert same(alone, sequences.attend(backend, whole())), "batch"
    for chunk in (3, 7, 16, 33):
        assert same(alone, sequences.attend(backend, chunks(chunk))), f"chunks of {chunk}"
    for block_size in (1, 8, 32):
        assert same(alone, sequences.attend(backend, chunks(20), block_size)), f"blocks of {block_size}"
    assert same(alone, sequences.attend(backend, whole(), seed=1)), "placement"
    assert same(alone, sequences.attend(backend, whole(), num_padding=3)), "padding"
    set_threads(3)
    assert same(alone, sequences.attend(backend, chunks(20))), "threads"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 24])
def test_scores_have_the_same_bits_with_all_instructions(dtype: torch.dtype, head_size: int) -> None:
    """What follows the scores sums up to 16 positions in one order, too, where multiply-adds are fused."""
    fused = [its for its in CpuAttention.supported_instructions() if its != "generic"]
    sequences = Sequences(spec_of(6, 2, head_size), dtype, (16, 9))
    outs = [sequences.attend(CpuAttention(its), whole((16, 9))) for its in fused]

    assert all(same(outs[0], other) for other in outs[1:])


def test_the_largest_sums_fit(backend: CpuAttention) -> None:
    spec = spec_of(2, 1, 1024)
    sequences = Sequences(spec, torch.float32, (20,))
    query, key, _ = sequences.rows[0]
    key[:] = torch.arange(1.0, 21.0)[:, None, None] / 20
    query[:] = 0.1  # all codes of queries and keys are the largest there are
    (out,) = sequences.attend(backend, whole((20,)))

    torch.testing.assert_close(out.double(), sequences.expected(0), rtol=1e-3, atol=1e-3)


def test_an_element_that_is_not_finite_spoils_the_rows_that_see_it_and_no_other(backend: CpuAttention) -> None:
    sequences = Sequences(replace(spec_of(), window=8), torch.float32)
    before = sequences.attend(backend, whole())
    for kind, element in ((1, math.inf), (2, math.nan)):
        kept = sequences.rows[0][kind].clone()
        sequences.rows[0][kind][50, 0, 5] = element
        after = sequences.attend(backend, whole())
        sequences.rows[0][kind] = kept
        assert after[0][50:58, :2].isnan().all()
        assert torch.equal(before[0][50:58, 2:], after[0][50:58, 2:]), "heads of another KV head"
        assert torch.equal(before[0][:50], after[0][:50])
        assert torch.equal(before[0][58:], after[0][58:])
        assert same(before[1:], after[1:])
