from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from gptserve.engine.request import SamplingParams
from gptserve.server.api.schemas import CompletionRequest


def parse(**fields: object) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps({"prompt": "x", **fields}))


def test_the_defaults_are_the_engines() -> None:
    assert parse().sampling_params() == SamplingParams()


@pytest.mark.parametrize("name", sorted(set(CompletionRequest.model_fields) - {"prompt"}))
def test_null_is_the_default(name: str) -> None:
    assert parse(**{name: None}).sampling_params() == SamplingParams()
    assert getattr(parse(**{name: None}), name) == getattr(parse(), name)


def test_every_field_reaches_its_parameter() -> None:
    given = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": -1.0,
        "frequency_penalty": 1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "logprobs": 4,
    }
    params = parse(**given, logit_bias={"5": -100, "0": 1.5}, stop_token_ids=[1, 2], echo=True).sampling_params()
    assert params == SamplingParams(
        **given,  # type: ignore[arg-type]
        logit_bias={5: -100.0, 0: 1.5},
        stop_token_ids=(1, 2),
        prompt_logprobs=4,
    )


def test_top_k_may_be_switched_off_as_vllm_does() -> None:
    assert parse(top_k=-1).sampling_params().top_k == 0


def test_echo_without_logprobs_asks_for_none_of_the_prompt() -> None:
    assert parse(echo=True).sampling_params().prompt_logprobs is None
    assert parse(logprobs=2).sampling_params().prompt_logprobs is None


@pytest.mark.parametrize("prompt", ["x", ["x", "y"], [1, 2], [[1], [2, 3]], [], ""])
def test_a_prompt_keeps_its_form(prompt: object) -> None:
    assert parse(prompt=prompt).prompt == prompt


@pytest.mark.parametrize("stop", ["x", ["x", "y"], []])
def test_a_stop_keeps_its_form(stop: object) -> None:
    assert parse(stop=stop).stop == stop


@pytest.mark.parametrize("name", ["max_tokens", "seed", "n", "logprobs", "temperature", "echo", "stream"])
@pytest.mark.parametrize("value", ["1", [1], {}])
def test_a_value_of_another_type_is_not_converted(name: str, value: object) -> None:
    with pytest.raises(ValidationError):
        parse(**{name: value})


def test_a_request_is_frozen() -> None:
    with pytest.raises(ValidationError):
        parse().n = 2
