"""LlamaIndex's OpenAILike: chats and texts, whole and streamed; a call of a tool; an answer of a type; embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import post, served, text_of

CLIENT = "llama-index"
pytestmark = pytest.mark.clients
FIELDS = {"max_tokens": 12, "temperature": 0.0, "seed": 1}


def chat(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    given = {"max_tokens": fields["max_tokens"], "temperature": fields["temperature"]}
    kwargs = {"model": "tiny", "api_base": url, "api_key": "none", "max_retries": 0, **given}
    seed = {"additional_kwargs": {"seed": fields["seed"]}}
    chats, texts = (OpenAILike(is_chat_model=is_chat, **kwargs, **seed) for is_chat in (True, False))
    asked = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="The cat sat")]
    first = chats.chat(asked).message
    streamed = "".join(part.delta or "" for part in chats.stream_chat(asked))
    second = chats.chat([*asked, first, ChatMessage(role="user", content="and then?")]).message
    whole = texts.complete("The cat sat").text
    pieces = "".join(part.delta or "" for part in texts.stream_complete("The cat sat"))
    return {"texts": [first.content, streamed], "second": second.content, "completed": [whole, pieces]}


def test_chats_and_texts(client: Environment, chats: str) -> None:
    found = client.call(chat, chats, FIELDS)

    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The cat sat"}]
    first = text_of(chats, messages=asked, **FIELDS)
    more = [*asked, {"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
    assert found == {
        "texts": [first] * 2,
        "second": text_of(chats, messages=more, **FIELDS),
        "completed": [text_of(chats, prompt="The cat sat", **FIELDS)] * 2,
    }


def call(url: str) -> dict[str, Any]:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel

    class Weather(BaseModel):
        """The weather of a city."""

        city: str

    def get_weather(city: str) -> str:
        """Tell the weather of a city."""
        return f"Rain in {city}"

    how = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    model = OpenAILike(model="test-model", api_base=url, api_key="none", **how)
    tool = FunctionTool.from_defaults(get_weather)
    first = model.chat_with_tools([tool], user_msg="Is it raining?")
    *_, streamed = model.stream_chat_with_tools([tool], user_msg="Is it raining?")
    calls = [*model.get_tool_calls_from_response(first), *model.get_tool_calls_from_response(streamed)]
    said = model.predict_and_call([tool], user_msg="Is it raining?")
    result = ChatMessage(role="tool", content="Rain", additional_kwargs={"tool_call_id": calls[0].tool_id})
    last = model.chat([ChatMessage(role="user", content="Is it raining?"), first.message, result])
    how = {"is_chat_model": True, "should_use_structured_outputs": True}
    typed = OpenAILike(model="test-model", api_base=url, api_key="none", **how)
    weather = typed.as_structured_llm(Weather).chat([ChatMessage(role="user", content="Is it raining?")])
    return {
        "calls": [[made.tool_name, made.tool_kwargs] for made in calls],
        "said": said.response,
        "last": last.message.content,
        "typed": weather.raw.model_dump(),
    }


def test_a_tool_is_called_and_an_answer_has_its_type(client: Environment, caller: str) -> None:
    assert client.call(call, caller) == {
        "calls": [["get_weather", {"city": "Oslo"}]] * 2,
        "said": "Rain in Oslo",
        "last": "It rains.",
        "typed": {"city": "Oslo"},
    }


def embed(url: str, words: list[str]) -> dict[str, Any]:
    import asyncio

    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    model = OpenAILikeEmbedding(model_name="tiny", api_base=url, api_key="none", embed_batch_size=2, max_retries=0)
    return {
        "texts": [model.get_text_embedding_batch(words), asyncio.run(model.aget_text_embedding_batch(words))],
        "query": model.get_query_embedding(words[0]),
    }


def test_embeddings(client: Environment, chat_model: Path) -> None:
    words = ["The cat sat", "and the mat", "1000 years old"]
    with served("--model", str(chat_model), "--served-model-name", "tiny", "--task", "embed") as url:
        found = client.call(embed, url, words)
        vectors = [its["embedding"] for its in post(url, "embeddings", input=words)["data"]]

    assert found == {"texts": [vectors] * 2, "query": vectors[0]}
