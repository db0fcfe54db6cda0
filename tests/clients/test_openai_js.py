"""openai for JavaScript: texts, chats, its helper, messages fed back, classes of errors, a broken stream, a batch."""

from __future__ import annotations

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import text_of

CLIENT = "openai-js"
pytestmark = pytest.mark.clients
TEXT = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0.8, "seed": 1}
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The cat sat on the mat"}]
CHAT = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0, "seed": 1}


def test_texts(client: Environment, stories: str) -> None:
    assert client.call_js("openai.mjs", "texts", stories, TEXT) == [text_of(stories, **TEXT)] * 2


def test_chats(client: Environment, chats: str) -> None:
    found = client.call_js("openai.mjs", "chats", chats, CHAT)

    assert found["texts"] == [text_of(chats, **CHAT)] * 3
    assert found["usage"][0] == found["usage"][1] > 0


@pytest.mark.parametrize("how", ["object", "helper"])
def test_an_answer_is_fed_back(client: Environment, chats: str, how: str) -> None:
    first = text_of(chats, **CHAT)
    asked = [*HELLO, {"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]

    assert client.call_js("openai.mjs", "feedBack", chats, CHAT, how) == [
        first,
        text_of(chats, **{**CHAT, "messages": asked}),
    ]


def test_each_error_has_its_class(client: Environment, strict: str) -> None:
    cases = [[{}, {"apiKey": "wrong"}], [{"temperature": 9}, {}], [{"model": "gpt-9"}, {}]]

    assert client.call_js("openai.mjs", "errorsOf", strict, cases) == [
        ["AuthenticationError", 401, "invalid_api_key", None],
        ["BadRequestError", 400, "invalid_value", "temperature"],
        ["NotFoundError", 404, "model_not_found", "model"],
    ]


def test_a_full_server_is_a_rate_limit(client: Environment, full: str) -> None:
    assert client.call_js("openai.mjs", "errorsOf", full, [[{}, {}]]) == [["RateLimitError", 429, "queue_full", None]]


def test_a_stream_is_broken_off(client: Environment, stories: str) -> None:
    assert client.call_js("openai.mjs", "breakOff", stories, {**TEXT, "max_tokens": 900}) == 1


def test_a_batch(client: Environment, stories: str) -> None:
    bodies = [{**TEXT, "seed": seed} for seed in range(3)]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)
    ]
    found = client.call_js("openai.mjs", "batch", stories, lines)

    texts = [text_of(stories, **body) for body in bodies]
    assert found == {"texts": texts, "counts": [3, 3], "are_listed": True, "deleted": True}
