"""inspect-ai, an evaluator: answers, logprobs, a JSON Schema and tools, by chats and by responses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.environments import Environment

CLIENT = "inspect-ai"
pytestmark = pytest.mark.clients


def evaluate(url: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    import os
    import tempfile

    os.environ |= {"GPTSERVE_BASE_URL": url, "GPTSERVE_API_KEY": "none"}
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, ResponseSchema
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import Tool, tool
    from inspect_ai.util import json_schema
    from pydantic import BaseModel

    class Answer(BaseModel):
        yes: bool

    @tool
    def get_weather() -> Tool:
        async def execute(city: str) -> str:
            """Say how the weather is.

            Args:
                city: Name of a city.
            """
            return f"It rains in {city}."

        return execute

    schema = ResponseSchema(name="answer", json_schema=json_schema(Answer))
    fields: list[dict[str, Any]] = [{"seed": 1}, {"logprobs": True, "top_logprobs": 2}, {"response_schema": schema}, {}]
    found = []
    for config in fields:
        solver = generate() if config else [use_tools(get_weather()), generate(tool_calls="none")]
        task = Task([Sample(input="A fox", target="fox")], solver=solver, scorer=includes())
        settings = GenerateConfig(max_tokens=40, temperature=0, max_retries=0, **config).model_dump(exclude_none=True)
        with tempfile.TemporaryDirectory() as folder:
            [log] = eval(
                task,
                model="openai-api/gptserve/storyteller",
                model_args=options,
                log_dir=folder,
                display="none",
                **settings,
            )
            [sample] = log.samples or []
            logprobs = sample.output.choices[0].logprobs
            found.append(
                {
                    "status": log.status,
                    "text": sample.output.completion,
                    "logprobs": len(logprobs.content) if logprobs else 0,
                }
            )
    return found


@pytest.mark.parametrize("options", [{}, {"responses_api": True}], ids=["chats", "responses"])
def test_an_evaluation(client: Environment, tools: str, options: dict[str, Any]) -> None:
    plain, with_logprobs, json, with_tools = client.call(evaluate, tools, options)

    assert {found["status"] for found in (plain, with_logprobs, json, with_tools)} == {"success"}
    assert plain["text"] == with_logprobs["text"]
    assert 0 < with_logprobs["logprobs"] <= 40
    assert json["text"] in ('{"yes":true}', '{"yes":false}')
