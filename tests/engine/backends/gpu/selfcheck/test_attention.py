"""What the comparison of a backend with the reference notices: other numbers, another cache, bits of a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.gpu.selfcheck.attention import disagreement
from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.engine.model.attention import AttentionMetadata, AttentionSpec

CPU = torch.device("cpu")
SPECS = [AttentionSpec(4, 2, 8, 0.3), AttentionSpec(4, 2, 8, 0.3, window=50)]


class Adding(ReferenceAttention):
    """Adds a number to what it computes for layers with this window; `per_row` times the number of rows, too.

    To a step of one sequence it adds `alone`, besides.
    """

    def __init__(
        self, number: float = 0.0, window: int | None = None, per_row: float = 0.0, alone: float = 0.0
    ) -> None:
        self._number, self._window, self._per_row, self._alone = number, window, per_row, alone

    def attend(
        self, query_THD: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        out_THD = super().attend(query_THD, cache_2NGBD, metadata, spec)
        number = self._number + self._alone * (len(metadata.kv_lens) == 1)
        return out_THD + (number + self._per_row * len(out_THD) if spec.window == self._window else 0)


class Forgetting(ReferenceAttention):
    """Does not store the last row."""

    def write(self, key_TGD: Tensor, value_TGD: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata) -> None:
        starts = (*metadata.query_starts[:-1], metadata.query_starts[-1] - 1)
        super().write(key_TGD, value_TGD, cache_2NGBD, replace(metadata, query_starts=starts))


@pytest.mark.parametrize(
    ("backend", "found"),
    [
        (ReferenceAttention(), None),
        (Adding(1e-5), None),
        (Adding(1e-2), "it differs from 'reference' by 1.0e-02 for decoding with a window of None"),
        (Adding(1e-2, window=50), "it differs from 'reference' by 1.0e-02 for decoding with a window of 50"),
        (Adding(torch.nan), "it differs from 'reference' by nan for decoding with a window of None"),
        (Adding(per_row=1e-6), "a row has other bits alone than in its step, for decoding with a window of None"),
        (Forgetting(), "it stores other keys and values than 'reference' for decoding with a window of None"),
    ],
)
def test_a_backend_that_differs_is_found(backend: ReferenceAttention, found: str | None) -> None:
    assert disagreement(backend, SPECS, CPU, torch.float32, block_size=16, max_model_len=1024, exact=True) == found


@pytest.mark.parametrize(
    ("number", "exact", "found"),
    [
        (1e-5, False, None),
        (1e-5, True, "a row has other bits alone than in its step, for decoding with a window of None"),
        (2e-2, False, "a row alone differs from 'reference' by 1.9e-02 for decoding with a window of None"),
    ],
)
def test_the_bits_of_a_row_alone_count_where_they_are_promised(number: float, exact: bool, found: str | None) -> None:
    backend = Adding(alone=number)
    assert disagreement(backend, SPECS, CPU, torch.float32, block_size=16, max_model_len=1024, exact=exact) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_feature_takes_part(dtype: torch.dtype) -> None:
    spec = replace(SPECS[0], alibi_slopes=torch.full((4,), 0.1), sinks=torch.zeros(4), softcap=2.0)

    class Without(ReferenceAttention):
        """Ignores one feature."""

        def __init__(self, feature: str) -> None:
            self._feature = feature

        def attend(
            self, query_THD: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
        ) -> Tensor:
            return super().attend(query_THD, cache_2NGBD, metadata, replace(spec, **{self._feature: None}))

    assert disagreement(ReferenceAttention(), [spec], CPU, dtype, block_size=3, max_model_len=1024, exact=True) is None
    for feature in ("alibi_slopes", "sinks", "softcap"):
        found = disagreement(Without(feature), [spec], CPU, dtype, block_size=3, max_model_len=1024, exact=True)
        assert found is not None
        assert found.startswith("it differs from 'reference' by ")


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("window", "max_model_len", "is_seen"),
    [(1024, 8192, True), (1024, 1100, True), (4096, 4200, True), (1024, 1024, False), (40_000, 60_000, False)],
)
def test_a_window_that_hides_nothing_is_seen_where_a_context_exceeds_it(
    window: int, max_model_len: int, is_seen: bool
) -> None:
    """Contexts are bounded by what the host's memory holds, and by what a request may have."""
    longest = 0

    class Unbounded(ReferenceAttention):
        def attend(
            self, query_THD: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
        ) -> Tensor:
            nonlocal longest
            longest = max(longest, *metadata.kv_lens)
            return super().attend(query_THD, cache_2NGBD, metadata, replace(spec, window=None))

    spec = AttentionSpec(2, 1, 8, 0.3, window=window)
    found = disagreement(Unbounded(), [spec], CPU, torch.float32, 16, max_model_len, exact=True)
    assert (found is not None) == is_seen
    assert longest == (min(window + 300, max_model_len) if is_seen else 700)
    assert disagreement(ReferenceAttention(), [spec], CPU, torch.float32, 16, max_model_len, exact=True) is None
