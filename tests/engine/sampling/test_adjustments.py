"""Adjusted logits against the formulas, by torch and by the compiled library, and what goes to the device for them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gptserve.engine import staging
from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.draw import choose
from gptserve.engine.backends.reference.adjustments import adjusted
from gptserve.engine.backends.reference.grammar_masks import with_masks
from gptserve.engine.request import SamplingParams
from gptserve.engine.sampling.choice import Choice, SamplingPosition, SamplingState, choice_at
from tests.engine.backends.gpu.host_copies import DEVICE, Copies, Lists

VOCAB = 30
EOS = (0,)


def random_position(rng: random.Random) -> SamplingPosition:
    """Return a position of a request with some of the parameters that adjust logits, or none."""
    params = SamplingParams(
        max_tokens=100,
        repetition_penalty=rng.choice([1.0, 1.1, 0.7, 3.3]),
        frequency_penalty=rng.choice([0.0, 0.3, -1.7]),
        presence_penalty=rng.choice([0.0, 0.9]),
        logit_bias={rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(rng.choice([0, 0, 5]))},
        allowed_token_ids=rng.choice([None, None, tuple(rng.randrange(VOCAB) for _ in range(9))]),
        bad_words=rng.choice([(), ((3,), (5,), (3,))]),
        min_tokens=rng.choice([0, 80]),
        stop_token_ids=rng.choice([(), (2,)]),
    )
    prompt, known, draft = ([rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(3))
    state = SamplingState(params, seed=0, num_prompt_tokens=len(prompt))
    return SamplingPosition(state, prompt + known, tuple(draft[: rng.choice([0, 3])]))


def random_batch(seed: int) -> tuple[Tensor, list[SamplingPosition]]:
    rng = random.Random(seed)
    positions = [random_position(rng) for _ in range(rng.randint(1, 12))]
    return torch.randn(len(positions), VOCAB, generator=torch.Generator().manual_seed(seed)) * 10, positions


def choices_at(positions: list[SamplingPosition], vocab_size: int = VOCAB) -> list[Choice]:
    return [choice_at(position, vocab_size, EOS) for position in positions]


def by_formula(raw_V: Tensor, position: SamplingPosition) -> list[np.float32]:
    """Return the adjusted logits of a row, token by token, in fp32."""
    params, num_prompt = position.state.params, position.state.num_prompt_tokens
    before = [*position.known, *position.draft]
    all_before, counts = set(before), Counter(before[num_prompt:])
    banned = {word[0] for word in params.bad_words}
    if len(before) - num_prompt < params.min_tokens:
        banned |= {*EOS, *params.stop_token_ids}
    scores = []
    for token, z in enumerate(raw_V.numpy()):
        if token in all_before and params.repetition_penalty != 1.0:
            penalty = np.float32(params.repetition_penalty)
            z = z / penalty if z > 0 else z * penalty
        if counts[token]:
            z -= np.float32(params.frequency_penalty * counts[token] + params.presence_penalty)
        z += np.float32(params.logit_bias.get(token, 0.0))
        if token in banned or (params.allowed_token_ids is not None and token not in params.allowed_token_ids):
            z -= np.float32(np.inf)
        scores.append(z)
    return scores


@pytest.mark.parametrize("seed", range(20))
def test_each_row_of_a_batch_has_the_bits_of_the_formulas(seed: int) -> None:
    raw, positions = random_batch(seed)
    before = raw.clone()
    expected = [by_formula(raw_V, position) for raw_V, position in zip(raw, positions, strict=True)]
    choices = choices_at(positions)
    scores = adjusted(raw, [choice.adjustment for choice in choices])
    assert with_masks(scores, [choice.allowed for choice in choices]).tolist() == np.array(expected).tolist()
    assert torch.equal(raw, before)


@pytest.mark.some(7)
@pytest.mark.skipif(not native.is_available(), reason="the library is not built")
@pytest.mark.parametrize("seed", range(20))
def test_the_library_has_the_bits_of_torch(seed: int) -> None:
    raw, positions = random_batch(seed)
    adjustments = [choice.adjustment for choice in choices_at(positions, VOCAB + 1)]
    # A token wins against a probe of the same score, which comes after it, and loses against one of the next float.
    scores, probe, rows = adjusted(raw, adjustments), VOCAB, []
    choices, expected = list[Choice](), list[int]()
    for adjustment, raw_V, scores_V in zip(adjustments, raw, scores, strict=True):
        for token, score in enumerate(scores_V):
            pair = np.array([1 << token | 1 << probe], np.uint32)
            for beside in (score, torch.nextafter(score, torch.tensor(torch.inf))):
                rows.append(torch.cat([raw_V, beside[None]]))
                choices.append(Choice(allowed=pair, adjustment=adjustment))
            expected += [token if score.isfinite() else -1, probe]
    logits = torch.stack(rows)
    before = logits.clone()
    assert choose(logits, choices).tolist() == expected
    assert torch.equal(logits, before)


def test_counts_are_kept_as_a_sequence_grows_and_drafts_leave_no_trace() -> None:
    rng = random.Random(0)
    position = random_position(rng)
    while position.state.params.repetition_penalty == 1.0 or not position.state.params.frequency_penalty:
        position = random_position(rng)
    state, known = position.state, position.known
    raw = torch.randn(1, VOCAB)
    for num_new in (0, 1, 4, 1, 9):
        known += [rng.randrange(VOCAB) for _ in range(num_new)]
        for num_drafted in (0, 1, 5):
            later = SamplingPosition(state, known, tuple(rng.randrange(VOCAB) for _ in range(num_drafted)))
            anew = later._replace(state=replace(state, adjustments=None))
            kept, counted = (adjusted(raw, [choice_at(at, VOCAB, EOS).adjustment]) for at in (later, anew))
            assert torch.equal(kept, counted)
            assert not torch.equal(kept, raw)


def test_rows_that_ask_for_nothing_are_not_copied() -> None:
    position = SamplingPosition(SamplingState(SamplingParams(top_p=0.5), seed=0, num_prompt_tokens=1), [1])
    raw = torch.randn(2, VOCAB)
    assert adjusted(raw, [choice.adjustment for choice in choices_at([position] * 2)]) is raw


@pytest.mark.parametrize("num_rows", [1, 40])
def test_all_rows_take_one_copy_and_nothing_waits(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "pinned", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    rng = random.Random(0)
    params = SamplingParams(
        **{"max_tokens": 9, "min_tokens": 9, "repetition_penalty": 1.1, "frequency_penalty": 1.0},
        **{"logit_bias": {3: 1.0}},
    )
    positions = [
        SamplingPosition(SamplingState(params, seed=0, num_prompt_tokens=1), [1, rng.randrange(VOCAB)])
        for _ in range(num_rows)
    ]
    raw = torch.empty(num_rows, VOCAB, device=DEVICE)
    with Lists(), Copies() as copies:
        assert adjusted(raw, [choice.adjustment for choice in choices_at(positions)]).shape == raw.shape
    assert copies.count == 1
