"""The whole engine, seed after seed: its tokens follow the distribution that the sampling parameters describe.

What is expected is computed here in numpy from transformers' logits, by the definitions and not as the sampler does it:
tokens sorted, probabilities in fp64. The same counts must not fit once any one parameter is left out or changed, so
that every case proves its parameters. Seeds are fixed: nothing here is a matter of luck.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.sampling.noise import uniform
from tests.conftest import MakeGPT2
from tests.engine.runs import make_engine, run, token_ids

Floats = NDArray[np.float64]

VOCAB_SIZE = 12
PROMPT = (3, 1, 4, 1, 5)
GENERATED = (9, 2, 9, 9, 6)
"""What came before the token that is drawn, so that penalties have something to count."""
NUM_DRAWS = 4000
FITS, FITS_NOT = 1e-3, 1e-6
"""A p-value above the first is required of what is expected, one below the second of every negative control."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cooler": {"temperature": 0.6},
    "warmer": {"temperature": 1.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "logit_bias": {"logit_bias": {0: 1.5, 7: -100.0, 9: -0.75}},
    "allowed_token_ids": {"allowed_token_ids": (0, 2, 3, 8, 10)},
    "bad_words": {"bad_words": ((2,), (6, 4), (9, 9, 6, 11), (6, 6, 5))},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (1, 7)},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "negative penalties": {"presence_penalty": -0.7, "frequency_penalty": -0.4},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "top_p of what top_k left": {"temperature": 1.3, "top_k": 6, "top_p": 0.8},
    "min_p of what temperature left": {"temperature": 1.3, "min_p": 0.2},
    "all adjustments, then top_k and top_p": {
        **{"presence_penalty": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.6},
        **{"logit_bias": {9: 4.0, 8: 0.5}, "temperature": 1.3, "top_k": 6, "top_p": 0.8},
    },
    "masks, then top_k": {"allowed_token_ids": (2, 3, 4, 7, 8), "bad_words": ((2,),), "temperature": 1.3, "top_k": 3},
    "all adjustments, then min_p": {
        **{"presence_penalty": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.6},
        **{"logit_bias": {9: 4.0, 8: 0.5}, "temperature": 1.3, "min_p": 0.2},
    },
}
"""Of several filters each must cut off what the others would not: min_p is never seen beside a tighter top_p."""
ALWAYS = ("plain", "min_tokens", *(name for name in CASES if "all" in name.split() or "masks" in name))
"""The cases of the tests that are not slow: together they have every parameter, and prove it."""


@pytest.fixture(scope="module")
def folder(make_gpt2: MakeGPT2) -> Path:
    return make_gpt2(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1)


def expected(logits: Floats, generated: Sequence[int], params: SamplingParams) -> Floats:
    """Return the probability of every token after PROMPT and `generated`."""
    scores = logits.copy()
    for token in {*PROMPT, *generated}:
        scores[token] *= params.repetition_penalty ** (-1 if scores[token] > 0 else 1)
    for token, count in Counter(generated).items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in range(VOCAB_SIZE):
        is_bad = any(tuple([*generated, token][-len(word) :]) == word for word in params.bad_words)
        is_end = len(generated) < params.min_tokens and token in params.stop_token_ids
        if is_bad or is_end or token not in (params.allowed_token_ids or range(VOCAB_SIZE)):
            scores[token] = -np.inf
    probs = np.exp((scores - scores.max()) / params.temperature)
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept = order[: params.top_k or None]
    mass = np.cumsum(probs[kept]) / probs[kept].sum()
    kept = [token for token, before in zip(kept, [0.0, *mass], strict=False) if before < params.top_p]
    kept = [token for token in kept if probs[token] >= params.min_p * probs.max()]
    result = np.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


def p_value(counts: Floats, probs: Floats) -> float:
    """Return how probable counts at least as far off are: Pearson's chi-square test.

    What is too rare to be counted on five times is one cell, as is usual.
    """
    if counts[probs == 0].any():
        return 0.0
    hopes = probs * counts.sum()
    rare = hopes < 5
    cells = [(counts[i], hopes[i]) for i in np.flatnonzero(~rare)]
    if hopes[rare].sum() > 0:
        cells.append((counts[rare].sum(), hopes[rare].sum()))
    statistic = sum((count - hope) ** 2 / hope for count, hope in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


@functools.cache
def reference_logits(folder: Path, ids: tuple[int, ...]) -> Floats:
    """Return transformers' logits for the token after `ids`."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        logits: Floats = model(torch.tensor([ids])).logits[0, -1].numpy()
    return logits


def draw(folder: Path, requests: Sequence[Request]) -> list[list[int]]:
    """Return the tokens of each request, many computed at a time."""
    engine = make_engine(folder, max_num_seqs=256, max_num_batched_tokens=4096, max_num_queued_reqs=NUM_DRAWS)
    outputs = run(engine, requests)
    return [token_ids(outputs[request.request_id]) for request in requests]


def repeated(probs: Floats, seed: int, position: int) -> int:
    """Return the token that docs/dev/exactness.md says comes at this position, from fp64 probabilities."""
    cumulative = np.cumsum(probs)
    return int(np.searchsorted(cumulative, uniform(seed, 0, position) * cumulative[-1], side="right"))


def altered(params: dict[str, Any]) -> list[SamplingParams]:
    """Return the parameters with one of them left out, each in turn, and with another temperature."""
    fields = {"max_tokens": len(GENERATED) + 1, **params}
    left_out = [SamplingParams(**{k: v for k, v in fields.items() if k != name}) for name in params]
    return [*left_out, SamplingParams(**{**fields, "temperature": 1.5 * params.get("temperature", 1.0)})]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in CASES]
)
def test_tokens_follow_the_distribution_and_no_other(folder: Path, name: str) -> None:
    params = SamplingParams(max_tokens=len(GENERATED) + 1, ignore_eos=True, **CASES[name])
    request = Request("0", PROMPT, params, seed=0, generated_token_ids=GENERATED)
    drawn = draw(folder, [replace(request, request_id=str(seed), seed=seed) for seed in range(NUM_DRAWS)])
    counts = np.bincount([token for [token] in drawn], minlength=VOCAB_SIZE).astype(np.float64)
    logits = reference_logits(folder, PROMPT + GENERATED)

    probs = expected(logits, GENERATED, params)
    assert p_value(counts, probs) > FITS
    position = len(PROMPT) + len(GENERATED)
    assert [token for [token] in drawn] == [repeated(probs, seed, position) for seed in range(NUM_DRAWS)]
    for other in altered(CASES[name]):
        assert p_value(counts, expected(logits, GENERATED, other)) < FITS_NOT, other


@pytest.mark.slow
def test_two_tokens_in_a_row_follow_their_joint_distribution(folder: Path) -> None:
    """The noise of one position says nothing about that of the next."""
    params = SamplingParams(max_tokens=2, temperature=0.9, frequency_penalty=1.0, ignore_eos=True)
    drawn = draw(folder, [Request(str(seed), PROMPT, params, seed) for seed in range(NUM_DRAWS)])
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    np.add.at(counts, tuple(np.array(drawn).T), 1)
    first = expected(reference_logits(folder, PROMPT), (), params)
    then = np.array(
        [expected(reference_logits(folder, (*PROMPT, token)), (token,), params) for token in range(VOCAB_SIZE)]
    )

    assert p_value(counts.ravel(), (first[:, None] * then).ravel()) > FITS
    independent = first[:, None] * (first @ then)
    assert p_value(counts.ravel(), independent.ravel()) < FITS_NOT


def test_the_choices_of_one_request_follow_the_distribution(folder: Path) -> None:
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    drawn = draw(folder, [Request(str(i), PROMPT, params, seed=0, choice_index=i) for i in range(NUM_DRAWS)])
    counts = np.bincount([token for [token] in drawn], minlength=VOCAB_SIZE).astype(np.float64)
    logits = reference_logits(folder, PROMPT)

    assert p_value(counts, expected(logits, (), params)) > FITS
    assert p_value(counts, expected(logits, (), replace(params, temperature=1.5))) < FITS_NOT
