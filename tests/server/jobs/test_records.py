"""Outputs as JSON: read back as they were, or refused."""

from __future__ import annotations

import math

import pytest

from gptserve.engine.request import TokenLogprobs, TokenOutput
from gptserve.server.jobs.records import decode_outputs, encode_outputs


def test_floats_come_back_bit_for_bit() -> None:
    values = [-0.1, -1 / 3, -5e-324, -1.7976931348623157e308, -math.inf, 0.0]
    outputs = (TokenOutput("a", (1,) * len(values), tuple(TokenLogprobs(1, value, 1) for value in values)),)
    assert [entry.logprob.hex() for entry in decode_outputs(encode_outputs(outputs))[0].logprobs] == [
        value.hex() for value in values
    ]


@pytest.mark.parametrize("text", ["{}1", "[1]", '[{"token_ids": 1}]', '[{"request_id": "a", "token_ids": [], "x": 1}]'])
def test_what_are_no_outputs_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_outputs(text)
