"""pydantic-ai: texts, a conversation that goes on, outputs of a type; by messages a tool, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import text_of
from tests.server.conftest import MODEL

CLIENT = "pydantic-ai"
pytestmark = pytest.mark.clients
FIELDS = {"max_tokens": 12, "temperature": 0.0, "seed": 1}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The cat sat"}]


def converse(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    import asyncio

    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, system_prompt="Be brief.", model_settings=fields)

    async def run() -> dict[str, Any]:
        first = await agent.run("The cat sat")
        second = await agent.run("and then?", message_history=first.all_messages())
        async with agent.run_stream("The cat sat") as stream:
            streamed = [part async for part in stream.stream_text(delta=True)]
        usage = first.usage() if callable(first.usage) else first.usage
        outputs = {"first": first.output, "second": second.output, "streamed": "".join(streamed)}
        return {**outputs, "usage": usage.output_tokens}

    return asyncio.run(run())


def test_a_conversation(client: Environment, chats: str) -> None:
    first = text_of(chats, messages=ASKED, **FIELDS)
    asked = [*ASKED, {"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
    second = text_of(chats, messages=asked, **FIELDS)

    found = client.call(converse, chats, FIELDS)

    assert 0 < found.pop("usage") <= FIELDS["max_tokens"]
    assert found == {"first": first, "second": second, "streamed": first}


def typed(url: str, way: str) -> dict[str, Any]:
    from pydantic import BaseModel, Field
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Weather(BaseModel, extra="forbid"):
        city: str = Field(max_length=8)

    model = OpenAIChatModel("storyteller", provider=OpenAIProvider(base_url=url, api_key="none"))
    output = {"tool": ToolOutput, "native": NativeOutput}[way](Weather)
    agent = Agent(model, output_type=output, model_settings={"max_tokens": 200, "temperature": 0.0})
    return agent.run_sync("Is it raining?").output.model_dump()


@pytest.mark.parametrize("way", ["tool", "native"])
def test_an_output_has_its_type(client: Environment, tools: str, way: str) -> None:
    assert set(client.call(typed, tools, way)) == {"city"}


def use_a_tool(url: str, model: str) -> list[str]:
    import asyncio

    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
    from pydantic_ai.providers.anthropic import AnthropicProvider

    def get_weather(city: str) -> str:
        return f"Rain in {city}"

    settings = AnthropicModelSettings(anthropic_cache_instructions=True, anthropic_cache_tool_definitions=True)
    asks = AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="none"), settings=settings)
    agent = Agent(asks, instructions="Be brief.", tools=[get_weather])

    async def run() -> list[str]:
        whole = await agent.run("Is it raining?")
        async with agent.run_stream("Is it raining?") as stream:
            return [whole.output, await stream.get_output()]

    return asyncio.run(run())


def test_a_tool_by_messages(client: Environment, caller: str) -> None:
    assert client.call(use_a_tool, caller.removesuffix("/v1"), MODEL) == ["It rains."] * 2
