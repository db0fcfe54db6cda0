"""The command llm: a prompt, a conversation that goes on, a schema, and a tool with its result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import text_of

CLIENT = "llm"
pytestmark = pytest.mark.clients
FIELDS = {"max_tokens": 12, "temperature": 0, "seed": 1}
OPTIONS = [part for name, value in FIELDS.items() for part in ("-o", name, str(value))]
WEATHER = """
def get_weather(city: str) -> str:
    "Tells the weather of a city."
    return f"Rain in {city}"
"""


def ask(client: Environment, home: Path, url: str, model: str, *arguments: str) -> str:
    """Run llm with a model of the server, in a home of its own."""
    described = [f"- model_id: {model}", f"model_name: {model}", f"api_base: {url}"]
    described += ["supports_schema: true", "supports_tools: true"]
    (home / "extra-openai-models.yaml").write_text("\n  ".join(described) + "\n")
    variables = {"LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none"}
    return client.run("llm", "prompt", "-m", model, *arguments, **variables).removesuffix("\n")


def test_a_conversation(client: Environment, chats: str, tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "The cat sat"}]
    first = text_of(chats, messages=asked, **FIELDS)
    asked += [{"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
    second = text_of(chats, messages=asked, **FIELDS)

    assert ask(client, tmp_path, chats, "tiny", *OPTIONS, "The cat sat") == first
    assert ask(client, tmp_path, chats, "tiny", *OPTIONS, "--continue", "and then?") == second
    assert ask(client, tmp_path, chats, "tiny", *OPTIONS, "--no-stream", "The cat sat") == first


def test_a_schema(client: Environment, caller: str, tmp_path: Path) -> None:
    found = ask(client, tmp_path, caller, "test-model", "--schema", "city str", "Is it raining?")

    assert json.loads(found) == {"city": "Oslo"}


@pytest.mark.parametrize("how", [[], ["--no-stream"]])
def test_a_tool(client: Environment, caller: str, tmp_path: Path, how: list[str]) -> None:
    found = ask(client, tmp_path, caller, "test-model", "--functions", WEATHER, *how, "Is it raining?")

    assert found == "It rains."
