"""The sampler: exact choices for chosen logits, the right distribution, and rows that do not see each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.grammar.grammar import Grammar
from gptserve.engine.grammar.matcher import Mask
from gptserve.engine.request import SamplingParams
from gptserve.engine.runner.logprobs import top_logprobs
from gptserve.engine.runner.sampler import sample
from gptserve.engine.sampling.choice import SamplingPosition, SamplingState

VOCAB = 8


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample as on a machine with the compiled library, and as on one without."""
    if request.param == "torch":
        monkeypatch.setattr(native, "is_available", lambda: False)
    elif not native.is_available():
        pytest.skip("the library is not built")


def position(
    prompt: tuple[int, ...] = (1,),
    generated: tuple[int, ...] = (),
    seed: int = 0,
    draft: tuple[int, ...] = (),
    **params: Any,
) -> SamplingPosition:
    state = SamplingState(SamplingParams(**params), seed, num_prompt_tokens=len(prompt))
    return SamplingPosition(state, [*prompt, *generated], draft)


def draw(logits_V: Tensor, num_draws: int, **params: Any) -> list[float]:
    """Return how often each token came, over num_draws seeds."""
    positions = [position(seed=seed, **params) for seed in range(num_draws)]
    tokens = sample(logits_V.expand(num_draws, -1), positions).token_ids
    return [tokens.count(token) / num_draws for token in range(len(logits_V))]


def kept(logits: list[float], **params: Any) -> set[int]:
    """Return the tokens that ever come."""
    counts = draw(torch.tensor(logits), 2000, **params)
    return {token for token, count in enumerate(counts) if count}


def assert_follows(counts: list[float], probs: Tensor, num_draws: int) -> None:
    for count, p in zip(counts, probs.tolist(), strict=True):
        assert abs(count - p) <= 5 * math.sqrt(p * (1 - p) / num_draws) + 1e-12


@pytest.mark.some(3)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_tokens_follow_the_tempered_distribution(temperature: float) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    counts = draw(logits, 5000, temperature=temperature)
    # p^(1/T), normalised
    powered = logits.double().softmax(-1) ** (1 / temperature)
    assert_follows(counts, powered / powered.sum(), 5000)
    with pytest.raises(AssertionError):
        assert_follows(counts, logits.double().softmax(-1) ** 1.3, 5000)


def test_temperature_zero_takes_the_lowest_of_the_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    assert sample(logits, [position(temperature=0.0)]).token_ids == (1,)
    assert sample(logits, [position(temperature=1.0, top_k=1)]).token_ids == (1,)


@pytest.mark.parametrize("temperature", [1e-5, 1e-300])
def test_a_tiny_temperature_does_not_overflow(temperature: float) -> None:
    logits = torch.tensor([[-50.0, 60.0, 59.0, 100.0]])
    assert sample(logits, [position(temperature=temperature)]).token_ids == (3,)


def test_top_k_keeps_the_k_best() -> None:
    assert kept([0.0, 0.4, 0.3, 0.2, 0.1], top_k=3) == {1, 2, 3}


def test_top_k_keeps_equals_together() -> None:
    assert kept([0.0, 0.5, 0.5, 0.5], top_k=2) == {1, 2, 3}


def test_top_k_above_the_vocabulary_keeps_all() -> None:
    assert kept([0.0, 0.1, 0.2], top_k=10**30) == {0, 1, 2}


def test_top_p_keeps_the_fewest_that_reach_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert kept(logits, top_p=0.5) == {0}
    assert kept(logits, top_p=0.51) == {0, 1}
    assert kept(logits, top_p=0.81) == {0, 1, 2}
    assert kept(logits, top_p=0.96) == {0, 1, 2, 3}


def test_top_p_counts_the_mass_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert kept(logits, top_p=0.5) == {0, 1}
    assert kept(logits, top_k=2, top_p=0.5) == {0}


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = torch.tensor([0.5, 0.26, 0.24]).log().tolist()
    assert kept(logits, min_p=0.5) == {0, 1}


def test_what_is_kept_follows_its_renormalised_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -1.5, -2.0, -3.0])
    expected = logits.double().softmax(-1)
    expected[4:] = 0
    assert_follows(draw(logits, 5000, top_k=4), expected / expected.sum(), 5000)


def test_top_p_beyond_the_sorted_candidates_is_exact() -> None:
    logits = torch.zeros(5000)
    logits[:2500] = 1e-3
    tokens = sample(logits.expand(512, -1), [position(seed=i, top_p=0.5) for i in range(512)]).token_ids
    assert all(token is not None and token < 2500 for token in tokens)
    assert max(token for token in tokens if token is not None) > 2000


def test_a_filtered_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(1))
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}, {"top_k": 2000, "top_p": 0.99}, {"min_p": 0.2},
        {"logprobs": 3}, {"presence_penalty": 1.0}, {"top_p": 0.9999},
    ]  # fmt: skip
    positions = [position(generated=(5, 5, 9), seed=i, **kinds[i % len(kinds)]) for i in range(64)]
    together = sample(logits, positions)
    for row in range(64):
        alone = sample(logits[row : row + 1].clone(), [positions[row]])
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs[0] == together.logprobs[row]
    assert len(set(together.token_ids)) > 40


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.1]])
    assert sample(logits, [position((0, 0), temperature=0.0)]).token_ids == (0,)
    assert sample(logits, [position((0, 0), temperature=0.0, repetition_penalty=1.2)]).token_ids == (1,)
    negative = torch.tensor([[-1.0, -1.1, -5.0, -5.0]])
    assert sample(negative, [position((2,), (0,), temperature=0.0, repetition_penalty=1.2)]).token_ids == (1,)
    # 2.0 / 1.2 > 1.6 once; twice it would fall below
    once = torch.tensor([[2.0, 1.6, 0.0, 0.0]])
    assert sample(once, [position((0, 0, 0), temperature=0.0, repetition_penalty=1.2)]).token_ids == (0,)


def test_frequency_penalty_counts_and_presence_penalty_does_not() -> None:
    logits = torch.tensor([[3.0, 1.5, 0.0]])
    twice = {"prompt": (2,), "generated": (0, 0), "temperature": 0.0}
    assert sample(logits, [position(**twice, presence_penalty=1.0)]).token_ids == (0,)
    assert sample(logits, [position(**twice, frequency_penalty=1.0)]).token_ids == (1,)
    prompt_only = {"prompt": (0, 0), "temperature": 0.0}
    assert sample(logits, [position(**prompt_only, frequency_penalty=2.0)]).token_ids == (0,)


def test_logit_bias_forces_and_forbids() -> None:
    logits = torch.tensor([[5.0, 0.0, 0.0]])
    assert sample(logits, [position(temperature=0.0, logit_bias={2: 100.0})]).token_ids == (2,)
    assert kept([5.0, 0.0, 0.0], logit_bias={0: -100.0}) == {1, 2}


def test_only_allowed_tokens_come() -> None:
    assert kept([5.0, 1.0, 0.9, 0.8], allowed_token_ids=(1, 3, 3)) == {1, 3}
    assert sample(torch.tensor([[5.0, 1.0, 2.0]]), [position(temperature=0.0, allowed_token_ids=(1,))]).token_ids == (
        1,
    )


def test_a_bad_word_is_not_completed() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]])

    def token(*generated: int, **fields: Any) -> int | None:
        [token_id] = sample(logits, [position(generated=generated, temperature=0.0, **fields)]).token_ids
        return token_id

    words = ((0,), (2, 2, 1))
    assert token(bad_words=words) == 1
    assert token(2, bad_words=words) == 1
    assert token(2, 2, bad_words=words) == 2
    assert token(1, 2, 2, bad_words=words) == 2
    assert token(2, 2, 1, bad_words=words) == 1
    assert token(2, bad_words=words, draft=(2,)) == 2
    assert token(bad_words=words, draft=(2, 2)) == 2
    assert token(bad_words=words, prompt=(2, 2)) == 1, "words are those of the completion"


def test_nothing_ends_a_completion_before_min_tokens() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]])

    def token(*generated: int, **fields: Any) -> int | None:
        at = position(generated=generated, temperature=0.0, stop_token_ids=(0,), min_tokens=2, **fields)
        return sample(logits, [at], (1,)).token_ids[0]

    assert token() == token(2) == token(draft=(2,)) == 2
    assert token(2, 2) == token(2, draft=(2,)) == token(2, 2, 2) == 0
    assert token(ignore_eos=True) == 2


def test_a_mask_hides_no_logit_that_is_not_finite() -> None:
    for bad in (math.nan, math.inf):
        for params in ({"allowed_token_ids": (1,)}, {"bad_words": ((0,),)}):
            assert sample(torch.tensor([[bad, 1.0, 2.0]]), [position(**params)]).token_ids == (None,)


def test_a_mask_that_leaves_nothing_yields_no_token() -> None:
    position_ = position(allowed_token_ids=(1,), bad_words=((1,),))
    assert sample(torch.tensor([[0.0, 1.0, 2.0]]), [position_]).token_ids == (None,)


def test_adjustments_leave_the_logits_unchanged() -> None:
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    sample(
        logits, [position(logit_bias={1: 5.0}, repetition_penalty=2.0), position(generated=(1,), presence_penalty=1.0)]
    )
    sample(logits, [position(allowed_token_ids=(1, 2)), position(bad_words=((1,),))])
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(1, VOCAB)
    entry = sample(logits, [position(temperature=0.7, logit_bias={3: 100.0}, logprobs=2)]).logprobs[0]
    expected = logits[0].log_softmax(-1)
    assert entry is not None
    assert entry.token_id == 3
    best = expected.topk(2)
    assert entry.logprob == pytest.approx(expected[3].item(), abs=1e-5)
    assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_of_equals_name_the_lowest_ids_first() -> None:
    entry = sample(torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]]), [position(temperature=0.0, logprobs=2)]).logprobs[0]
    assert entry is not None
    assert [token_id for token_id, _ in entry.top] == [1, 2]


def test_more_logprobs_than_tokens_report_all_tokens() -> None:
    entry = sample(torch.randn(1, VOCAB), [position(logprobs=20)]).logprobs[0]
    assert entry is not None
    assert sorted(token_id for token_id, _ in entry.top) == list(range(VOCAB))


def test_a_rank_counts_what_is_likelier() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0]]).expand(4, -1)
    entries = top_logprobs(logits, torch.arange(4), [0] * 4)
    assert [entry.rank for entry in entries] == [3, 1, 3, 2]
    assert all((entry.rank == 1) == (entry.logprob == logits[0].log_softmax(-1).max().item()) for entry in entries)


def test_logprobs_zero_reports_the_token_only() -> None:
    entry = sample(torch.randn(1, VOCAB), [position(logprobs=0)]).logprobs[0]
    assert entry is not None
    assert entry.top == ()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.5, "logprobs": 2}])
def test_a_row_that_is_not_finite_yields_no_token_and_spares_its_neighbours(bad: float, params: dict[str, Any]) -> None:
    logits = torch.randn(3, VOCAB)
    expected = sample(logits, [position(seed=i, **params) for i in range(3)])
    logits[1, 4] = bad
    sampled = sample(logits, [position(seed=i, **params) for i in range(3)])
    assert sampled.token_ids == (expected.token_ids[0], None, expected.token_ids[2])
    assert sampled.logprobs == (expected.logprobs[0], None, expected.logprobs[2])


def test_rows_past_the_positions_are_padding() -> None:
    assert len(sample(torch.randn(2, VOCAB), [position()]).token_ids) == 1


@pytest.mark.parametrize(
    "params",
    [{}, {"repetition_penalty": 1.5}, {"frequency_penalty": 0.7}, {"presence_penalty": 1.5, "logprobs": 2}],
    ids=str,
)
def test_behind_a_draft_a_token_is_sampled_as_if_the_draft_were_known(params: dict[str, Any]) -> None:
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(2))
    known = sample(logits, [position((1, 2), (3, 4, 4), seed=i, **params) for i in range(200)])
    drafted = sample(logits, [position((1, 2), (3,), seed=i, draft=(4, 4), **params) for i in range(200)])
    ignored = sample(logits, [position((1, 2), (3,), seed=i, **params) for i in range(200)])
    assert drafted == known
    assert ignored != known


def test_greedy_is_told_apart() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def bits(*token_ids: int) -> Mask:
    """Return the mask that allows these tokens."""
    mask = np.zeros(1, np.uint32)
    for token_id in token_ids:
        mask[0] |= np.uint32(1 << token_id)
    return mask


def test_only_what_a_grammar_allows_comes_and_in_proportion() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    positions = [position(seed=seed)._replace(allowed=bits(1, 4, 7)) for seed in range(5000)]
    tokens = sample(logits.expand(len(positions), -1), positions).token_ids
    probs = torch.zeros(VOCAB).index_copy(0, torch.tensor([1, 4, 7]), logits[[1, 4, 7]].softmax(-1))
    assert_follows([tokens.count(token) / len(tokens) for token in range(VOCAB)], probs, len(tokens))


def test_filters_are_of_what_a_grammar_allows() -> None:
    logits = torch.tensor([[9.0, 8.0, 0.3, 0.2, 0.1, 0.0]])
    for params in ({"top_k": 1}, {"temperature": 0.0}, {"top_p": 0.01}, {"min_p": 1.0}):
        chosen = position(**params)._replace(allowed=bits(3, 4, 5))
        assert sample(logits, [chosen]).token_ids == (3,), params


def test_a_grammar_masks_its_row_alone_after_bias_and_other_masks() -> None:
    logits = torch.zeros(3, 6)
    rows = [
        position(temperature=0.0, logit_bias={5: 9.0}),
        position(temperature=0.0, logit_bias={5: 9.0})._replace(allowed=bits(2, 3)),
        position(temperature=0.0, allowed_token_ids=(3, 4))._replace(allowed=bits(2, 3)),
    ]
    assert sample(logits, rows).token_ids == (5, 2, 3)
    assert logits.count_nonzero() == 0, "nothing is mutated"


def test_a_grammar_that_allows_nothing_and_a_nan_beside_it_give_no_token() -> None:
    finite, nan = torch.zeros(VOCAB), torch.tensor([0.0] * (VOCAB - 1) + [math.nan])
    rows = [position()._replace(allowed=bits()), position()._replace(allowed=bits(1))]
    assert sample(torch.stack([finite, nan]), rows).token_ids == (None, None)


def test_a_grammar_lets_the_end_come_before_min_tokens_if_nothing_else_may() -> None:
    grammar = Grammar("regex", "")
    chosen = position(grammar=grammar, min_tokens=5, temperature=0.0)._replace(allowed=bits(0))
    assert sample(torch.zeros(1, VOCAB), [chosen], eos_token_ids=(0,)).token_ids == (0,)
