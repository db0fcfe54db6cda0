"""The reference attention against its formula in float64, and its independence of everything but the sequence."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.reference.attention import ReferenceAttention, coded, decoded
from gptserve.engine.model.attention import AttentionSpec
from gptserve.engine.model.kv_rows import row_size
from tests.engine.backends.oracle import (
    FEATURE_SETS,
    FEATURES,
    Feature,
    bloom_slopes,
    dense_attention,
    feature_id,
    with_features,
)
from tests.engine.steps import make_metadata, shuffled_tables


class Cached:
    """Random sequences whose keys and values were written through the backend into a scattered cache."""

    def __init__(
        self,
        kv_lens: list[int],
        spec: AttentionSpec,
        dtype: torch.dtype,
        block_size: int = 16,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.kv_lens, self.spec, self.block_size = kv_lens, spec, block_size
        total = sum(-(-k // block_size) for k in kv_lens) + 3
        self.tables = shuffled_tables(kv_lens, block_size, total)
        cache_dtype = cache_dtype or dtype
        of_block = spec.num_kv_heads, block_size, row_size(spec.head_size, cache_dtype.itemsize)
        unwritten = -1 if cache_dtype is torch.int8 else math.nan  # the bits of NaN, as a scale
        self.cache = torch.full((2, total, *of_block), unwritten, dtype=cache_dtype)
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
MQA = AttentionSpec(num_heads=5, num_kv_heads=1, head_size=12, scale=0.3)
WINDOWED = AttentionSpec(num_heads=4, num_kv_heads=4, head_size=16, scale=0.25, window=5)

plain_and_all = pytest.mark.parametrize("features", [(), FEATURES], ids=feature_id)


@pytest.mark.some(8)
@pytest.mark.parametrize("features", FEATURE_SETS, ids=feature_id)
@pytest.mark.parametrize("spec", [MHA, GQA, MQA, WINDOWED], ids=["mha", "gqa", "mqa", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_equals_dense_attention(
    spec: AttentionSpec, dtype: torch.dtype, features: tuple[Feature, ...]
) -> None:
    spec = with_features(spec, features)
    cached = Cached([1, 17, 40, 33], spec, dtype)
    query_lens = [1, 17, 1, 9]
    outputs = cached.attend([0, 1, 2, 3], query_lens, pad=2)
    for s, (query_len, out) in enumerate(zip(query_lens, outputs, strict=True)):
        inputs = (
            cached.rows(cached.queries, s, query_len),
            cached.rows(cached.keys, s, cached.kv_lens[s]),
            cached.rows(cached.values, s, cached.kv_lens[s]),
        )
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(out.double(), dense_attention(*inputs, spec), atol=tolerance, rtol=tolerance)
        for feature in features if cached.kv_lens[s] > 1 else ():
            without = dense_attention(*inputs, replace(spec, **{feature: None}))
            assert (out.double() - without).abs().max() > 3 * tolerance, f"{feature} hardly matters here"


@pytest.mark.parametrize("family", ["bloom", "gemma2", "gpt_oss"])
def test_attention_equals_that_of_transformers(family: str) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

    features: dict[str, Feature] = {"bloom": "alibi_slopes", "gemma2": "softcap", "gpt_oss": "sinks"}
    spec = with_features(GQA, (features[family],))
    cached = Cached([40], spec, torch.float32)
    query, key, value = (x[:40].transpose(0, 1)[None] for x in (cached.queries, cached.keys, cached.values))
    mask = torch.full((40, 40), -math.inf).triu(1)
    module = SimpleNamespace(num_key_value_groups=3, training=False, sinks=spec.sinks)
    if family == "gpt_oss":
        expected, _ = gpt_oss_attention(module, query, key, value, mask, spec.scale)
    else:
        if family == "bloom":
            mask = mask + build_alibi_tensor(torch.ones(1, 40), spec.num_heads, torch.float32)
        expected, _ = gemma2_attention(module, query, key, value, mask, scaling=spec.scale, softcap=spec.softcap)
    torch.testing.assert_close(cached.attend([0], [40])[0], expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_heads", [1, 8, 12, 14, 71])
def test_slopes_of_these_tests_are_those_of_transformers(num_heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    alibi = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)
    torch.testing.assert_close(alibi[:, 0, 1], bloom_slopes(num_heads))


@plain_and_all
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_have_the_same_bits_alone_and_in_a_batch_and_in_any_chunk(
    dtype: torch.dtype, features: tuple[Feature, ...]
) -> None:
    cached = Cached([64, 100, 37], with_features(MHA, features), dtype)
    whole = cached.attend([0, 1, 2], [64, 100, 37])
    for s in range(3):
        for query_len in (1, 2, 3, 5, 16, 37):
            (alone,) = cached.attend([s], [query_len])
            assert torch.equal(alone, whole[s][-query_len:])
    assert not torch.equal(whole[0][-37:], whole[1][-37:])


@pytest.mark.parametrize("spec", [MHA, GQA, MQA, WINDOWED], ids=["mha", "gqa", "mqa", "window"])
@plain_and_all
def test_with_a_cache_in_int8_attention_is_that_over_rounded_rows_with_the_same_bits_in_any_chunk(
    spec: AttentionSpec, features: tuple[Feature, ...]
) -> None:
    spec = with_features(spec, features)
    cached = Cached([64, 100, 37], spec, torch.float32, cache_dtype=torch.int8)
    keys, values = (decoded(coded(rows)) for rows in (cached.keys, cached.values))
    whole = cached.attend([0, 1, 2], [64, 100, 37])
    for s in range(3):
        rows = (cached.rows(its, s, cached.kv_lens[s]) for its in (cached.queries, keys, values))
        torch.testing.assert_close(whole[s].double(), dense_attention(*rows, spec), atol=1e-5, rtol=1e-5)
        for query_len in (1, 3, 16, 37):
            assert torch.equal(cached.attend([s], [query_len])[0], whole[s][-query_len:])


def test_codes_are_the_nearest_multiples_of_a_scale_of_their_row() -> None:
    rows = torch.tensor([[127.0, -1.5, 0.5, 3.2], [0.0, 0.0, 0.0, 0.0], [-2.54, 2.54, 1.0, 0.01]])
    found = coded(rows)
    assert found[:, :4].tolist() == [[127, -2, 0, 3], [0, 0, 0, 0], [-127, 127, 50, 0]]
    torch.testing.assert_close(found[:, 4:].contiguous().view(torch.float32)[:, 0], torch.tensor([1.0, 0.0, 0.02]))
    assert decoded(coded(torch.tensor([[1.0, math.inf], [math.nan, 2.0]]))).isnan().all()


@pytest.mark.some(1)
@plain_and_all
@pytest.mark.parametrize("head_size", [12, 16, 64])
def test_rows_have_the_same_bits_before_the_sequence_goes_on(head_size: int, features: tuple[Feature, ...]) -> None:
    cached = Cached([700], with_features(replace(MHA, head_size=head_size), features), torch.float32)
    (whole,) = cached.attend([0], [700])
    for kv_len in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, *range(100, 700, 23)):
        for query_len in {1, kv_len}:
            (early,) = cached.attend([0], [query_len], hidden=700 - kv_len)
            assert torch.equal(early, whole[kv_len - query_len : kv_len]), (kv_len, query_len)


@plain_and_all
def test_block_size_does_not_change_the_bits(features: tuple[Feature, ...]) -> None:
    spec = with_features(MHA, features)
    outputs = [
        Cached([50, 21], spec, torch.float32, block_size).attend([0, 1], [50, 1]) for block_size in (1, 8, 16, 32)
    ]
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))
