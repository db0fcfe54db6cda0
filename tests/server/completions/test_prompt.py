from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gptserve.weights.errors import TokenizerError
from tests.server.conftest import Api
from tests.server.fake_engine import ByteTokenizer, FakeEngineClient

ENDLESS = "aaa!"
CHAT = [{"role": "user", "content": ENDLESS}]


class FailingTokenizer(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        if ENDLESS in text:
            raise TokenizerError("text has no tokens")
        return super().encode(text)

    def encode_with_special(self, text: str, *, template: bool = False) -> list[int]:
        self.encode(text)
        return super().encode_with_special(text, template=template)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": ENDLESS}, "prompt"),
        ("/v1/completions", {"prompt": ["a", ENDLESS]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "bad_words": [ENDLESS]}, "bad_words"),
        ("/v1/chat/completions", {"messages": CHAT}, "messages"),
        ("/v1/responses", {"input": ENDLESS}, "input"),
        ("/tokenize", {"prompt": ENDLESS}, "prompt"),
        ("/tokenize", {"messages": CHAT}, "messages"),
    ],
)
def test_a_text_without_tokens_is_refused_by_the_name_of_its_field(
    make_api: Callable[..., Api], path: str, body: dict[str, Any], field: str
) -> None:
    api = make_api(FakeEngineClient(), tokenizer=FailingTokenizer())
    response = api.request("POST", path, json=body)
    error = {"type": "invalid_request_error", "param": field, "code": "invalid_value"}
    assert (response.status_code, response.json()) == (
        400,
        {"error": {"message": f"{field}: text has no tokens", **error}},
    )
