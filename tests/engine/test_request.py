"""Requests check themselves: every rule, with the exact sentence a client will read."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.info import EngineInfo
from gptserve.engine.request import Request, SamplingParams

INFO = EngineInfo(
    vocab_size=100,
    max_model_len=32,
    eos_token_ids=(99,),
    device="cpu",
    dtype="float32",
    attention_backend="reference",
    product="torch",
    block_size=16,
    num_blocks=8,
    kv_cache_bytes=2**20,
    max_num_seqs=4,
    max_num_queued_reqs=4,
    fingerprint="gptserve-0",
    batch_invariant=True,
)
NAN, INF = float("nan"), float("inf")

CONTEXT = "is too long. This model's maximum context length is 32 tokens"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
        ("max_tokens", -5, "max_tokens must be at least 1, got -5"),
        ("temperature", -0.1, "temperature must be in [0.0, 2.0], got -0.1"),
        ("temperature", 2.1, "temperature must be in [0.0, 2.0], got 2.1"),
        ("temperature", NAN, "temperature must be in [0.0, 2.0], got nan"),
        ("temperature", INF, "temperature must be in [0.0, 2.0], got inf"),
        ("top_k", -2, "top_k must be at least 0, got -2"),
        ("top_p", 0.0, "top_p must be in (0.0, 1.0], got 0.0"),
        ("top_p", 1.5, "top_p must be in (0.0, 1.0], got 1.5"),
        ("min_p", -0.5, "min_p must be in [0.0, 1.0], got -0.5"),
        ("presence_penalty", 2.5, "presence_penalty must be in [-2.0, 2.0], got 2.5"),
        ("frequency_penalty", -INF, "frequency_penalty must be in [-2.0, 2.0], got -inf"),
        ("repetition_penalty", 0.0, "repetition_penalty must be in [0.01, 100.0], got 0.0"),
        ("repetition_penalty", 1e-40, "repetition_penalty must be in [0.01, 100.0], got 1e-40"),
        ("logprobs", 21, "logprobs must be in [0, 20], got 21"),
        ("prompt_logprobs", -1, "prompt_logprobs must be in [0, 20], got -1"),
        ("logit_bias", {5: 101.0}, "logit_bias.5 must be in [-100.0, 100.0], got 101.0"),
        ("logit_bias", dict.fromkeys(range(1025), 0.0), "logit_bias may have at most 1024 entries, got 1025"),
        ("stop_token_ids", tuple(range(65)), "stop_token_ids may have at most 64 entries, got 65"),
        ("min_tokens", -1, "min_tokens must be at least 0, got -1"),
        ("min_tokens", 17, "min_tokens must be at most max_tokens, which is 16, got 17"),
        ("allowed_token_ids", (), "allowed_token_ids must hold a token id, got []"),
        ("allowed_token_ids", (1,) * 1025, "allowed_token_ids may have at most 1024 entries, got 1025"),
        ("bad_words", ((1,),) * 129, "bad_words may have at most 128 entries, got 129"),
        ("bad_words", ((1,), ()), "bad_words must each have a token, got one without"),
    ],
)
def test_a_parameter_out_of_range_is_named_with_rule_and_value(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value) == message
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", None, "max_tokens must be an integer, got None"),
        ("max_tokens", 4.0, "max_tokens must be an integer, got 4.0"),
        ("max_tokens", True, "max_tokens must be an integer, got True"),
        ("min_tokens", "1", "min_tokens must be an integer, got '1'"),
        ("top_k", 1.5, "top_k must be an integer, got 1.5"),
        ("temperature", None, "temperature must be a number, got None"),
        ("temperature", "0.5", "temperature must be a number, got '0.5'"),
        ("top_p", [0.5], "top_p must be a number, got [0.5]"),
        ("repetition_penalty", 1j, "repetition_penalty must be a number, got 1j"),
        ("logprobs", True, "logprobs must be an integer or None, got True"),
        ("prompt_logprobs", 0.0, "prompt_logprobs must be an integer or None, got 0.0"),
        ("logit_bias", None, "logit_bias must be a mapping from token ids to numbers, got None"),
        ("logit_bias", {"5": 1.0}, "logit_bias must be a mapping from token ids to numbers, got {'5': 1.0}"),
        ("logit_bias", {5: "1"}, "logit_bias must be a mapping from token ids to numbers, got {5: '1'}"),
        ("stop_token_ids", None, "stop_token_ids must be a sequence of token ids, got None"),
        ("stop_token_ids", 5, "stop_token_ids must be a sequence of token ids, got 5"),
        ("stop_token_ids", (5, 1.0), "stop_token_ids must be a sequence of token ids, got (5, 1.0)"),
        ("allowed_token_ids", "ab", "allowed_token_ids must be a sequence of token ids, got 'ab'"),
        ("bad_words", None, "bad_words must be a sequence of sequences of token ids, got None"),
        ("bad_words", (5,), "bad_words must be a sequence of token ids, got 5"),
        ("bad_words", ["a" * 99], f"bad_words must be a sequence of token ids, got '{'a' * 79}..."),
        ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
        ("grammar", "{}", "grammar must be a Grammar or None, got '{}'"),
    ],
)
def test_a_parameter_of_a_wrong_type_is_named_with_rule_and_value(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value) == message
    assert (caught.value.param, caught.value.code) == (field, "invalid_type")


def test_lists_of_token_ids_are_taken_as_tuples() -> None:
    listed = SamplingParams(stop_token_ids=[1, 2], allowed_token_ids=[3], bad_words=[[4, 5], (6,)])  # type: ignore[arg-type]
    assert listed == SamplingParams(stop_token_ids=(1, 2), allowed_token_ids=(3,), bad_words=((4, 5), (6,)))


def test_a_whole_temperature_is_a_number() -> None:
    assert SamplingParams(temperature=1) == SamplingParams(temperature=1.0)


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_an_integer_too_large_for_a_float_is_refused_or_accepted_like_any_other(value: int) -> None:
    if value < 0:
        with pytest.raises(InvalidRequestError):
            SamplingParams(top_k=value)
    else:
        assert SamplingParams(top_k=value).top_k == value


@pytest.mark.parametrize(
    ("prompt", "params", "param", "code", "message"),
    [
        ((), {}, "prompt", "invalid_value", "prompt must hold at least one token, got an empty one"),
        ((100,), {}, "prompt", "invalid_value", "prompt: token ids must be in [0, 100), got 100"),
        ((3, -1), {}, "prompt", "invalid_value", "prompt: token ids must be in [0, 100), got -1"),
        (
            (1,) * 32,
            {},
            "prompt",
            "context_length_exceeded",
            f"The prompt {CONTEXT}, with a new one; the prompt has 32",
        ),
        (
            (1,) * 20,
            {"max_tokens": 13},
            "max_tokens",
            "context_length_exceeded",
            f"max_tokens or the prompt {CONTEXT}; the prompt has 20 and max_tokens is 13, together 33",
        ),
        (
            (1,),
            {"logit_bias": {2**70: 1.0}},
            "logit_bias",
            "invalid_value",
            f"logit_bias: token ids must be in [0, 100), got {2**70}",
        ),
        (
            (1,),
            {"stop_token_ids": (100,)},
            "stop_token_ids",
            "invalid_value",
            "stop_token_ids: token ids must be in [0, 100), got 100",
        ),
        (
            (1,),
            {"allowed_token_ids": (5, -1)},
            "allowed_token_ids",
            "invalid_value",
            "allowed_token_ids: token ids must be in [0, 100), got -1",
        ),
        (
            (1,),
            {"bad_words": ((5,), (6, 100))},
            "bad_words",
            "invalid_value",
            "bad_words: token ids must be in [0, 100), got 100",
        ),
        (
            (1,),
            {"allowed_token_ids": (99, 5, 6), "stop_token_ids": (5,), "bad_words": ((6,), (7, 8)), "min_tokens": 1},
            "allowed_token_ids",
            "invalid_value",
            "allowed_token_ids must hold a token that bad_words and min_tokens leave, got [99, 5, 6]",
        ),
    ],
)
def test_a_request_the_model_cannot_take_is_explained(
    prompt: tuple[int, ...], params: dict[str, Any], param: str, code: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Request("r", prompt, SamplingParams(**params), seed=0).check(INFO)
    assert (str(caught.value), caught.value.param, caught.value.code) == (message, param, code)


def test_a_request_that_just_fits_is_taken() -> None:
    Request("r", (0, 99) * 10, SamplingParams(max_tokens=12), seed=0).check(INFO)
    Request("r", (1,), SamplingParams(allowed_token_ids=(99,)), seed=0).check(INFO)
    Request("r", (1,), SamplingParams(allowed_token_ids=(99, 5), min_tokens=16, bad_words=((5, 5),)), seed=0).check(
        INFO
    )


@pytest.mark.parametrize(
    ("generated", "message"),
    [
        ((1, 2), "generated_token_ids must be fewer than max_tokens, which is 2, got 2"),
        ((100,), "generated_token_ids: token ids must be in [0, 100), got 100"),
    ],
)
def test_what_was_generated_already_is_checked_too(generated: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Request("r", (1,), SamplingParams(max_tokens=2), seed=0, generated_token_ids=generated).check(INFO)
    assert (str(caught.value), caught.value.param) == (message, "generated_token_ids")


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_is_a_non_negative_64_bit_integer(seed: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"seed must be in \[0, 2\*\*64\)"):
        Request("r", (1,), SamplingParams(), seed=seed)


def test_a_request_survives_the_way_between_processes() -> None:
    request = Request("r", (1, 2), SamplingParams(logit_bias={3: 1.5}, bad_words=((4, 5),)), seed=2**64 - 1)
    assert pickle.loads(pickle.dumps(request)) == request


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seed", 1.5, "seed must be an integer, got 1.5"),
        ("seed", True, "seed must be an integer, got True"),
        ("choice_index", 0.5, "choice_index must be an integer, got 0.5"),
        ("priority", "a", "priority must be an integer, got 'a'"),
        ("cache_salt", 5, "cache_salt must be text, got 5"),
    ],
)
def test_a_field_of_a_request_of_a_wrong_type_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Request(**{"request_id": "a", "prompt_token_ids": (1,), "params": SamplingParams(), "seed": 0, field: value})
    assert str(caught.value) == message
    assert (caught.value.param, caught.value.code) == (field, "invalid_type")
