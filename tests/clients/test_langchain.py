"""langchain-openai: chats and texts, whole, streamed, in batches; a conversation; an overflow; embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import post, served, text_of

CLIENT = "langchain-openai"
pytestmark = pytest.mark.clients
FIELDS = {"max_tokens": 12, "temperature": 0, "seed": 1}
WORDS = ["The cat sat", "and the mat", "1000 years old"]


def chat(url: str, fields: dict[str, Any], words: list[str]) -> dict[str, Any]:
    import asyncio

    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=url, api_key="none", max_retries=0, stream_usage=True, **fields)
    asked = [SystemMessage("Be brief."), HumanMessage(words[0])]
    first = model.invoke(asked)
    chunks = list(model.stream(asked))

    async def streamed() -> list[str]:
        return [chunk.content async for chunk in model.astream(asked)]

    second = model.invoke([*asked, first, HumanMessage("and then?")])
    counts = [(chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks]
    return {
        "texts": [first.content, "".join(chunk.content for chunk in chunks), "".join(asyncio.run(streamed()))],
        "usage": [first.usage_metadata["output_tokens"], sum(counts)],
        "batch": [answer.content for answer in model.batch(words)],
        "second": second.content,
    }


def test_chats(client: Environment, chats: str) -> None:
    def answer(*messages: tuple[str, str]) -> str:
        return text_of(chats, messages=[{"role": role, "content": text} for role, text in messages], **FIELDS)

    found = client.call(chat, chats, FIELDS, WORDS)

    asked = (("system", "Be brief."), ("user", WORDS[0]))
    first = answer(*asked)
    assert found["texts"] == [first] * 3
    assert found["usage"][0] == found["usage"][1] > 0
    assert found["batch"] == [answer(("user", text)) for text in WORDS]
    assert found["second"] == answer(*asked, ("assistant", first), ("user", "and then?"))


def complete(url: str, fields: dict[str, Any], words: list[str]) -> dict[str, Any]:
    from langchain_openai import OpenAI

    model = OpenAI(model="tiny", base_url=url, api_key="none", max_retries=0, **fields)
    whole, streamed, batch = model.invoke(words[0]), list(model.stream(words[0])), model.batch(words)
    return {"texts": [whole, "".join(streamed)], "batch": batch}


def test_texts(client: Environment, chats: str) -> None:
    texts = [text_of(chats, prompt=prompt, **FIELDS) for prompt in WORDS]

    assert client.call(complete, chats, FIELDS, WORDS) == {"texts": [texts[0]] * 2, "batch": texts}


def overflow(url: str, text: str) -> list[str]:
    from langchain_openai import ChatOpenAI

    try:
        ChatOpenAI(model="tiny", base_url=url, api_key="none", max_retries=0).invoke(text)
    except Exception as error:
        return [known.__name__ for known in type(error).__mro__]
    return []


def test_an_overflow_is_known_as_one(client: Environment, chats: str) -> None:
    assert "ContextOverflowError" in client.call(overflow, chats, "the cat sat on the mat and " * 400)


def call(url: str) -> dict[str, Any]:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    class Weather(BaseModel, extra="forbid"):
        """Tells the weather of a city."""

        city: str = Field(max_length=8)

    model = ChatOpenAI(model="storyteller", base_url=url, api_key="none", max_retries=0, max_tokens=200, temperature=0)
    asked = [HumanMessage("Is it raining?")]
    bound = model.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    first = bound.invoke(asked)
    streamed = None
    for chunk in bound.stream(asked):
        streamed = chunk if streamed is None else streamed + chunk
    [made] = first.tool_calls
    back = model.invoke([*asked, first, ToolMessage("Rain", tool_call_id=made["id"])])
    ways = ("json_schema", "function_calling")
    found = [model.with_structured_output(Weather, method=way).invoke(asked).model_dump() for way in ways]
    arguments = [made["args"], streamed.tool_calls[0]["args"]]
    return {"name": made["name"], "arguments": arguments, "back": back.content, "structured": found}


def test_tools_are_called_and_output_is_structured(client: Environment, tools: str) -> None:
    found = client.call(call, tools)

    assert found["name"] == "Weather"
    assert found["arguments"][0] == found["arguments"][1]
    assert [set(made) for made in (*found["arguments"], *found["structured"])] == [{"city"}] * 4
    assert found["back"]


def embed(url: str, words: list[str]) -> dict[str, Any]:
    import asyncio

    from langchain_openai import OpenAIEmbeddings

    # Without this it sends the token ids that OpenAI's tokenizer has for the text, whatever the model.
    plain: dict[str, Any] = {"check_embedding_ctx_length": False, "api_key": "none", "max_retries": 0}
    model = OpenAIEmbeddings(model="tiny", base_url=url, chunk_size=2, **plain)
    short = OpenAIEmbeddings(model="tiny", base_url=url, dimensions=8, **plain)
    return {
        "texts": [model.embed_documents(words), asyncio.run(model.aembed_documents(words))],
        "query": model.embed_query(words[0]),
        "short": short.embed_query(words[0]),
    }


def test_embeddings(client: Environment, chat_model: Path) -> None:
    with served("--model", str(chat_model), "--served-model-name", "tiny", "--task", "embed") as url:
        found = client.call(embed, url, WORDS)
        vectors = [its["embedding"] for its in post(url, "embeddings", input=WORDS)["data"]]
        [short] = post(url, "embeddings", input=WORDS[:1], dimensions=8)["data"]

    assert found == {"texts": [vectors] * 2, "query": vectors[0], "short": short["embedding"]}
