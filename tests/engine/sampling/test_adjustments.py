"""Adjusted logits against the formulas, row by row, and what goes to the device for them."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from gptserve.engine import staging
from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.sampling.adjustments import adjusted
from gptserve.engine.sampling.sampler import SamplingPosition
from gptserve.engine.scheduling.sequence import SequenceState
from tests.engine.host_copies import DEVICE, Copies, Lists

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
    sequence = SequenceState(Request("r", tuple(prompt), params, seed=0), 0, prompt + known)
    return SamplingPosition(sequence, tuple(draft[: rng.choice([0, 3])]))


def by_formula(raw_V: Tensor, position: SamplingPosition) -> list[np.float32]:
    """Return the adjusted logits of a row, token by token, in fp32."""
    params, num_prompt = position.request.params, position.sequence.num_prompt_tokens
    all_before, counts = set(position.tokens_from(0)), Counter(position.tokens_from(num_prompt))
    banned = {word[0] for word in params.bad_words}
    if position.num_before - num_prompt < params.min_tokens:
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
    rng = random.Random(seed)
    positions = [random_position(rng) for _ in range(rng.randint(1, 12))]
    raw = torch.randn(len(positions), VOCAB, generator=torch.Generator().manual_seed(seed)) * 10
    before = raw.clone()
    expected = [by_formula(raw_V, position) for raw_V, position in zip(raw, positions, strict=True)]
    assert adjusted(raw, positions, EOS).tolist() == np.array(expected).tolist()
    assert torch.equal(raw, before)


def test_rows_that_ask_for_nothing_are_not_copied() -> None:
    sequence = SequenceState(Request("r", (1,), SamplingParams(top_p=0.5), seed=0), 0, [1])
    raw = torch.randn(2, VOCAB)
    assert adjusted(raw, [SamplingPosition(sequence)] * 2, EOS) is raw


@pytest.mark.parametrize("num_rows", [1, 40])
def test_all_rows_take_one_copy_and_nothing_waits(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "pinned", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    rng = random.Random(0)
    params = SamplingParams(
        **{"max_tokens": 9, "min_tokens": 9, "repetition_penalty": 1.1, "frequency_penalty": 1.0},
        **{"logit_bias": {3: 1.0}, "allowed_token_ids": (4, 5)},
    )
    positions = [
        SamplingPosition(SequenceState(Request("r", (1,), params, seed=0), 0, [1, rng.randrange(VOCAB)]))
        for _ in range(num_rows)
    ]
    raw = torch.empty(num_rows, VOCAB, device=DEVICE)
    with Lists(), Copies() as copies:
        assert adjusted(raw, positions, EOS).shape == raw.shape
    assert copies.count == 1
