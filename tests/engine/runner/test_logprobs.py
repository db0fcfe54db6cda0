"""Logprobs of the compiled library, against torch."""

from __future__ import annotations

import pytest
import torch

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.reference.logprobs import top_logprobs_by_torch
from gptserve.engine.runner.logprobs import top_logprobs

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the library is not built")


@pytest.mark.parametrize("vocab_size", [1, 5, 255, 256, 257, 3000])
@pytest.mark.parametrize("kind", ["spread", "ties", "ascending"])
def test_the_library_finds_what_torch_does(vocab_size: int, kind: str) -> None:
    """The logits are multiples of 1/64, so that no two are equal for rounding alone."""
    logits = (torch.randn(9, vocab_size) * (256 if kind == "spread" else 1)).round() / 64 - 40
    if kind == "ascending":
        logits = logits.sort().values
    logits[3, ::2] = -torch.inf
    logits[3, 0] = 0
    token_ids = torch.randint(vocab_size, (9,))
    num_top = [0, 1, 2, 3, 5, 20, 20, 20, 20]
    found, expected = (score(logits, token_ids, num_top) for score in (top_logprobs, top_logprobs_by_torch))
    for mine, its in zip(found, expected, strict=True):
        assert (mine.token_id, mine.rank) == (its.token_id, its.rank)
        assert mine.logprob == pytest.approx(its.logprob, abs=1e-5)
        assert [token for token, _ in mine.top] == [token for token, _ in its.top]
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in its.top], abs=1e-5)


def test_a_row_has_the_same_bits_alone_and_on_any_number_of_threads() -> None:
    logits, token_ids = 5 * torch.randn(20, 1000), torch.randint(1000, (20,))
    before = native.num_threads()
    try:
        together = top_logprobs(logits, token_ids, [7] * 20)
        native.set_num_threads(3)
        assert top_logprobs(logits, token_ids, [7] * 20) == together
    finally:
        native.set_num_threads(before)
    strided = torch.cat([logits, logits], 1)[:, :1000]
    alone = [top_logprobs(strided[row : row + 1], token_ids[row : row + 1], [7])[0] for row in range(20)]
    assert alone == together


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_no_likeliest_tokens_and_spoils_no_other(bad: float) -> None:
    logits, token_ids = torch.randn(3, 600), torch.tensor([0, 1, 2])
    before = top_logprobs(logits, token_ids, [4] * 3)
    logits[1, 300] = bad
    after = top_logprobs(logits, token_ids, [4] * 3)
    assert [after[0], after[2]] == [before[0], before[2]]
    assert after[1].logprob != after[1].logprob
    assert (after[1].rank, after[1].top) == (1, ())
