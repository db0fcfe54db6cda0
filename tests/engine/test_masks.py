"""min_tokens, bad_words and allowed_token_ids hold to the token, and whatever happens to the request meanwhile."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.request import FinishReason, Request, TokenOutput
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.engine.runs import make_engine, make_request, run, token_ids

STORYTELLER = Path(__file__).parents[2] / "weights" / "storyteller"
NUM_TOKENS = 24
LOADS: dict[str, dict[str, Any]] = {
    "together": {},
    "drafts": {"speculative_ngram": 2, "max_num_seqs": 2},
    "preempted": {"num_blocks": 14, "max_num_seqs": 8, "enable_prefix_caching": False, "max_model_len": 128},
}


@functools.cache
def plain() -> dict[str, list[int]]:
    """Return what the prompts are continued with when nothing is ruled out, the first of them greedily."""
    return {i: token_ids(outputs) for i, outputs in run(make_engine(STORYTELLER), prompts()).items()}


@functools.cache
def prompts() -> tuple[Request, ...]:
    tokenizer = Tokenizer.open(STORYTELLER)
    texts = ["Once upon a time", "The fox and the hen, the fox and the hen, the fox", "There was a dog"]
    return tuple(
        make_request(str(i), tokenizer.encode(text), seed=i, max_tokens=NUM_TOKENS, temperature=0.8 * min(i, 1))
        for i, text in enumerate(texts)
    )


def masked(request: Request) -> list[Request]:
    """Return the request with each mask, which its plain tokens show to have an effect."""
    tokens = plain()[request.request_id]
    banned = ((tokens[0],), tuple(tokens[3:6]), tuple(tokens[8:10]))
    kinds: list[dict[str, Any]] = [
        {"bad_words": banned},
        {"min_tokens": 12, "stop_token_ids": tuple(tokens[2:12])},
        {"allowed_token_ids": tuple(sorted({*tokens[5:15]}))},
        {"bad_words": banned, "min_tokens": 6, "stop_token_ids": (tokens[1],), "repetition_penalty": 1.2},
    ]
    return [
        replace(request, request_id=f"{request.request_id}-{kind}", params=replace(request.params, **fields))
        for kind, fields in enumerate(kinds)
    ]


@functools.cache
def alone() -> dict[str, list[TokenOutput]]:
    engine = make_engine(STORYTELLER, enable_prefix_caching=False)
    requests = [changed for request in prompts() for changed in masked(request)]
    return {request.request_id: run(engine, [request])[request.request_id] for request in requests}


def holds(request: Request, tokens: list[int]) -> bool:
    """Whether the tokens obey the parameters of the request."""
    params = request.params
    allowed = params.allowed_token_ids is None or {*tokens} <= {*params.allowed_token_ids}
    ends = {*tokens[: params.min_tokens]} & {*params.stop_token_ids, 0}
    said = any(tuple(tokens[i : i + len(word)]) == word for word in params.bad_words for i in range(len(tokens)))
    return allowed and not (params.min_tokens and ends) and not said


def test_every_mask_holds_and_is_needed() -> None:
    for request in prompts():
        for changed in masked(request):
            outputs = alone()[changed.request_id]
            assert holds(changed, token_ids(outputs)), changed.params
            assert not holds(changed, plain()[request.request_id]), "without the mask it would not hold"
            assert outputs[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.some(2)
@pytest.mark.parametrize("load", LOADS)
def test_masks_do_not_depend_on_the_load(load: str) -> None:
    engine = make_engine(STORYTELLER, **LOADS[load])
    outputs = run(engine, [changed for request in prompts() for changed in masked(request)])
    assert {i: token_ids(made) for i, made in outputs.items()} == {i: token_ids(made) for i, made in alone().items()}
    assert engine.stats.num_preemptions > 0 or load != "preempted"
    assert engine.stats.num_draft_tokens > 0 or load != "drafts"


@pytest.mark.slow
def test_masks_go_on_after_a_replay() -> None:
    engine = make_engine(STORYTELLER)
    for request in prompts():
        for changed in masked(request):
            tokens = token_ids(alone()[changed.request_id])
            for num_before in range(1, len(tokens), 5):
                rest = replace(changed, generated_token_ids=tuple(tokens[:num_before]))
                assert token_ids(run(engine, [rest])[rest.request_id]) == tokens[num_before:]


def test_the_end_of_text_waits_even_where_it_is_likeliest() -> None:
    request = make_request("r", Tokenizer.open(STORYTELLER).encode("The end."), max_tokens=12, ignore_eos=False)
    eos = make_engine(STORYTELLER).info.eos_token_ids[0]
    forced = replace(request.params, logit_bias={eos: 100.0}, temperature=0.0)
    for min_tokens in (0, 1, 5):
        params = replace(forced, min_tokens=min_tokens)
        [*_, last] = outputs = run(make_engine(STORYTELLER), [replace(request, params=params)])["r"]
        assert (len(token_ids(outputs)), last.finish_reason) == (min_tokens + 1, FinishReason.STOP)


def test_where_the_masks_leave_nothing_the_request_ends_and_others_go_on() -> None:
    engine = make_engine(STORYTELLER)
    stuck = make_request(
        "stuck", [5], max_tokens=9, allowed_token_ids=(7, 8), bad_words=((7, 7), (7, 8), (8, 8), (8, 7))
    )
    outputs = run(engine, [stuck, *prompts()])
    assert [output.finish_reason for output in outputs["stuck"]] == [None, FinishReason.ERROR]
    assert str(outputs["stuck"][-1].error).startswith(
        "allowed_token_ids, bad_words, grammar and min_tokens left no token, or "
    )
    assert {i: token_ids(outputs[i]) for i in plain()} == plain()
