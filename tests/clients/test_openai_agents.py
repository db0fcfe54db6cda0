"""openai-agents, which speaks responses: tools, a handoff, a session, streams and an output of a type."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import TOOLS, scripted
from tests.server.conftest import MODEL, LiveServer

CLIENT = "openai-agents"
pytestmark = pytest.mark.clients


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def work(url: str, model: str) -> dict[str, Any]:
    import asyncio

    import agents
    import openai
    import pydantic

    class Place(pydantic.BaseModel):
        city: str

    def get_weather(city: str) -> str:
        """Return the weather of a city."""
        return f"Rain in {city}"

    async def run() -> dict[str, Any]:
        agents.set_tracing_disabled(True)
        agents.set_default_openai_client(openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0), False)
        offered = [agents.function_tool(get_weather), agents.WebSearchTool()]
        helper = agents.Agent(name="Helper", instructions="Use tools.", tools=offered, model=model)
        whole = await agents.Runner.run(helper, "Is it raining in Oslo?")
        stream = agents.Runner.run_streamed(helper, "Is it raining in Oslo?")
        events = [event async for event in stream.stream_events()]
        deltas = [
            event.data.delta
            for event in events
            if getattr(event, "data", None) is not None and event.data.type == "response.output_text.delta"
        ]
        spanish = agents.Agent(name="Spanish", instructions="Speak Spanish.", model=model)
        triage = agents.Agent(name="Triage", handoffs=[spanish], model=model)
        handed = await agents.Runner.run(triage, "Hola")
        typed = agents.Agent(name="Typed", output_type=Place, model=model)
        place = await agents.Runner.run(typed, "Where?")
        session = agents.SQLiteSession("one")
        plain = agents.Agent(name="Plain", model=model)
        said = [(await agents.Runner.run(plain, text, session=session)).final_output for text in ("One", "Two")]
        first = await agents.Runner.run(plain, "Three")
        second = await agents.Runner.run(plain, "Four", previous_response_id=first.last_response_id)
        return {
            "texts": [whole.final_output, stream.final_output, "".join(deltas)],
            "results": [item.output for item in whole.new_items if item.type == "tool_call_output_item"],
            "handed": [handed.last_agent.name, handed.final_output],
            "place": place.final_output.model_dump(),
            "said": [*said, first.final_output, second.final_output],
        }

    return asyncio.run(run())


def test_agents_work_to_the_end(client: Environment) -> None:
    weather, answer = call("get_weather", city="Oslo"), "It rains."
    engine = scripted(
        *(weather, answer, weather, answer, call("transfer_to_spanish"), "Hola."),
        *('{"city": "Oslo"}', "1", "2", "3", "4"),
    )
    with LiveServer(engine, template=TOOLS).running() as server:
        found = client.call(work, f"{server.url}/v1", MODEL)

    assert found["texts"] == [answer] * 3
    assert found["results"] == ["Rain in Oslo"]
    assert found["handed"] == ["Spanish", "Hola."]
    assert found["place"] == {"city": "Oslo"}
    assert found["said"] == ["1", "2", "3", "4"]
    prompts = [bytes(request.prompt_token_ids).decode() for request in engine.submitted]
    assert ["Rain in Oslo" in prompt for prompt in prompts[:4]] == [False, True] * 2
    assert "web_search" not in prompts[0]
    assert "system: Speak Spanish." in prompts[5]
    assert engine.submitted[6].params.grammar is not None
    assert "user: Oneassistant: 1user: Two" in prompts[8]
    assert "user: Threeassistant: 3user: Four" in prompts[10]
