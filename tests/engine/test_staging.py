"""What goes from the host to a device and back, counted on torch's meta device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gptserve.engine import staging
from gptserve.engine.backends.reference.draw import choose_by_torch
from gptserve.engine.backends.reference.logprobs import (
    best_of_rows,
    read_tokens_with_logprobs,
    tokens_with_logprobs,
    top_logprobs_by_torch,
)
from gptserve.engine.model.batch import known_token_ids, model_input
from gptserve.engine.model.layout import Span, lay_out
from gptserve.engine.request import SamplingParams, TokenLogprobs
from gptserve.engine.runner.logprobs import top_logprobs
from gptserve.engine.runner.runner import _no_tokens
from gptserve.engine.runner.sampler import sample
from gptserve.engine.sampling.choice import Choice, SamplingPosition, SamplingState
from gptserve.engine.staging import begin_wait, to_device, to_host
from tests.engine.backends.gpu.host_copies import DEVICE, Copies, Lists

CHOICES = [Choice(), Choice(0.5, 0.9, 1.0, 0.1, 5), Choice(0.3, 1.0, 0.7), Choice(0.1, 0.5, 1.0)]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """Count copies; only a machine with a GPU has pinned memory."""
    monkeypatch.setattr(staging, "pinned", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    with Lists(), Copies() as counted:
        yield counted


def test_arrays_of_any_type_keep_shape_and_type_and_take_one_copy(copies: Copies) -> None:
    arrays = [np.ones(3, np.int32), np.ones((2, 5)), np.zeros(0, np.int64), np.ones((2, 2), bool)]
    found = to_device(DEVICE, *arrays)
    assert [(tuple(x.shape), x.dtype) for x in found] == [(x.shape, torch.from_numpy(x).dtype) for x in arrays]
    assert all(x.is_meta for x in found)
    assert copies.count == 1


def test_arrays_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of the one copy, seen on their way."""
    sent: list[Tensor] = []

    def pinned(num_bytes: int) -> Tensor:
        sent.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return sent[-1]

    monkeypatch.setattr(staging, "pinned", pinned)
    arrays = [np.arange(3, dtype=np.int32), np.arange(10.0).reshape(2, 5), np.array([[True, False]])]
    its_parts = to_device(DEVICE, *arrays)
    (buffer,) = sent
    for array, part in zip(arrays, its_parts, strict=True):
        start = part.storage_offset() * part.itemsize
        assert start % 16 == 0
        assert buffer[start : start + array.nbytes].numpy().tobytes() == array.tobytes()


def test_on_a_cpu_nothing_is_copied(copies: Copies) -> None:
    array = np.arange(4)
    (found,) = to_device(torch.device("cpu"), array)
    array[0] = 7
    assert found.tolist() == [7, 1, 2, 3]
    assert copies.count == 0


def test_the_inputs_of_a_step_take_one_copy(copies: Copies) -> None:
    spans = [Span(range(20), 0, [1, 2], 1), Span([5], 0, [1, 2], 1)]
    inputs = model_input(lay_out(spans, 16).as_numpy(), DEVICE)
    assert inputs.sampled_R.is_meta
    assert inputs.metadata.slots_T.is_meta
    assert copies.count == 1


def test_the_parameters_of_all_rows_take_one_copy_and_nothing_waits(copies: Copies) -> None:
    chosen = choose_by_torch(torch.empty(4, 5000, device=DEVICE), CHOICES)
    assert chosen.is_meta
    assert copies.count == 1


def test_masks_of_grammars_take_one_more(copies: Copies) -> None:
    masked = [choice._replace(allowed=np.zeros(16, np.int32)) for choice in CHOICES]
    choose_by_torch(torch.empty(4, 500, device=DEVICE), masked)
    assert copies.count == 2


def test_logprobs_wait_once(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[int, ...]] = []

    def tolist(self: Tensor) -> list[list[float]]:
        waits.append(tuple(self.shape))
        return [[7.0, 2.0, -1.5, 9.0, 7.0, -0.5, -1.5]] * len(self)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    entries = top_logprobs(
        torch.empty(3, 50, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE), [2, 0, 1]
    )
    assert waits == [(3, 7)]
    assert [entry.top for entry in entries] == [((9, -0.5), (7, -1.5)), (), ((9, -0.5),)]
    assert {(entry.token_id, entry.rank, entry.logprob) for entry in entries} == {(7, 2, -1.5)}
    assert copies.count == 0


def test_the_tokens_of_the_step_before_take_no_copy_and_nothing_waits(copies: Copies) -> None:
    ids = known_token_ids(
        torch.empty(8, dtype=torch.int64, device=DEVICE), torch.empty(3, dtype=torch.int64, device=DEVICE)
    )
    assert ids.is_meta
    assert copies.count == 0


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to the events of a stand-in for the stream."""
    happened: list[str] = []

    class Stream:
        def record_event(self) -> Stream:
            happened.append("recorded")
            return self

        def synchronize(self) -> None:
            happened.append("awaited")

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return happened


def test_a_step_without_tokens_is_awaited(events: list[str]) -> None:
    """Or a part of a prompt would take no time, by the clock of the scheduler."""
    finish = _no_tokens(torch.device("cuda"))
    assert events == ["recorded"], "at the launch, before the next step is given to the device"
    assert finish().token_ids == ()
    assert events == ["recorded", "awaited"]
    begin_wait(torch.device("cpu"))()
    assert len(events) == 2


def test_the_way_back_waits_for_its_own_copy_alone(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the copy is neither awaited nor seen."""
    monkeypatch.setattr(staging, "pinned", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    tensor = torch.tensor([3, -1, 2])
    read = staging._begin_copy(tensor)
    assert events == ["recorded"]
    tensor.zero_()
    assert read() == [3, -1, 2]
    assert events == ["recorded", "awaited"]
    assert to_host(torch.tensor([[1.5]]))() == [[1.5]]


def positions(*num_top: int | None) -> list[SamplingPosition]:
    """Return greedy positions whose requests ask for so many of the likeliest tokens."""
    params = [SamplingParams(temperature=0.0, logprobs=k) for k in num_top]
    return [SamplingPosition(SamplingState(p, seed=0, num_prompt_tokens=1), [1]) for p in params]


def test_tokens_come_with_their_logprobs_and_wait_once(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[int, ...]] = []

    def tolist(self: Tensor) -> list[float]:
        waits.append(tuple(self.shape))
        first, second = [4.0, 3.0, -1.5, 9.0, 7.0, -0.5, -1.5], [6.0, 1.0, -0.25, 6.0, 8.0, -0.25, -2.5]
        return [4.0, -1.0, 6.0, *first, *second]

    monkeypatch.setattr(Tensor, "tolist", tolist)
    sampled = sample(torch.empty(3, 50, device=DEVICE), positions(1, None, 2))
    assert waits == [(3 + 2 * 7,)]
    assert sampled.token_ids == (4, None, 6)
    assert sampled.logprobs == (
        TokenLogprobs(4, -1.5, 3, ((9, -0.5),)),
        None,
        TokenLogprobs(6, -0.25, 1, ((6, -0.25), (8, -2.5))),
    )
    assert copies.count == 1  # which rows have logprobs


@pytest.mark.parametrize(
    "num_top", [(None, None, None, None), (0, None, 3, None), (2, 9, 0, 1), (None, None, None, 12)]
)
def test_logprobs_that_come_with_tokens_have_the_bits_of_others(num_top: tuple[int | None, ...]) -> None:
    logits = torch.randint(0, 9, (4, 10), generator=torch.Generator().manual_seed(0)).float()
    logits[1, 3] = torch.nan
    chosen, asked = torch.tensor([3, -1, 9, 0]), positions(*num_top)
    numbers = tokens_with_logprobs(logits, chosen, asked).tolist()
    token_ids, entries = read_tokens_with_logprobs(numbers, asked)
    assert token_ids == chosen.tolist()
    for row, (entry, k) in enumerate(zip(entries, num_top, strict=True)):
        if k is None:
            assert entry is None
        elif row != 1:
            assert [entry] == top_logprobs_by_torch(logits[row : row + 1], chosen[row : row + 1], [k])


@pytest.mark.parametrize("wait", [Tensor.item, Tensor.tolist, bool, lambda x: x[x > 0], lambda x: x.nonzero()])
def test_what_would_wait_fails_here(wait: Any, copies: Copies) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        wait(torch.empty(1, device=DEVICE))


@pytest.mark.parametrize(
    "hide", [lambda x: x[[0, 2]], lambda x: x.__setitem__((0, [1]), 2.0), lambda x: torch.tensor([1], device=DEVICE)]
)
def test_a_list_fails_here(hide: Any, copies: Copies) -> None:
    with pytest.raises(AssertionError, match="a list"):
        hide(torch.empty(4, 4, device=DEVICE))


def test_a_tensor_of_the_host_as_an_index_is_a_copy(copies: Copies) -> None:
    torch.empty(4, device=DEVICE)[torch.arange(2)]
    assert copies.count == 1


def test_the_best_of_all_rows_are_those_of_each_row() -> None:
    logits = torch.randint(0, 9, (5, 40), generator=torch.Generator().manual_seed(0)).float()
    logits[0, 7] = 1e4  # its logprob is 0, and all others are far below
    logits[1, ::2] = -torch.inf
    ids, values = best_of_rows(logits.log_softmax(-1), 12)
    entries = top_logprobs_by_torch(logits, torch.zeros(5, dtype=torch.int64), [12] * 5)
    assert [[pair[0] for pair in entry.top] for entry in entries] == ids.tolist()
    assert [[pair[1] for pair in entry.top] for entry in entries] == values.tolist()
