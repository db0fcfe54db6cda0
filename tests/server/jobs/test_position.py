"""Event ids: what a reader has and what it still gets, in whatever order and steps the tokens are computed."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptserve.engine.request import FinishReason, TokenLogprobs, TokenOutput
from gptserve.server.completions.plan import CompletionPlan, plan_completion
from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.position import LastEvent, Position, ResumedOutput, single_tokens
from gptserve.server.schemas.completions import CompletionRequest
from gptserve.server.text.output import Delta
from tests.server.jobs.server import Server

TEXTS = ("aé✓ stop or sto", "😀😀 two", "x")
BODIES: list[dict[str, Any]] = [
    {},
    {"stop": ["stop or"], "logprobs": 2},
    {"echo": True, "logprobs": 0},
    {"return_token_ids": True},
    {"max_tokens": 0, "echo": True},
]
Event = tuple[str, int, Delta]


def plan_of(**fields: Any) -> CompletionPlan:
    body = CompletionRequest.model_validate({"prompt": "hé", "seed": 1, "max_tokens": 40, **fields})
    return asyncio.run(plan_completion(body, Server().service, None))


def outputs_of(plan: CompletionPlan, times_out: bool) -> list[list[TokenOutput]]:
    """Return the outputs of each choice, one a token, the last of which ends it or not."""
    outputs = []
    for request, text in zip(plan.requests, TEXTS, strict=False):
        scores = tuple(TokenLogprobs(i, -i / 8, 1) for i in request.prompt_token_ids[1:])
        made = [TokenOutput(request.request_id, (), prompt_logprobs=(None, *scores))] if plan.echoes else []
        for token_id in text.encode():
            logprobs = () if request.params.logprobs is None else (TokenLogprobs(token_id, -0.5, 1),)
            made.append(TokenOutput(request.request_id, (token_id,), logprobs))
        if times_out:
            made.append(TokenOutput(request.request_id, (), finish_reason=FinishReason.TIMEOUT))
        else:
            made[-1] = replace(made[-1], finish_reason=FinishReason.LENGTH)
        outputs.append(made)
    return outputs


def computed(outputs: list[list[TokenOutput]], rng: random.Random) -> list[TokenOutput]:
    """Return the outputs of all choices in some order, with some neighbours of a choice joined as in a step."""
    left, order = [list(made) for made in outputs], []
    while any(left):
        of_choice = rng.choice([made for made in left if made])
        output = of_choice.pop(0)
        while output.token_ids and of_choice and of_choice[0].token_ids and rng.random() < 0.5:
            more = of_choice.pop(0)
            token_ids, logprobs = output.token_ids + more.token_ids, output.logprobs + more.logprobs
            output = replace(output, token_ids=token_ids, logprobs=logprobs, finish_reason=more.finish_reason)
        order.append(output)
    return order


def read(plan: CompletionPlan, outputs: list[TokenOutput], after: str | None = None) -> list[Event]:
    """Return the events of a reader: id, choice and what it adds."""
    last_event = None if after is None else LastEvent.parse("starting_after", after)
    output = ResumedOutput(plan, last_event)
    events = []
    for token in itertools.chain.from_iterable(map(single_tokens, outputs)):
        added = output.add(token)
        if added is not None and not added[1].is_empty:
            events.append((output.event_id, *added))
            assert output.num_tokens <= sum(Position.parse(output.event_id).counts)
    output.check_end()
    return events


def by_choice(events: list[Event]) -> list[list[tuple[int, Delta]]]:
    """Return for each choice its events, each with the choice's own number."""
    return [
        [(Position.parse(event_id).counts[i], delta) for event_id, index, delta in events if index == i]
        for i in range(len(TEXTS))
    ]


@given(st.sampled_from(BODIES), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_a_reader_goes_on_with_another_order_of_the_same_tokens(
    body: dict[str, Any], n: int, times_out: bool, rng: random.Random
) -> None:
    plan = plan_of(n=n, **body)
    outputs = outputs_of(plan, times_out)
    whole = read(plan, computed(outputs, rng))
    for number, (event_id, _, _) in enumerate(whole, 1):
        rest = read(plan, computed(outputs, rng), event_id)
        assert by_choice(whole[:number] + rest) == by_choice(whole), "nothing twice, nothing missing"
        assert (rest or whole)[-1][0] == whole[-1][0], "the end has one id"
    ids = [event_id for event_id, _, _ in whole]
    assert len(set(ids)) == len(ids)
    if body == {"return_token_ids": True} and not times_out:
        assert ids[-1] == ".".join(str(len(text.encode())) for text in TEXTS[:n])
        assert len(ids) == sum(Position.parse(ids[-1]).counts), "one event a token"


def test_an_output_of_several_tokens_is_one_for_each() -> None:
    scores = tuple(TokenLogprobs(i, -i / 8, 1) for i in range(3))
    output = TokenOutput("a", (0, 1, 2), scores, (None,), FinishReason.STOP, 2, 5)
    assert list(single_tokens(output)) == [
        TokenOutput("a", (0,), scores[:1], (None,), None, None, 5),
        TokenOutput("a", (1,), scores[1:2], None, None, None, 5),
        TokenOutput("a", (2,), scores[2:], None, FinishReason.STOP, 2, 5),
    ]


@pytest.mark.parametrize("text", ["0", "17", "17.16.18", "17.16.18.end", "3.end"])
def test_an_id_is_read_back_as_it_was_written(text: str) -> None:
    assert str(Position.parse(text)) == text


@pytest.mark.parametrize(
    ("n", "text", "rule"),
    [
        (1, "1.1", "must have one number"),
        (3, "1", "must have 3 numbers, one for each choice"),
        (1, "41", "may be at most 40, as the completion has no more tokens"),
        (2, "1.41", "may be at most 40.40, as the completion has no more tokens"),
    ],
)
def test_a_position_that_the_completion_cannot_have_is_refused(n: int, text: str, rule: str) -> None:
    with pytest.raises(ServiceError) as raised:
        LastEvent.parse("starting_after", text).check(plan_of(n=n))
    assert (str(raised.value), raised.value.code) == (f"starting_after {rule}, got '{text}'", "invalid_value")


def test_a_reader_that_has_more_than_a_completion_that_ended_is_told_so() -> None:
    plan = plan_of()
    end = TokenOutput(plan.requests[0].request_id, tuple(b"abc"), finish_reason=FinishReason.LENGTH)
    with pytest.raises(ServiceError, match="starting_after may be at most 3, as the completion has no more tokens"):
        read(plan, [end], "4")
