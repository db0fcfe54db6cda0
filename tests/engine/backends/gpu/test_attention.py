"""TritonAttention against the reference, and the bits of its rows along every axis they must not depend on.

The tests marked `triton` run on a CUDA device (`make gpu`) or, with TRITON_INTERPRET=1, in Triton's interpreter on a
CPU. The variable must be set before Triton is imported, so one test without the mark runs them in their own process. An
interpreted call of a function takes a millisecond, hence the small sizes.
"""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.gpu.attention import TritonAttention
from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.engine.model.attention import AttentionMetadata, AttentionSpec
from tests.engine.backends.oracle import FEATURE_SETS, FEATURES, Feature, with_features
from tests.engine.runs import ragged_prompts
from tests.engine.steps import make_metadata, shuffled_tables
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES
from tests.parity.test_families import paged_logits

ROOT = Path(__file__).parents[4]
OTHERS = ("tests/engine/backends/gpu/test_operations.py", "tests/engine/backends/gpu/test_sampler.py")
INTERPRETED = {"TRITON_INTERPRET": "1"}
ALIKE = {"OPENBLAS_CORETYPE": "Nehalem"}
"""The interpreter multiplies by numpy. Its code for CPUs with AVX2 gives a row bits that depend on the row's place."""
DEVICE = torch.device("cpu" if os.environ.items() >= INTERPRETED.items() else "cuda")
PIECE = 64
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LIMIT_S = 1700
NUM_TESTS, NUM_FAST = 100, 16
"""At least so many are interpreted, and so many where no slow ones run: a mark or a name that is lost is seen."""

Data = TypeVar("Data", bound=Any)

interpreted = pytest.mark.triton
slow = pytest.mark.slow

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")

OTHER_DTYPES = [pytest.param(dtype, marks=slow) for dtype in TOLERANCES if dtype is not torch.float32]
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, *OTHER_DTYPES], ids=str)


@pytest.mark.skipif(not find_spec("triton"), reason="Triton is installed for Linux on x86-64 alone")
@pytest.mark.timeout(LIMIT_S + 100)
def test_the_tests_of_the_kernels_pass_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    """All of them where slow tests run, too; else one case of most. Those of the model's kernels share the process."""
    options = request.config.option
    is_fast = "not slow" in options.markexpr
    at_least = NUM_FAST if is_fast or options.seventh is not None else NUM_TESTS
    seventh = [] if options.seventh is None else ["--seventh", str(options.seventh)]
    marks = "triton and not slow" if is_fast else "triton"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *seventh, "-m", marks, __file__, *OTHERS]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | INTERPRETED | ALIKE, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= at_least
    assert " skipped" not in done.stdout


class Cached:
    """Random sequences in a scattered cache, which is NaN where nothing was written."""

    def __init__(
        self, kv_lens: Sequence[int], spec: AttentionSpec, dtype: torch.dtype, block_size: int = 16, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.kv_lens, self.spec, self._block_size = kv_lens, spec, block_size
        self.rows = [torch.randn(n, sum(sizes), spec.head_size, generator=generator).to(dtype) for n in kv_lens]
        num_blocks = sum(-(-n // block_size) for n in kv_lens) + 2
        self._tables = shuffled_tables(kv_lens, block_size, num_blocks, seed)
        shape = (2, num_blocks, spec.num_kv_heads, block_size, spec.head_size)
        self.cache = torch.full(shape, math.nan, dtype=dtype)
        metadata = self.metadata(range(len(kv_lens)), kv_lens, kv_lens)
        _, key, value = self._split(torch.cat(self.rows))
        ReferenceAttention().write(key, value, self.cache, metadata)

    def metadata(
        self, sequences: Sequence[int], query_lens: Sequence[int], kv_lens: Sequence[int], pad: int = 0
    ) -> AttentionMetadata:
        return make_metadata(query_lens, kv_lens, [self._tables[s] for s in sequences], self._block_size, pad)

    def attend(
        self, backend: TritonAttention | ReferenceAttention, step: Sequence[tuple[int, int, int]], pad: int = 0
    ) -> list[Tensor]:
        """Return the rows of each (sequence, rows, known tokens) of a step, whose keys are written anew."""
        sequences, query_lens, kv_lens = zip(*step, strict=True)
        metadata = self.metadata(sequences, query_lens, kv_lens, pad)
        rows = torch.cat([self.rows[s][kv_len - n : kv_len] for s, n, kv_len in step])
        query, key, value = self._split(torch.cat([rows, torch.full_like(rows[:1], math.nan).expand(pad, -1, -1)]))
        cache, metadata = self.cache.to(DEVICE), on_device(metadata)
        backend.write(key.to(DEVICE), value.to(DEVICE), cache, metadata)
        out = backend.attend(query.to(DEVICE), cache, metadata, on_device(self.spec)).cpu()
        assert not out[len(rows) :].any(), "padding"
        return list(out[: len(rows)].split(query_lens))

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split([self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads], 1)


def on_device(data: Data) -> Data:
    """Return the dataclass with its tensors on the device."""
    values = {field.name: getattr(data, field.name) for field in fields(data)}
    return replace(data, **{name: x.to(DEVICE) for name, x in values.items() if isinstance(x, Tensor)})


def make_spec(
    num_heads: int, num_kv_heads: int, head_size: int, window: int | None = None, features: Sequence[Feature] = FEATURES
) -> AttentionSpec:
    spec = AttentionSpec(num_heads, num_kv_heads, head_size, head_size**-0.5, window)
    return with_features(spec, tuple(features))


def check(
    cached: Cached, step: Sequence[tuple[int, int, int]], dtype: torch.dtype, pad: int = 0, matters: bool = True
) -> None:
    """Compare with the reference, and see that each feature of the spec matters if it must."""
    expected, tolerance = cached.attend(ReferenceAttention(), step, pad), TOLERANCES[dtype]
    for out, wanted in zip(cached.attend(TritonAttention(PIECE), step, pad), expected, strict=True):
        torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)
    for feature in ("window", *FEATURES) if matters else ():
        if getattr(cached.spec, feature) is not None:
            other = replace(cached.spec, **{feature: None})
            without = Cached(cached.kv_lens, other, dtype).attend(ReferenceAttention(), step, pad)
            differences = [(a - b).abs().max().item() for a, b in zip(without, expected, strict=True)]
            assert max(differences) > 3 * tolerance, f"{feature} hardly matters here"


@interpreted
@by_dtype
def test_a_ragged_step_with_every_feature_equals_the_reference(dtype: torch.dtype) -> None:
    cached = Cached([70, 9, 33], make_spec(2, 1, 24, window=40), dtype)
    check(cached, [(0, 1, 70), (1, 9, 9), (2, 3, 30)], dtype, pad=2)


@interpreted
@slow
@pytest.mark.parametrize(
    ("dtype", "features"), [(torch.float32, ()), *((dtype, FEATURES) for dtype in TOLERANCES)], ids=str
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "window"), [(2, 2, 64, None), (5, 1, 12, 20), (4, 2, 80, 100), (2, 1, 256, None)]
)
def test_any_heads_and_windows_equal_the_reference(
    heads: int, kv_heads: int, head_size: int, window: int | None, dtype: torch.dtype, features: tuple[Feature, ...]
) -> None:
    cached = Cached([150, 64, 20], make_spec(heads, kv_heads, head_size, window, features), dtype)
    check(cached, [(0, 2, 150), (1, 1, 64), (2, 20, 20)], dtype, pad=1)


@interpreted
@slow
@by_dtype
@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(2, 2, 16), (17, 1, 32), (70, 1, 64)])
def test_steps_that_decode_have_small_tiles_unless_bits_are_promised(
    heads: int, kv_heads: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = Cached([130, 9, 20], make_spec(heads, kv_heads, 16, window=100), dtype)
    small, usual = TritonAttention(PIECE, exact=False), TritonAttention(PIECE)
    launched = list[int]()
    attend = small._kernels.attend

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **constants: (
                launched.append(constants["ROWS"]),
                attend[grid](*arguments, **constants),
            )

    monkeypatch.setattr(small._kernels, "attend", Launches())
    decoding, chunk = [(0, 1, 130), (1, 1, 9), (2, 1, 20)], [(0, 1, 130), (1, 2, 9), (2, 1, 20)]
    for step, backend in ((decoding, small), (chunk, small), (decoding, usual)):
        expected, tolerance = cached.attend(ReferenceAttention(), step), TOLERANCES[dtype]
        for out, wanted in zip(cached.attend(backend, step, pad=1), expected, strict=True):
            torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)
    usual_rows = 16 if dtype is torch.float32 else 64
    assert launched == [min(rows, usual_rows), usual_rows, usual_rows]


@interpreted
@slow
@pytest.mark.parametrize("seed", range(6))
def test_random_ragged_steps_equal_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    dtype, kv_heads = rng.choice(list(TOLERANCES)), rng.choice([1, 2, 3])
    sizes = kv_heads * rng.choice([1, 2, 7]), kv_heads, rng.choice([4, 16, 40, 65])
    spec = make_spec(*sizes, features=rng.choice(FEATURE_SETS))
    cached = Cached([rng.randint(1, 130) for _ in range(rng.randint(1, 5))], spec, dtype, rng.choice([1, 3, 16, 32]))
    known = [rng.randint(1, kv_len) for kv_len in cached.kv_lens]
    step = [(s, rng.randint(1, min(n, 9)), n) for s, n in enumerate(known)]
    rng.shuffle(step)
    check(cached, step, dtype, pad=rng.randint(0, 2), matters=False)


@interpreted
@by_dtype
def test_bits_do_not_depend_on_neighbours_chunks_pieces_or_blocks(dtype: torch.dtype) -> None:
    spec = make_spec(2, 1, 16)
    cached = Cached([70, 12], spec, dtype)
    backend, unsplit = TritonAttention(PIECE), TritonAttention(PIECE, max_split_rows=0)
    whole, short = cached.attend(backend, [(0, 9, 70), (1, 9, 12)])
    assert torch.isfinite(whole).all()
    assert not torch.equal(whole, short)

    moved = Cached([70, 12], spec, dtype, block_size=5, seed=3)
    for name, rows in {
        "alone": cached.attend(backend, [(0, 1, 70)]),
        "behind a neighbour, padded": cached.attend(backend, [(1, 3, 12), (0, 2, 70)], pad=3)[1:],
        "pieces in one program, other blocks": moved.attend(unsplit, [(0, 3, 70)]),
    }.items():
        assert torch.equal(rows[0], whole[-len(rows[0]) :]), name
    for kv_len in (64, 65):
        assert torch.equal(cached.attend(backend, [(0, 1, kv_len)])[0][0], whole[kv_len - 71]), kv_len


@pytest.mark.slow
@interpreted
def test_bits_do_not_depend_on_the_longest_context_that_the_host_knows_of() -> None:
    """A CUDA graph is recorded for the longest there may be; its rows of padding are sequences without a slot."""
    spec = make_spec(2, 1, 16)
    cached, backend = Cached([70, 12, 1], spec, torch.float32), TritonAttention(PIECE)
    metadata = cached.metadata([0, 1, 2], [1, 1, 1], [70, 12, 1])
    longest = replace(
        metadata,
        kv_lens=(300,) * 3,
        slots_T=torch.cat([metadata.slots_T[:2], torch.tensor([-1])]),
        block_tables_SN=torch.nn.functional.pad(metadata.block_tables_SN, (0, 14), value=0),
    )
    query, key, value = torch.randn(3, 4, 16).to(DEVICE).split([2, 1, 1], 1)
    found = []
    for its_metadata in map(on_device, (metadata, longest)):
        cache = cached.cache.to(DEVICE, copy=True)
        backend.write(key, value, cache, its_metadata)
        found.append((backend.attend(query, cache, its_metadata, on_device(spec))[:2], cache))
    (out, cache), (padded_out, padded_cache) = found
    assert torch.equal(out, padded_out)
    is_written = (cache.nan_to_num() != padded_cache.nan_to_num()).any(-1).any(2).any(0)
    assert is_written.nonzero().tolist() == [[int(metadata.slots_T[2]) // 16, 0]]


@interpreted
@pytest.mark.parametrize("window", [None, pytest.param(100, marks=slow)])
def test_bits_do_not_depend_on_how_many_programs_share_the_pieces(window: int | None) -> None:
    cached = Cached([200, 12], make_spec(2, 1, 16, window), torch.float32)
    step = [(0, 1, 200), (1, 1, 12)]
    expected = cached.attend(TritonAttention(PIECE), step)
    assert expected[0].any()
    for programs in (1, 2, 3):
        out = cached.attend(TritonAttention(PIECE, programs=programs), step)
        assert all(map(torch.equal, out, expected)), programs


@interpreted
def test_one_changed_key_changes_the_rows_that_see_it_and_no_other() -> None:
    cached = Cached([20, 5], make_spec(2, 1, 16), torch.float32)
    step = [(0, 7, 20), (1, 1, 5)]
    before = cached.attend(TritonAttention(PIECE), step)
    cached.rows[0][15, 2, 0] += 1
    after = cached.attend(TritonAttention(PIECE), step)
    assert torch.equal(before[0][:2], after[0][:2])
    assert (before[0][2:] != after[0][2:]).any(-1).any(-1).all()
    assert torch.equal(before[1], after[1])


@interpreted
def test_a_write_stores_each_row_in_its_slot_and_nothing_else() -> None:
    cached = Cached([20, 3], make_spec(3, 3, 24), torch.bfloat16)
    metadata = on_device(cached.metadata([1, 0], [2, 5], [3, 18], pad=2))
    rows = torch.arange(9 * 9 * 24).view(9, 9, 24).bfloat16().to(DEVICE)
    written, expected = (torch.full_like(cached.cache, 7.0).to(DEVICE) for _ in range(2))
    TritonAttention().write(rows[:, 3:6], rows[:, 6:], written, metadata)
    ReferenceAttention().write(rows[:, 3:6], rows[:, 6:], expected, metadata)
    assert torch.equal(written, expected)
    assert (written != 7.0).any(-1).sum() == 2 * 3 * 7


@interpreted
def test_a_sequence_without_keys_gives_zeros() -> None:
    cached = Cached([5, 5], make_spec(2, 2, 16, features=()), torch.float32)
    metadata = replace(cached.metadata([0, 1], [1, 1], [5, 5]), kv_lens_S=torch.tensor([5, 0], dtype=torch.int32))
    for longest in (5, 300):
        out = TritonAttention(PIECE).attend(
            torch.ones(2, 2, 16).to(DEVICE),
            cached.cache.to(DEVICE),
            on_device(replace(metadata, kv_lens=(longest, longest))),
            cached.spec,
        )
        assert out[0].all()
        assert not out[1].any()


@interpreted
@slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/engine/backends/gpu/test_cuda.py has all families")
@pytest.mark.parametrize("name", ["BLOOM", "Gemma 2, past its window", "gpt-oss, past its window"])
def test_a_model_has_the_logits_that_it_has_with_the_reference(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES[name])
    prompts = ragged_prompts(2, 20, vocab_size=90)
    expected = torch.cat(paged_logits(tmp_path, prompts, ReferenceAttention()))
    logits = torch.cat(paged_logits(tmp_path, prompts, TritonAttention(PIECE)))
    assert (logits - expected).abs().max() < 1e-4 < 1e-2 < (logits - expected.roll(1, 0)).abs().max()


def test_scratch_is_that_of_the_pieces_of_the_longest_sequence() -> None:
    if not TritonAttention.is_available():
        pytest.skip("Triton is not installed")
    backend = TritonAttention(PIECE)
    assert backend.scratch_bytes(PIECE, 64, 1) == 0
    assert backend.scratch_bytes(PIECE + 1, 64, 1) == 2 * 1024 * 66 * 4


class Grids:
    """Stands in for the kernels: knows the grid of each launch."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[int, ...]] = {}

    def __getattr__(self, name: str) -> Grids:
        self._name = name
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.of[self._name] = grid
        return lambda *args, **options: None


@pytest.mark.parametrize(("kv_heads", "shares"), [(1, 256), (8, 32), (32, 8)])
def test_a_step_for_the_longest_context_has_few_programs(kv_heads: int, shares: int) -> None:
    """As in a CUDA graph, whatever the sequences have; a window needs fewer."""
    if not TritonAttention.is_available():
        pytest.skip("Triton is not installed")
    backend, grids, size = TritonAttention(), Grids(), 32
    vars(backend).update(_kernels=grids)
    cache = torch.empty(2, 9, kv_heads, 16, 128, dtype=torch.bfloat16, device="meta")
    tensor = torch.empty(size, 1, device="meta")
    metadata = AttentionMetadata(tuple(range(size + 1)), (131_072,) * size, tensor, tensor, tensor, tensor)
    query = torch.empty(size, 32, 128, dtype=torch.bfloat16, device="meta")
    num_tiles = size * 32 // kv_heads // 64 + size
    for window, context, num in ((None, 131_072, shares), (None, 300, 2), (1000, 131_072, 5)):
        spec = make_spec(32, kv_heads, 128, window, features=())
        backend.attend(query, cache, replace(metadata, kv_lens=(context,) * size), spec)
        assert grids.of == {"attend": (num_tiles, kv_heads, num), "merge": (size, 32)}
