"""How a completion is written: what the routes' tests do not see of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gptserve.server.completions.encoding import PiecewiseEncoder
from gptserve.server.completions.shapes import CHAT_SHAPE, TEXT_SHAPE
from gptserve.server.schemas.completions import ChatChoice, Choice, ChunkChoice
from gptserve.server.text.output import Delta, TokenScore
from tests.server.conftest import NO_IDS, OF_PROMPT, OPENING, SAID

SCORES = [
    TokenScore(b" a", 0, -1.0, ((b"b", -0.25), (b"\xe2", -0.5))),
    TokenScore(b"\xc3", 2, -0.25, ((b"\xc3", -0.25),)),
]
DELTA = Delta(" a\ufffd", SCORES, "stop", "END", "Hm.")


def sent(value: object) -> Any:
    """Return `value` as a client parses it."""
    return json.loads(PiecewiseEncoder(ensure_ascii=False).encode(value))


def test_a_completion_has_parallel_lists_of_logprobs() -> None:
    choice = sent(TEXT_SHAPE.choice(1, DELTA))
    Choice.model_validate(choice, strict=True, extra="forbid")
    assert choice == sent(TEXT_SHAPE.part(1, DELTA)) | NO_IDS | OF_PROMPT
    assert choice == {
        "index": 1,
        "text": " a\ufffd",
        "logprobs": {
            "tokens": [" a", "bytes:\\xc3"],
            "token_logprobs": [-1.0, -0.25],
            "top_logprobs": [{"b": -0.25, "bytes:\\xe2": -0.5, " a": -1.0}, {"bytes:\\xc3": -0.25}],
            "text_offset": [0, 2],
        },
        "finish_reason": "stop",
        "stop_reason": "END",
        **NO_IDS,
        **OF_PROMPT,
    }


def test_a_token_without_a_logprob_has_no_others_either() -> None:
    logprobs: Any = sent(TEXT_SHAPE.choice(0, Delta("a", [TokenScore(b"a", 0, None, ())])))["logprobs"]
    assert (logprobs["token_logprobs"], logprobs["top_logprobs"]) == ([None], [None])


def test_of_tokens_that_share_a_name_the_likelier_is_reported() -> None:
    score = TokenScore(b"c", 0, -3.0, ((b"a", -0.5), (b"a", -2.0), (b"b", -2.5)))
    logprobs: Any = sent(TEXT_SHAPE.choice(0, Delta("c", [score])))["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -0.5, "b": -2.5, "c": -3.0}]


def test_a_chat_has_a_list_of_tokens_with_their_logprobs() -> None:
    choice = sent(CHAT_SHAPE.choice(1, DELTA))
    ChatChoice.model_validate(choice, strict=True, extra="forbid")
    tokens = [
        {
            "token": " a",
            "logprob": -1.0,
            "bytes": [32, 97],
            "top_logprobs": [
                {"token": "b", "logprob": -0.25, "bytes": [98]},
                {"token": "bytes:\\xe2", "logprob": -0.5, "bytes": [0xE2]},
            ],
        },
        {
            "token": "bytes:\\xc3",
            "logprob": -0.25,
            "bytes": [0xC3],
            "top_logprobs": [{"token": "bytes:\\xc3", "logprob": -0.25, "bytes": [0xC3]}],
        },
    ]
    assert choice == {
        "index": 1,
        "message": {**SAID, "content": " a\ufffd", "reasoning": "Hm.", "reasoning_content": "Hm."},
        "logprobs": {"content": tokens, "refusal": None},
        "finish_reason": "stop",
        "stop_reason": "END",
        **NO_IDS,
    }


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        (Delta("a"), {"content": "a"}),
        (Delta("a", reasoning="b"), {"reasoning": "b", "reasoning_content": "b", "content": "a"}),
        (Delta("", reasoning="b"), {"reasoning": "b", "reasoning_content": "b"}),
        (Delta("", None, "stop"), {}),
    ],
)
def test_a_part_of_a_chat_has_what_is_new(delta: Delta, expected: dict[str, str]) -> None:
    part = sent(CHAT_SHAPE.part(0, delta))
    ChunkChoice.model_validate(part, strict=True, extra="forbid")
    assert part["delta"] == expected


def test_a_chat_opens_with_its_role_and_a_completion_with_nothing() -> None:
    assert TEXT_SHAPE.opening is None
    assert CHAT_SHAPE.opening is not None
    assert sent(CHAT_SHAPE.opening(2)) == {
        "index": 2,
        "delta": OPENING,
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }
