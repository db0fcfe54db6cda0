"""LangChain's client of Anthropic's API: texts, a tool and its result, an output of a type, a count of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.environments import Environment
from tests.server.conftest import MODEL

CLIENT = "langchain-anthropic"
pytestmark = pytest.mark.clients


def work(url: str, model: str) -> dict[str, Any]:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from pydantic import BaseModel

    class Place(BaseModel):
        city: str

    def get_weather(city: str) -> str:
        """Return the weather of a city."""
        return f"Rain in {city}"

    chat = ChatAnthropic(model=model, base_url=url, api_key="none", max_tokens=200, max_retries=0)
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    asked = [SystemMessage([cached]), HumanMessage("Is it raining in Oslo?")]
    with_tools = chat.bind_tools([get_weather], tool_choice="auto")
    called = with_tools.invoke(asked)
    results = [ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]) for call in called.tool_calls]
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    return {
        "inputs": [call["args"] for call in called.tool_calls],
        "answer": with_tools.invoke([*asked, called, *results]).content,
        "streamed": "".join(part.text for part in with_tools.stream([*asked, called, *results])),
        "stopped": chat.bind(stop=["ns"], **thinking).invoke([HumanMessage("Rain?")]).content,
        "place": chat.with_structured_output(Place, method="json_schema").invoke("Where?").model_dump(),
        "counted": chat.get_num_tokens_from_messages([HumanMessage("Hi")]),
    }


def test_a_chat_with_tools(client: Environment, caller: str) -> None:
    found = client.call(work, caller.removesuffix("/v1"), MODEL)

    assert found.pop("counted") > 0
    assert found == {
        "inputs": [{"city": "Oslo"}],
        "answer": "It rains.",
        "streamed": "It rains.",
        "stopped": "It rai",
        "place": {"city": "Oslo"},
    }
