"""CpuAttention against its formula in fp64, and the bits of its rows along every axis they must not depend on."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.model.attention import AttentionMetadata, AttentionSpec
from tests.engine.backends.oracle import FEATURE_SETS, FEATURES, Feature, dense_attention, feature_id, with_features

pytestmark = [
    pytest.mark.skipif(not CpuAttention.is_available(), reason="the package was installed without a compiler"),
    pytest.mark.usefixtures("set_threads"),
]

DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (70, 33, 1, 16)

plain_and_all = pytest.mark.parametrize("features", [(), FEATURES], ids=feature_id)

Step = list[tuple[int, int]]
"""(index of a sequence, how many of its next tokens) for each sequence of the step."""


@dataclass(frozen=True)
class SequenceTensors:
    query_LHD: Tensor
    key_LGD: Tensor
    value_LGD: Tensor


@pytest.mark.some(16)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [8, 16, 24, 64, 80, 128])
def test_agrees_with_dense_attention_for_every_head_size(
    backend: CpuAttention, dtype: torch.dtype, head_size: int
) -> None:
    _check_against_oracle(backend, dtype, _spec(num_heads=2, num_kv_heads=2, head_size=head_size))


@pytest.mark.some(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (7, 1), (8, 2)])
def test_query_heads_share_kv_heads_in_order(
    backend: CpuAttention, dtype: torch.dtype, num_heads: int, num_kv_heads: int
) -> None:
    _check_against_oracle(backend, dtype, _spec(num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 70, 1000])
def test_window_hides_all_but_the_latest_tokens(backend: CpuAttention, window: int) -> None:
    spec = replace(_spec(num_heads=4, num_kv_heads=2), window=window)
    _check_against_oracle(backend, torch.float32, spec)
    _check_against_oracle(backend, torch.bfloat16, spec)


@pytest.mark.some(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 65, 100, 200])
def test_windows_longer_than_what_is_fetched_ahead(
    backend: CpuAttention, dtype: torch.dtype, window: int | None
) -> None:
    spec = replace(_spec(num_heads=4, num_kv_heads=2), window=window)
    sequence = _sequences(spec, dtype, (300,))[0]
    _check_rows(_run(backend, [sequence], spec, [[(0, n)] for n in (250, 1, 1, 48)])[0], sequence, spec)


@pytest.mark.some(14)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", FEATURE_SETS[1:], ids=feature_id)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "window"), [(3, 3, None), (6, 2, 17), (7, 1, None), (6, 1, 40)])
def test_slopes_sinks_and_softcap_combine_with_each_other_and_with_windows_and_shared_heads(
    backend: CpuAttention,
    dtype: torch.dtype,
    features: tuple[Feature, ...],
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
) -> None:
    spec = with_features(replace(_spec(num_heads=num_heads, num_kv_heads=num_kv_heads), window=window), features)
    _check_against_oracle(backend, dtype, spec)
    longest = _sequences(spec, dtype)[0]
    expected = _oracle(longest, spec)
    for feature in features:
        without = _oracle(longest, replace(spec, **{feature: None}))
        assert (expected - without).abs().max() > 0.1, f"{feature} hardly matters here"


@pytest.mark.some(7)
@pytest.mark.parametrize("softcap", [1e-3, 0.3, 30.0, 50.0, 1000.0])
def test_softcap_holds_for_scores_far_below_and_far_above_it(backend: CpuAttention, softcap: float) -> None:
    spec = replace(_spec(), scale=1.0, softcap=softcap)
    for factor in (1e-3, 1.0, 1e3):
        sequences = [replace(s, query_LHD=s.query_LHD * factor) for s in _sequences(spec, torch.float32)]
        for sequence, out_LHD in zip(sequences, _run(backend, sequences, spec, _whole()), strict=True):
            expected = _oracle(sequence, spec)
            assert (out_LHD.double() - expected).abs().max() < 2**-20 * softcap + 1e-5


def test_sink_far_above_the_scores_leaves_nothing_and_one_far_below_no_trace(backend: CpuAttention) -> None:
    spec = _spec()
    sequences = _sequences(spec, torch.bfloat16)
    plain = _run(backend, sequences, spec, _whole())
    sinks = torch.tensor([1e4, -1e4, 1e30, -1e30])
    for before, after in zip(plain, _run(backend, sequences, replace(spec, sinks=sinks), _whole()), strict=True):
        assert not after[:, ::2].any()
        assert torch.equal(after[:, 1::2], before[:, 1::2])


def test_slope_and_sink_of_a_head_are_its_own(backend: CpuAttention) -> None:
    spec = with_features(_spec(num_heads=6, num_kv_heads=2), FEATURES)
    sequences = _sequences(spec, torch.float32)
    before = _run(backend, sequences, spec, _whole())[0]
    for name, floats_H in (("alibi_slopes", spec.alibi_slopes), ("sinks", spec.sinks)):
        assert floats_H is not None
        changed = replace(spec, **{name: floats_H + torch.eye(6)[4]})
        differs_LH = (_run(backend, sequences, changed, _whole())[0] != before).any(-1)
        assert not differs_LH[:, [0, 1, 2, 3, 5]].any()
        assert differs_LH[1:, 4].all()


@pytest.mark.some(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_slopes_are_as_exact_far_out_as_near(backend: CpuAttention, dtype: torch.dtype) -> None:
    """Where the window holds the same tokens again and again, at distances alike, so must the bits be."""
    spec = replace(with_features(_spec(), FEATURES), window=24)
    period = _sequences(spec, dtype)[0]
    sequence = SequenceTensors(
        *(x[:16].repeat(400, 1, 1) for x in (period.query_LHD, period.key_LGD, period.value_LGD))
    )
    (out_LHD,) = _run(backend, [sequence], spec, [[(0, 6400)]])
    assert torch.equal(out_LHD[32:], out_LHD[32:48].repeat(398, 1, 1))
    assert not torch.equal(out_LHD[16:32], out_LHD[32:48]), "the first rows see less"


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_scores_select_one_value_exactly(backend: CpuAttention, dtype: torch.dtype) -> None:
    spec = replace(_spec(), scale=1.0)
    for sign in (1, -1):  # the latest position, or the first, leads by 1920: every other weight is exactly 0
        sequences = [
            SequenceTensors(torch.full_like(s.query_LHD, 30), sign * _ramp(s.key_LGD), s.value_LGD)
            for s in _sequences(spec, dtype)
        ]
        for sequence, out_LHD in zip(sequences, _run(backend, sequences, spec, _whole()), strict=True):
            selected = sequence.value_LGD if sign > 0 else sequence.value_LGD[:1].expand_as(sequence.value_LGD)
            assert torch.equal(out_LHD, selected.repeat_interleave(2, 1))


def test_equal_keys_give_the_mean_of_the_values(backend: CpuAttention) -> None:
    spec = _spec()
    sequences = [replace(s, key_LGD=torch.full_like(s.key_LGD, 3e4)) for s in _sequences(spec, torch.float32)]
    for sequence, out_LHD in zip(sequences, _run(backend, sequences, spec, _whole()), strict=True):
        counts = torch.arange(1, len(out_LHD) + 1)[:, None, None]
        mean_LGD = sequence.value_LGD.double().cumsum(0) / counts
        torch.testing.assert_close(out_LHD.double(), mean_LGD.repeat_interleave(2, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.some(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("head_size", [64, 24])
@plain_and_all
def test_bits_do_not_depend_on_batch_chunks_or_blocks(
    backend: CpuAttention, dtype: torch.dtype, window: int | None, head_size: int, features: tuple[Feature, ...]
) -> None:
    spec = with_features(replace(_spec(num_heads=6, num_kv_heads=2, head_size=head_size), window=window), features)
    sequences = _sequences(spec, dtype)
    alone = [_run(backend, [sequence], spec, [[(0, len(sequence.query_LHD))]])[0] for sequence in sequences]

    assert _same_bits(alone, _run(backend, sequences, spec, _whole())), "batch"
    assert _same_bits(alone[::-1], _run(backend, sequences[::-1], spec, [list(enumerate(LENGTHS[::-1]))])), "order"
    for chunk in (1, 3, 7, 16, 33):
        assert _same_bits(alone, _run(backend, sequences, spec, _chunks(chunk))), f"chunks of {chunk}"
    for block_size in (1, 8, 32):
        assert _same_bits(alone, _run(backend, sequences, spec, _chunks(20), block_size)), f"blocks of {block_size}"
    for seed in (1, 2):
        assert _same_bits(alone, _run(backend, sequences, spec, _whole(), seed=seed)), "placement"
    assert _same_bits(alone, _run(backend, sequences, spec, _whole(), num_padding=3)), "padding"


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", DTYPES)
@plain_and_all
def test_bits_of_a_long_sequence_do_not_depend_on_its_chunks(
    backend: CpuAttention, dtype: torch.dtype, features: tuple[Feature, ...]
) -> None:
    spec = with_features(_spec(), features)
    [sequence] = _sequences(spec, dtype, lengths=(700,))
    whole = _run(backend, [sequence], spec, [[(0, 700)]])

    for chunk in (37, 101):
        steps = [[(0, min(chunk, 700 - start))] for start in range(0, 700, chunk)]
        assert _same_bits(whole, _run(backend, [sequence], spec, steps)), f"chunks of {chunk}"


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", DTYPES)
@plain_and_all
def test_bits_do_not_depend_on_the_number_of_threads(
    backend: CpuAttention, dtype: torch.dtype, set_threads: Callable[[int], None], features: tuple[Feature, ...]
) -> None:
    many, one = (with_features(spec, features) for spec in (_spec(), _spec(num_heads=8, num_kv_heads=1)))
    outs = []
    for num_threads in (1, 2, 3):  # one token alone on one KV head is cut by query heads, the finer the more threads
        set_threads(num_threads)
        outs.append(_run(backend, _sequences(many, dtype), many, _chunks(20)))
        outs[-1] += _run(backend, _sequences(one, dtype)[:1], one, [[(0, 69)], [(0, 1)]])
    assert _same_bits(outs[0], outs[1])
    assert _same_bits(outs[0], outs[2])


@pytest.mark.parametrize("dtype", DTYPES)
@plain_and_all
def test_one_changed_key_changes_the_rows_that_see_it_and_no_other(
    backend: CpuAttention, dtype: torch.dtype, features: tuple[Feature, ...]
) -> None:
    spec = with_features(_spec(), features)
    sequences = _sequences(spec, dtype)
    before = _run(backend, sequences, spec, _whole())
    sequences[0].key_LGD[40, 0, 0] += 1
    after = _run(backend, sequences, spec, _whole())
    assert not _same_bits(before, after)
    assert _same_bits(before[1:], after[1:])
    assert torch.equal(before[0][:40], after[0][:40])
    assert torch.equal(before[0][:, 2:], after[0][:, 2:]), "heads of another KV head"
    for row in range(40, LENGTHS[0]):
        assert not torch.equal(before[0][row, :2], after[0][row, :2])


def test_a_value_no_row_may_see_is_never_touched(backend: CpuAttention) -> None:
    spec = replace(_spec(), window=8)
    sequences = _sequences(spec, torch.float32)
    before = _run(backend, sequences, spec, _whole())
    sequences[0].value_LGD[50] = math.nan
    after = _run(backend, sequences, spec, _whole())
    assert torch.equal(before[0][:50], after[0][:50])
    assert after[0][50:58].isnan().all()
    assert torch.equal(before[0][58:], after[0][58:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_rows_are_zero_and_store_nothing(backend: CpuAttention, dtype: torch.dtype) -> None:
    spec = _spec()
    cache = torch.full((2, 2, 2, 16, 64), math.nan, dtype=dtype)
    metadata = _metadata([3], [3], torch.tensor([[1]]), 16, num_padding=2)
    qkv = torch.randn(5, 8, 64).to(dtype)
    backend.write(qkv[:, 4:6], qkv[:, 6:], cache, metadata)
    out = backend.attend(qkv[:, :4], cache, metadata, spec)
    assert torch.equal(out[3:], torch.zeros(2, 4, 64, dtype=dtype))
    assert torch.equal(cache[0, 1, :, :3], qkv[:3, 4:6].transpose(0, 1))
    assert torch.equal(cache[1, 1, :, :3], qkv[:3, 6:].transpose(0, 1))
    assert cache[:, 0].isnan().all()
    assert cache[:, 1, :, 3:].isnan().all()


def test_large_writes_are_stored_whole(backend: CpuAttention) -> None:
    cache = torch.full((2, 40, 2, 16, 64), math.nan)
    metadata = _metadata([600], [600], torch.arange(39)[None], 16)
    key, value = torch.randn(2, 600, 2, 64)
    backend.write(key, value, cache, metadata)
    stored = cache[:, :39].transpose(2, 3).flatten(1, 2)[:, :600]
    assert torch.equal(stored, torch.stack([key, value]))


def test_new_metadata_is_not_mistaken_for_the_last(backend: CpuAttention) -> None:
    spec = _spec()
    cache = torch.randn(2, 4, 2, 16, 64)
    query = torch.randn(1, 4, 64)
    first = backend.attend(query, cache, _metadata([1], [16], torch.tensor([[1]]), 16), spec)
    second = backend.attend(query, cache, _metadata([1], [16], torch.tensor([[2]]), 16), spec)
    assert not torch.equal(first, second)


def test_the_scratch_takes_the_bytes_it_was_said_to(
    set_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, taken = torch.empty, []

    def recording(*size: int) -> Tensor:
        taken.append(empty(*size).nbytes)
        return empty(*size)

    backend, spec = CpuAttention(), _spec()
    monkeypatch.setattr(torch, "empty", recording)
    for num_threads in (1, 2, 1, 2):  # fewer threads do not give it back, for the next step may use more
        set_threads(num_threads)
        for kv_len in (300, 20):
            cache, tables = torch.zeros(2, 20, 2, 16, 64), torch.arange(19)[None]
            backend.attend(torch.zeros(1, 4, 64), cache, _metadata([1], [kv_len], tables, 16), spec)
    grown = [size for size in taken if size]
    assert grown == [backend.scratch_bytes(300, 64, num_threads) for num_threads in (1, 2)]
    assert backend.scratch_bytes(131_072, 64, 64) == pytest.approx(1.08e9, rel=0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_kernel_runs_in_the_threads_of_the_linears(set_threads: Callable[[int], None]) -> None:
    """The team of engine/backends/cpu."""
    set_threads(2)
    torch.ones(1 << 20).relu()
    spec = _spec()
    for dtype in DTYPES:
        native.stop()
        threads = set(os.listdir("/proc/self/task"))
        _run(CpuAttention(), _sequences(spec, dtype), spec, _chunks(20))
        assert len(set(os.listdir("/proc/self/task")) - threads) == 1
    runtimes = set(re.findall(r"\S*/lib(?:gomp|omp|iomp)\S*", Path("/proc/self/maps").read_text()))
    assert len(runtimes) == 1


def test_without_the_library_the_backend_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert not CpuAttention.is_available()
    assert CpuAttention.supported_instructions() == ()


def _spec(num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 64) -> AttentionSpec:
    return AttentionSpec(num_heads, num_kv_heads, head_size, head_size**-0.5)


def _sequences(spec: AttentionSpec, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS) -> list[SequenceTensors]:
    generator = torch.Generator().manual_seed(0)
    heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    return [
        SequenceTensors(*(torch.randn(n, h, spec.head_size, generator=generator).to(dtype) for h in heads))
        for n in lengths
    ]


def _ramp(like_LGD: Tensor) -> Tensor:
    return torch.arange(len(like_LGD))[:, None, None].expand_as(like_LGD).to(like_LGD.dtype)


def _whole() -> list[Step]:
    return [list(enumerate(LENGTHS))]


def _chunks(size: int) -> list[Step]:
    """Cut every sequence into chunks of `size`; each step has a chunk of all that are not done."""
    return [[(i, min(size, n - at)) for i, n in enumerate(LENGTHS) if at < n] for at in range(0, max(LENGTHS), size)]


def _run(
    backend: CpuAttention,
    sequences: list[SequenceTensors],
    spec: AttentionSpec,
    steps: list[Step],
    block_size: int = 16,
    seed: int = 0,
    num_padding: int = 0,
) -> list[Tensor]:
    """Return each sequence's rows, computed in `steps` over a cache of NaN with blocks in the order `seed` gives."""
    num_blocks = [-(-len(s.key_LGD) // block_size) for s in sequences]
    blocks = torch.randperm(sum(num_blocks) + 2, generator=torch.Generator().manual_seed(seed))
    tables = blocks[: sum(num_blocks)].split(num_blocks)
    dtype = sequences[0].query_LHD.dtype
    shape = (2, len(blocks), spec.num_kv_heads, block_size, spec.head_size)
    cache = torch.full(shape, math.nan, dtype=dtype)
    outs: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    fused = [torch.cat([s.query_LHD, s.key_LGD, s.value_LGD], 1) for s in sequences]
    padding = torch.full((num_padding, *fused[0].shape[1:]), math.nan, dtype=dtype)
    for step in steps:
        rows = [slice(done[i], done[i] + n) for i, n in step]
        qkv = torch.cat([*(fused[i][row] for (i, _), row in zip(step, rows, strict=True)), padding])
        query, key, value = qkv.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        table = torch.nn.utils.rnn.pad_sequence([tables[i] for i, _ in step], batch_first=True)
        kv_lens = [row.stop for row in rows]
        metadata = _metadata([n for _, n in step], kv_lens, table, block_size, num_padding)
        backend.write(key, value, cache, metadata)
        out = backend.attend(query, cache, metadata, spec)
        for (i, n), part in zip(step, out.split([*(n for _, n in step), num_padding]), strict=False):
            outs[i].append(part)
            done[i] += n
    return [torch.cat(parts) for parts in outs]


def _metadata(
    query_lens: list[int], kv_lens: list[int], tables: Tensor, block_size: int, num_padding: int = 0
) -> AttentionMetadata:
    starts = [0]
    slots = []
    for blocks, query_len, kv_len in zip(tables.tolist(), query_lens, kv_lens, strict=True):
        starts.append(starts[-1] + query_len)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(kv_len - query_len, kv_len)]
    return AttentionMetadata(
        query_starts=tuple(starts),
        kv_lens=tuple(kv_lens),
        query_starts_S1=torch.tensor(starts, dtype=torch.int32),
        kv_lens_S=torch.tensor(kv_lens, dtype=torch.int32),
        block_tables_SN=tables.int().contiguous(),
        slots_T=torch.tensor(slots + [-1] * num_padding),
    )


def _same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def _check_against_oracle(backend: CpuAttention, dtype: torch.dtype, spec: AttentionSpec) -> None:
    sequences = _sequences(spec, dtype)
    for sequence, out_LHD in zip(sequences, _run(backend, sequences, spec, _chunks(50)), strict=True):
        _check_rows(out_LHD, sequence, spec)


def _check_rows(out_LHD: Tensor, sequence: SequenceTensors, spec: AttentionSpec) -> None:
    dtype = sequence.query_LHD.dtype
    assert out_LHD.dtype is dtype
    # A bf16 output is an fp32 one rounded to 8 significant bits: half a unit in the last place is 2^-9.
    rtol = 1e-5 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(out_LHD.double(), _oracle(sequence, spec), rtol=rtol, atol=1e-5)


def _oracle(sequence: SequenceTensors, spec: AttentionSpec) -> Tensor:
    return dense_attention(sequence.query_LHD, sequence.key_LGD, sequence.value_LGD, spec)
