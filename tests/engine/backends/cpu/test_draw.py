"""Tokens that the compiled library chooses, against the definition in fp64 and that of torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.draw import choose
from gptserve.engine.backends.reference.adjustments import adjusted
from gptserve.engine.sampling.adjustments import Adjustment
from gptserve.engine.sampling.choice import Choice
from gptserve.engine.sampling.token_counts import TokenCounts, TokensBefore

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the library is not built")

ROUNDING = 2e-6
"""How far fp32 weights may move a border between two tokens: 50,257 of them are off by 1e-7 each, either way."""


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    before = native.num_threads()
    yield
    native.set_num_threads(before)


def kept_probabilities(logits: Tensor, choice: Choice) -> Tensor:
    """Return the probabilities after the filters, in fp64, from the definition."""
    probs = (logits.double() / choice.temperature).softmax(-1)
    descending = probs.sort(descending=True).values
    floor = choice.min_p * descending[0]
    if 0 < choice.top_k < len(probs):
        descending = descending[: choice.top_k]
        floor = max(floor, descending[-1])
    if choice.top_p < 1:
        mass = descending.cumsum(-1)
        floor = max(floor, descending[int((mass < choice.top_p * mass[-1]).sum())])
    kept = torch.where(probs >= floor * (1 - 1e-9), probs, 0.0)
    return kept / kept.sum()


def assert_drawn(logits: Tensor, choice: Choice, token: int) -> None:
    probs = kept_probabilities(logits, choice)
    cdf = probs.cumsum(-1)
    assert probs[token] > 0
    assert cdf[token] - probs[token] - ROUNDING <= choice.noise <= cdf[token] + ROUNDING


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    return Choice(
        noise=draw(st.floats(0, 1, exclude_max=True)),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01])),
        temperature=draw(st.sampled_from([0.1, 0.8, 1.0, 2.0])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        top_k=draw(st.sampled_from([0, 2, 40, 1000, 10**6])),
    )


@given(
    chosen=st.lists(choices(), min_size=1, max_size=9),
    vocab_size=st.sampled_from([2, 17, 255, 256, 257, 1000, 5003]),
    seed=st.integers(0, 2**31),
)
def test_tokens_are_those_of_the_definition_whatever_the_rows_beside_and_the_threads(
    chosen: list[Choice], vocab_size: int, seed: int
) -> None:
    logits = 4 * torch.randn(len(chosen), vocab_size, generator=torch.Generator().manual_seed(seed))
    native.set_num_threads(1)
    tokens = choose(logits, chosen).tolist()
    for row, choice, token in zip(logits, chosen, tokens, strict=True):
        assert_drawn(row, choice, token)
        assert choose(row[None], [choice]).tolist() == [token]
    native.set_num_threads(3)
    assert choose(logits, chosen).tolist() == tokens


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 1000, 50_257])
def test_a_mask_is_minus_infinity_for_the_rest(vocab_size: int) -> None:
    logits = 3 * torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(1))
    is_allowed = np.random.default_rng(1).random((6, -(-vocab_size // 32) * 32)) < 0.3
    masks = np.packbits(is_allowed, axis=1, bitorder="little").view(np.uint32)
    kinds = [{"temperature": 1.0}, {}, {"temperature": 0.7, "top_p": 0.9}] * 2
    chosen = [Choice(noise=i / 6, **kind) for i, kind in enumerate(kinds)]
    masked = logits.masked_fill(~torch.from_numpy(is_allowed[:, :vocab_size]), -math.inf)
    tokens = choose(logits, [choice._replace(allowed=mask) for choice, mask in zip(chosen, masks, strict=True)])
    assert tokens.tolist() == choose(masked, chosen).tolist()
    assert tokens.tolist() != choose(logits, chosen).tolist()


def test_adjusted_rows_have_the_tokens_of_their_scores() -> None:
    rng = np.random.default_rng(2)
    logits = 3 * torch.randn(6, 50_257, generator=torch.Generator().manual_seed(2))
    kinds = [{"temperature": 1.0}, {}, {"temperature": 0.7, "top_p": 0.9}] * 2
    chosen = [Choice(noise=i / 6, **kind) for i, kind in enumerate(kinds)]
    counts = TokenCounts(num_prompt_tokens=300)
    counts.add([*rng.choice(50_257, 900), *logits.argmax(-1).tolist()])
    biased, banned = (array("q", rng.choice(50_257, 99, replace=False)) for _ in range(2))
    before, bias = TokensBefore(counts, []), array("f", rng.normal(size=99))
    adjustments = [Adjustment(1.3, 0.5, -0.2, before, biased, bias, banned), None] * 3
    adjusting = [choice._replace(adjustment=its) for choice, its in zip(chosen, adjustments, strict=True)]
    expected = choose(adjusted(logits, adjustments), chosen).tolist()
    assert choose(logits, adjusting).tolist() == expected
    assert expected != choose(logits, chosen).tolist()


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_large_vocabulary(top_p: float) -> None:
    logits = 3 * torch.randn(8, 50_257, generator=torch.Generator().manual_seed(0))
    chosen = [Choice(noise=i / 8, temperature=1.0, top_p=top_p) for i in range(8)]
    for row, choice, token in zip(logits, chosen, choose(logits, chosen).tolist(), strict=True):
        assert_drawn(row, choice, token)


def test_other_noise_gives_other_tokens() -> None:
    logits = torch.randn(1, 1000).expand(64, -1)
    assert len(set(choose(logits, [Choice(noise=i / 64, temperature=1.0) for i in range(64)]).tolist())) > 50


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice(), 2),
        (Choice(noise=0.0, temperature=1.0, top_k=1), 2),
        (Choice(noise=0.0, temperature=1.0), 0),
        (Choice(noise=math.nextafter(1, 0), temperature=1.0), 7),
        (Choice(noise=math.nextafter(1, 0), temperature=1.0, top_k=2), 5),
        (Choice(noise=0.6, temperature=1.0, top_p=1e-9), 5),
        (Choice(noise=0.4, temperature=1.0, min_p=1.0), 2),
    ],
)
def test_equals_stay_together_and_the_lowest_wins_without_a_draw(choice: Choice, expected: int) -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 0.0, 1.0, 3.0, 0.0, -1.0]])
    assert choose(logits, [choice]).item() == expected


@pytest.mark.parametrize("choice", [Choice(), Choice(noise=0.5, temperature=1.0), Choice(0.5, 0.9, 1.0, 0.1, 3)])
@pytest.mark.parametrize("position", [0, 15, 16, 255, 299])
def test_a_row_that_is_not_finite_has_no_token(choice: Choice, position: int) -> None:
    logits = torch.zeros(4, 300)
    logits[0, position], logits[1, position], logits[2, position] = math.nan, math.inf, -math.inf
    tokens = choose(logits, [choice] * 4).tolist()
    assert tokens[:2] == [-1, -1]
    assert tokens[2] >= 0
    assert tokens[2] != position
    assert choose(torch.full((1, 300), -math.inf), [choice]).item() == -1


def test_the_ends_of_all_equal_rows_are_reached() -> None:
    logits = torch.zeros(2, 5000)
    chosen = [Choice(noise=0.0, temperature=1.0), Choice(noise=math.nextafter(1, 0), temperature=1.0)]
    assert choose(logits, chosen).tolist() == [0, 4999]
    filtered = [choice._replace(top_p=0.5, top_k=7) for choice in chosen]
    assert choose(logits, filtered).tolist() == [0, 4999], "equals of the last one that is kept are kept"


def test_filters_that_ask_for_more_tokens_than_there_are_keep_them_all() -> None:
    logits = torch.full((64, 700), -math.inf)
    logits[:, 100:700:100] = 1e-3 * torch.arange(6)  # so close that their weights differ in the last digits alone
    chosen = [Choice(noise=i / 64, temperature=1.0, top_k=7, top_p=0.9999) for i in range(64)]
    tokens = choose(logits, chosen).tolist()
    for row, choice, token in zip(logits, chosen, tokens, strict=True):
        assert_drawn(row, choice, token)
    assert set(tokens) == set(range(100, 700, 100))


@pytest.mark.parametrize("temperature", [1e-6, 1e-3])
def test_a_tiny_temperature_takes_the_largest(temperature: float) -> None:
    logits = torch.tensor([[-300.0, 200.0, 199.0, -math.inf]])
    assert choose(logits, [Choice(noise=0.999, temperature=temperature)]).item() == 1


def test_rows_may_lie_apart() -> None:
    wide = torch.randn(4, 900)
    chosen = [Choice(noise=0.3, temperature=1.0)] * 4
    assert choose(wide[:, :700], chosen).tolist() == choose(wide[:, :700].contiguous(), chosen).tolist()
