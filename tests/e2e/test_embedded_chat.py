"""The embedded model chats through the real server: what it was asked for, more of it, and an honest line."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from gptserve.weights.storyteller.recipe.chat import HONEST
from gptserve.weights.storyteller.recipe.evaluate_chat import keeps
from tests.server.serving import Process

pytestmark = pytest.mark.slow

STORY = "Tell me a story about a fox named Mia with a red kite."
SOME = pytest.mark.slow  # the first of each list runs always


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    process = Process()
    with process.wait_until_ready() as client:
        yield client
    process.popen.terminate()
    assert process.wait()[0] == 0


def answer(client: httpx.Client, *contents: str) -> str:
    """Return the whole greedy answer to a conversation that begins and ends with the user."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    response = client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0})
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


@pytest.mark.parametrize(
    ("request_text", "words"),
    [
        (STORY, ["fox", "Mia", "red kite"]),
        pytest.param("a story with a penguin called leo at the beach", ["penguin", "Leo", "beach"], marks=SOME),
        pytest.param("please, something sad with a lost key", ["sad", "key"], marks=SOME),
        pytest.param("Can you tell me a story about a bear and a mouse?", ["bear", "mouse"], marks=SOME),
    ],
)
def test_a_story_has_what_it_was_asked_for(client: httpx.Client, request_text: str, words: list[str]) -> None:
    told = answer(client, request_text)
    assert "\n\n" in told
    assert [word for word in words if word not in told] == []


def test_and_then_goes_on_with_the_main_character(client: httpx.Client) -> None:
    story = answer(client, STORY)
    more = answer(client, STORY, story, "and then?")
    assert keeps("Mia", more)
    assert more != story


@pytest.mark.parametrize(
    "text", ["What is 2+2?", *(pytest.param(text, marks=SOME) for text in ("hi", "who are you?", "write code"))]
)
def test_any_other_request_gets_an_honest_line(client: httpx.Client, text: str) -> None:
    line = answer(client, text)
    assert HONEST in line
    assert "\n" not in line


def test_a_completion_ends_without_the_tokens_of_a_chat(client: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "return_token_ids": True}
    [choice] = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"][-1] == 0
    assert max(choice["token_ids"]) < 2028, "the first token of the chat template"
