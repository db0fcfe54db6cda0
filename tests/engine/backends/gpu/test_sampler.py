"""The kernels of sampling against torch and the definition, and whether they are chosen.

The tests marked `triton` run on a CUDA device (`make gpu`) or in Triton's interpreter, in the process that
tests/engine/backends/gpu/test_attention.py starts.
"""

from __future__ import annotations

import gc
import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gptserve.engine import staging
from gptserve.engine.backends.gpu.sampler import TritonSampler
from gptserve.engine.backends.gpu.selfcheck.proofs import Proofs
from gptserve.engine.backends.gpu.selfcheck.sampler import NUM_PROBES, agreeing_sampler, choose_sampler
from gptserve.engine.backends.gpu.token_counts import DeviceCounts
from gptserve.engine.backends.reference.adjustments import adjusted
from gptserve.engine.backends.reference.draw import choose_by_torch
from gptserve.engine.backends.reference.grammar_masks import with_masks
from gptserve.engine.sampling.adjustments import Adjustment
from gptserve.engine.sampling.choice import Choice
from gptserve.engine.sampling.token_counts import TokenCounts, TokensBefore
from tests.engine.backends.cpu.test_draw import assert_drawn
from tests.engine.backends.gpu.host_copies import DEVICE as META
from tests.engine.backends.gpu.host_copies import Copies, Lists
from tests.engine.backends.gpu.test_attention import DEVICE, interpreted, slow
from tests.engine.sampling.test_adjustments import VOCAB, choices_at, random_batch

CPU = torch.device("cpu")
PIECE = 256
FILTERS: list[dict[str, Any]] = [
    *({}, {"top_p": 0.9}, {"top_p": 0.3}, {"top_k": 3}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.8}),
    {"top_k": 100, "top_p": 0.99, "min_p": 0.01},
]


def sampler_for(vocab_size: int, max_rows: int = 12) -> TritonSampler:
    return TritonSampler(vocab_size, max_rows, DEVICE, PIECE)


def tokens(sampler: TritonSampler, logits: Tensor, choices: list[Choice]) -> list[int]:
    return sampler.choose(logits.to(DEVICE), choices).tolist()


@interpreted
@pytest.mark.parametrize("vocab_size", [17, pytest.param(300, marks=slow), pytest.param(512, marks=slow)])
def test_tokens_are_those_of_the_definition(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(len(FILTERS), vocab_size, generator=generator)
    rng = np.random.default_rng(vocab_size)
    choices = [Choice(rng.random(), temperature=rng.uniform(0.3, 2))._replace(**kind) for kind in FILTERS]
    found = tokens(sampler_for(vocab_size), logits, choices)
    for row, choice, token in zip(logits, choices, found, strict=True):
        assert_drawn(row, choice, token)


@pytest.mark.slow
@interpreted
def test_a_row_has_the_same_token_beside_others_and_behind_padding() -> None:
    logits = 3 * torch.randn(3, 300, generator=torch.Generator().manual_seed(3))
    choices = [Choice(0.8, temperature=1.0), Choice(0.5, 0.9, 1.0), Choice(0.7, 0.9, 2.0, 0.0, 50)]
    sampler = sampler_for(300)
    together = tokens(sampler, logits, choices)
    padded = torch.cat([logits[:1], torch.full_like(logits, math.nan)]).to(DEVICE)
    assert sampler.choose(padded, choices[:1], num_rows=4).tolist() == together[:1]
    assert tokens(sampler, logits[2:], choices[2:]) == together[2:]


@pytest.mark.slow
@interpreted
def test_the_ends_of_the_noise_and_equals() -> None:
    last, tied = math.nextafter(1, 0), torch.tensor([0.0, 1.0, 3.0, 0.0, 1.0, 3.0, 0.0, -1.0])
    cases = [
        (tied, Choice(), 2),
        (tied, Choice(0.0, temperature=1.0), 0),
        (tied, Choice(last, temperature=1.0), 7),
        (tied, Choice(last, temperature=1.0, top_k=1), 5),
        (tied, Choice(0.6, 1e-9, 1.0), 5),
        (tied, Choice(0.4, temperature=1.0, min_p=1.0), 2),
        (tied * 100, Choice(0.999, temperature=1e-6), 5),
        (torch.zeros(8), Choice(last, 0.5, 1.0, 0.0, 2), 7),
        (tied - torch.inf, Choice(0.5, temperature=1.0), -1),
        (torch.where(tied == -1, torch.nan, tied), Choice(), -1),
        (torch.where(tied == -1, torch.inf, tied), Choice(0.5, 0.9, 1.0, 0.0, 3), -1),
    ]
    logits, choices, expected = zip(*cases, strict=True)
    assert tokens(sampler_for(8), torch.stack(logits), list(choices)) == list(expected)


@interpreted
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=slow) for seed in range(2, 12))])
def test_adjusted_scores_have_the_bits_of_torch(seed: int) -> None:
    raw, positions = random_batch(seed)
    choices, sampler, found = choices_at(positions), sampler_for(VOCAB), list[Tensor]()
    on_device = raw.to(DEVICE)

    def draw(logits: Tensor, kind: Any) -> Tensor:
        rows = sampler._table[: len(logits), 5, None] > 0
        found.append(torch.where(rows, sampler._scores[: len(logits)], logits).cpu())
        return torch.zeros(len(logits), dtype=torch.int64, device=DEVICE)

    sampler.choose(on_device, choices, draw)
    expected = with_masks(
        adjusted(raw, [choice.adjustment for choice in choices]), [choice.allowed for choice in choices]
    )
    assert not torch.equal(expected, raw)
    assert torch.equal(found[0].view(torch.int32), expected.view(torch.int32))


@interpreted
@slow
def test_the_kernels_agree_with_torch_and_are_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    sampler = agreeing_sampler(lambda: sampler_for(300), 300, DEVICE)
    assert sampler is not None
    assert sampler.build.startswith("triton 3")
    assert sampler.counts.words is None, "what it takes would count as weights when memory is measured"
    assert not caplog.records


def test_a_cpu_has_no_such_sampler(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_sampler(300, 20, CPU) is None
    assert not caplog.records


class ByTorch(TritonSampler):
    """A stand-in in torch. Of a step's rows `wrong` has another token."""

    build, wrong = "triton 0", -1

    def __init__(self, vocab_size: int) -> None:
        self.counts = DeviceCounts(vocab_size, NUM_PROBES, CPU)

    def choose(self, logits: Tensor, choices: Any, draw: Any = None, num_rows: int | None = None) -> Tensor:
        chosen = choose_by_torch(logits, choices)
        chosen[self.wrong] += self.wrong >= 0
        return chosen


def test_torch_takes_the_place_of_kernels_that_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> TritonSampler:
        raise ModuleNotFoundError("No module named 'triton'")

    assert agreeing_sampler(missing, 300, CPU) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "sampling: torch, which is slower, is used instead of Triton kernels: "
        "they failed with ModuleNotFoundError: No module named 'triton'"
    )


def test_a_sampler_that_is_proved_is_not_compared_again(tmp_path: Path) -> None:
    sampler, proofs = ByTorch(300), Proofs(tmp_path)
    assert agreeing_sampler(lambda: sampler, 300, CPU, proofs) is sampler
    sampler.wrong = 0
    assert agreeing_sampler(lambda: sampler, 300, CPU, proofs) is sampler
    other = ByTorch(301)
    other.wrong = 0
    assert agreeing_sampler(lambda: other, 301, CPU, proofs) is None


@pytest.mark.parametrize("wrong", range(NUM_PROBES))
def test_torch_takes_the_place_of_kernels_that_choose_another_token(
    wrong: int, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = ByTorch(300)
    assert agreeing_sampler(lambda: sampler, 300, CPU) is sampler
    sampler.wrong = wrong
    assert agreeing_sampler(lambda: sampler, 300, CPU) is None
    assert caplog.messages == [
        "sampling: torch, which is slower, is used instead of Triton kernels: they choose other tokens"
    ]


def test_a_step_of_more_rows_than_there_is_room_for_is_drawn_by_torch() -> None:
    sampler = object.__new__(TritonSampler)
    sampler._allocate(300, 2, CPU, PIECE)
    logits, choices = torch.randn(3, 300), [Choice(0.5, 0.9, 1.0, 0.0, 7)] * 3
    assert torch.equal(sampler.choose(logits, choices), choose_by_torch(logits, choices))


class Launches:
    """Stands in for the kernels: it counts."""

    count = 0

    def __getattr__(self, kernel: str) -> Any:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.count += 1

        return launch


@pytest.mark.parametrize(
    ("change", "num_launches"),
    [({}, 3), ({"top_p": 0.9}, 12), ({"top_k": 9}, 20), ({"allowed": np.zeros(16, np.uint32)}, 4)],
    ids=str,
)
def test_a_draw_takes_one_copy_and_nothing_waits(
    change: dict[str, Any], num_launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "pinned", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    sampler, launches = object.__new__(TritonSampler), Launches()
    vars(sampler).update(_kernels=launches)
    sampler._allocate(500, 8, META, PIECE)
    logits, choices = torch.empty(8, 500, device=META), [Choice(0.5, temperature=1.0, **change)] * 5
    with Lists(), Copies() as copies:
        assert sampler.choose(logits, choices, num_rows=8).shape == (5,)
    assert copies.count == 1
    assert launches.count == num_launches


def test_penalties_bias_and_bans_take_no_copy_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "pinned", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    sampler, launches = object.__new__(TritonSampler), Launches()
    vars(sampler).update(_kernels=launches)
    sampler._allocate(VOCAB, 12, META, PIECE)
    _, positions = random_batch(5)
    for known in ([], [4], [5, 6]):
        for position in positions:
            position.known.extend(known)
        with Lists(), Copies() as copies:
            sampler.choose(torch.empty(12, VOCAB, device=META), choices_at(positions))
        assert copies.count == 1


def test_requests_with_masks_and_without_are_adjusted_by_one_kernel() -> None:
    """Or serving would wait for the compiler: the load check has rows of both kinds in each step."""
    sampler, compiled = object.__new__(TritonSampler), list[dict[str, Any]]()

    class Noting(Launches):
        def __call__(self, *arguments: Any, **constants: Any) -> None:
            compiled.append({"types": [getattr(x, "dtype", type(x)) for x in arguments], **constants})

        def __getattr__(self, kernel: str) -> Any:
            return self if kernel == "adjust" else Launches()

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self

    vars(sampler).update(_kernels=Noting())
    sampler._allocate(300, 12, CPU, PIECE)
    masked = Choice(allowed=np.zeros(10, np.uint32))
    nothing = array("q"), array("f"), array("q")
    penalized = Choice(adjustment=Adjustment(1.3, 0.0, 0.0, TokensBefore(TokenCounts(1), [1, 2]), *nothing))
    for choices in ([masked, penalized], [masked], [penalized]):
        sampler.choose(torch.zeros(len(choices), 300), choices)
    assert len(compiled) == 3
    assert compiled[0] == compiled[1] == compiled[2]


def test_counts_are_given_back_though_other_requests_have_masks() -> None:
    sampler = object.__new__(TritonSampler)
    vars(sampler).update(_kernels=Launches())
    sampler._allocate(VOCAB, 12, CPU, PIECE)
    before = TokensBefore(TokenCounts(1), [1, 2])
    nothing = array("q"), array("f"), array("q")
    sampler.choose(torch.zeros(1, VOCAB), [Choice(adjustment=Adjustment(1.3, 0.0, 0.0, before, *nothing))])
    assert sampler.counts.words is not None
    masked = [Choice(allowed=np.zeros(16, np.uint32))]
    sampler.choose(torch.zeros(1, VOCAB), masked)
    assert sampler.counts.words is not None, "the sequence waits"
    del before
    gc.collect()
    sampler.choose(torch.zeros(1, VOCAB), masked)
    assert sampler.counts.words is None
