from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gptserve.server.completions.encoding import PIECE_ENTRIES, PiecewiseEncoder
from gptserve.server.completions.shapes import CHAT_SHAPE, TEXT_SHAPE
from gptserve.server.text.output import Delta, PromptScores, TokenScore
from tests.server.fake_engine import ByteTokenizer, logprobs_of

NUM_TOKENS = 5 * PIECE_ENTRIES + 1
TOP = tuple((bytes([i]), -0.125) for i in range(20))
SCORES = [TokenScore(b"a", 0, -0.125, TOP)] * NUM_TOKENS
PROMPT = PromptScores([None, *(logprobs_of(97, 20) for _ in range(NUM_TOKENS))], 20, ByteTokenizer().token_bytes)
LONG = Delta("a", SCORES, prompt_logprobs=PROMPT)

Value = Callable[[], Any]
VALUES: list[Value] = [
    lambda: {"a": [1, 2.5, None, True], "b": {"c": []}, "é": "é\u2028", "d": {}},
    lambda: {"list": list(range(200)), "iterator": [0, 1, 2]},
    lambda: [],
    lambda: "text",
]


@pytest.mark.parametrize("ensure_ascii", [True, False])
@pytest.mark.parametrize("value", VALUES)
def test_the_pieces_are_the_json_of_the_whole(value: Value, ensure_ascii: bool) -> None:
    whole = json.dumps(value(), ensure_ascii=ensure_ascii, separators=(",", ":"))
    assert PiecewiseEncoder(ensure_ascii=ensure_ascii).encode(value()) == whole
    assert PiecewiseEncoder(ensure_ascii=ensure_ascii).encode_short(value()) == whole


@pytest.mark.parametrize("length", [0, 1, PIECE_ENTRIES - 1, PIECE_ENTRIES, PIECE_ENTRIES + 1, 5 * PIECE_ENTRIES])
def test_an_iterator_is_a_list_of_whatever_length(length: int) -> None:
    value = {"a": iter(range(length)), "b": [(i, iter("xy")) for i in range(2)]}
    assert json.loads(PiecewiseEncoder(ensure_ascii=True).encode(value)) == {
        "a": list(range(length)),
        "b": [[0, ["x", "y"]], [1, ["x", "y"]]],
    }


def test_what_json_does_not_have_is_an_error() -> None:
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            PiecewiseEncoder(ensure_ascii=True).encode({"a": iter([number])})


def num_entries(piece: str) -> int:
    """Return how many tokens a piece tells of, counted by the numbers in it."""
    return len(re.findall(r"-?[0-9]+\.[0-9]+", piece))


@pytest.mark.parametrize("shape", [TEXT_SHAPE, CHAT_SHAPE], ids=["text", "chat"])
def test_no_piece_holds_more_scores_than_that_many_tokens_have(shape: Any) -> None:
    def answer() -> dict[str, Any]:
        return {"choices": [shape.choice(i, LONG) for i in range(2)], **shape.after_choices(LONG)}

    per_token = 1 + len(TOP)
    pieces = [num_entries(piece) for piece in PiecewiseEncoder(ensure_ascii=True).pieces(answer())]
    num_scored = NUM_TOKENS * (4 if shape is TEXT_SHAPE else 3)
    assert max(pieces) <= PIECE_ENTRIES * per_token
    assert sum(pieces) >= num_scored * len(TOP)


def test_scores_are_ranked_only_while_their_piece_is_made() -> None:
    ranked = []

    def token_bytes(token_id: int) -> bytes:
        ranked.append(token_id)
        return b"a"

    delta = Delta("", prompt_logprobs=PromptScores(PROMPT.entries, 20, token_bytes))
    pieces: Iterator[str] = PiecewiseEncoder(ensure_ascii=True).pieces(TEXT_SHAPE.choice(0, delta))
    most, before = 0, 0
    for _ in pieces:
        most, before = max(most, len(ranked) - before), len(ranked)
    assert 0 < most <= PIECE_ENTRIES * 21
    assert len(ranked) == NUM_TOKENS * 21
