"""How layers mix streams and cut gates in torch: the formulas in fp64, and rows of the same bits among any others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gptserve.engine.model.activation import cut_gates
from gptserve.engine.model.stream_mixer import StreamMixer, with_length_of

NUM, HIDDEN, WIDE = 4, 2048, 16_384
"""Of the larger of the published models."""
ROWS = 40


def mixer(num: int, hidden: int) -> StreamMixer:
    return StreamMixer.of(torch.randn(num * num, num), torch.randn(num, num), torch.randn(hidden))


def test_streams_are_mixed_as_the_configuration_says() -> None:
    """The factor of stream j in stream i is row i * N + j of the matrix times the weights."""
    torch.manual_seed(0)
    predict, correct = torch.randn(9, 3), torch.randn(3, 3)
    numbers, streams, y = StreamMixer.of(predict, correct, torch.ones(8)), torch.randn(2, 3, 8), torch.randn(2, 8)
    logits = torch.randn(2, 3)
    weights = torch.tanh(logits)
    factors = (weights @ predict.mT).view(2, 3, 3)
    predicted = streams + torch.einsum("tij,tjh->tih", factors, streams)
    torch.testing.assert_close(numbers.predict(streams, logits), predicted, rtol=1e-5, atol=1e-5)
    learnt = (y - predicted[:, 0])[:, None]
    corrected = predicted + (1 + weights @ correct.mT)[:, :, None] * learnt
    torch.testing.assert_close(numbers.correct(predicted, y, logits), corrected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cut", [-1.0, 0.0, 1.6448536])
def test_gates_lose_what_is_below_their_mean_and_so_many_deviations(cut: float) -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)) + 2
    gate, up = x.double().chunk(2, dim=1)
    expected = (gate - gate.mean(1, keepdim=True) - cut * gate.std(1, keepdim=True, correction=0)).clamp(min=0)
    found = cut_gates(x, cut)
    torch.testing.assert_close(found.double(), torch.cat([expected, up], dim=1), rtol=1e-5, atol=1e-5)
    assert (found[:, :48] == 0).any()
    assert (found[:, :48] > 0).any()


def test_a_product_gets_a_length_unless_it_is_next_to_nothing() -> None:
    x, y = torch.tensor([[3.0, 4.0]] * 3), torch.tensor([[0.0, 2.0], [0.0, 0.0], [0.0, 1e-4]])
    expected = torch.tensor([[0.0, 5.0], [0.0, 0.0], [0.0, 1e-4 * (12.5 / 1e-5) ** 0.5]])
    torch.testing.assert_close(with_length_of(x, y), expected)


def parts() -> dict[str, Callable[[int, int, torch.dtype], Tensor]]:
    """Return functions that compute rows [first, end) of random ones, by what they compute."""
    torch.manual_seed(2)
    numbers, streams, x = mixer(NUM, HIDDEN), torch.randn(ROWS, NUM, HIDDEN), torch.randn(ROWS, 2 * WIDE)
    logits = torch.randn(ROWS, NUM)

    def rows(tensor: Tensor, first: int, end: int, dtype: torch.dtype) -> Tensor:
        return tensor[first:end].to(dtype, copy=True)

    return {
        "predict": lambda *its: numbers.predict(rows(streams, *its), rows(logits, *its)),
        "correct": lambda *its: numbers.correct(rows(streams, *its), rows(x[:, :HIDDEN], *its), rows(logits, *its)),
        "length": lambda *its: with_length_of(rows(streams[:, 0], *its), rows(x[:, :HIDDEN], *its)),
        "cut": lambda *its: cut_gates(rows(x, *its), 1.6),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["predict", "correct", "length", "cut"])
def test_a_row_has_the_same_bits_among_any_others(name: str, dtype: torch.dtype) -> None:
    compute, threads = parts()[name], torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = compute(0, ROWS, dtype)
        for first, end in (0, 1), (7, 8), (39, 40), (3, 5), (0, 17), (9, 40):
            assert torch.equal(compute(first, end, dtype), whole[first:end]), (first, end)
        torch.set_num_threads(1)
        assert torch.equal(compute(0, ROWS, dtype), whole)
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(whole[0], whole[1])
