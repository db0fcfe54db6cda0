"""The Codex CLI in its default configuration: turns with a text, a shell command, and a tool of a namespace."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import TOOLS, scripted
from tests.server.conftest import MODEL, LiveServer
from tests.server.fake_engine import FakeEngineClient

CLIENT = "codex"
pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


MCP = """
import json, sys

for line in sys.stdin:
    asked = json.loads(line)
    given = asked.get("params", {}).get("arguments", {}).get("a", 0)
    answers = {
        "initialize": {
            "protocolVersion": asked.get("params", {}).get("protocolVersion"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "calc", "version": "1"},
            "instructions": "It counts.",
        },
        "tools/list": {
            "tools": [
                {
                    "name": "add",
                    "description": "Add one",
                    "inputSchema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    "annotations": {"readOnlyHint": True},
                }
            ]
        },
        "tools/call": {"content": [{"type": "text", "text": f"sum {given + 1}"}]},
    }
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answers.get(asked["method"], {})}), flush=True)
"""
"""A server of the Model Context Protocol with one tool."""


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def run(
    client: Environment, engine: FakeEngineClient, home: Path, asked: str, template: str = TOOLS
) -> list[dict[str, Any]]:
    """Let Codex do what is asked to the end of its turn; return its events."""
    with LiveServer(engine, template=template).running() as server:
        return run_at(client, f"{server.url}/v1", MODEL, home, asked)


def run_at(client: Environment, url: str, model: str, home: Path, asked: str) -> list[dict[str, Any]]:
    """Do so with a server at this address."""
    work = home / "work"
    work.mkdir(parents=True)
    (home / "mcp.py").write_text(MCP)
    (home / "config.toml").write_text(
        f'model = "{model}"\nmodel_provider = "local"\n'
        f'[model_providers.local]\nname = "local"\nbase_url = "{url}"\nwire_api = "responses"\n'
        f"[mcp_servers.calc]\ncommand = {json.dumps(sys.executable)}\nargs = [{json.dumps(str(home / 'mcp.py'))}]\n"
    )
    program = str(client.folder / "node_modules" / ".bin" / "codex")
    # Codex's own sandbox needs what a container may lack.
    flags = ("--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--cd", str(work))
    said = client.run(program, "exec", *flags, asked, CODEX_HOME=str(home))
    return [json.loads(line) for line in said.splitlines()]


def ended(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the items of this type that were completed."""
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in items if item["type"] == kind]


def prompts(engine: FakeEngineClient) -> list[str]:
    return [bytes(request.prompt_token_ids).decode() for request in engine.submitted]


def test_a_turn_with_a_text(client: Environment, tmp_path: Path) -> None:
    engine = scripted("Hello, é!")
    events = run(client, engine, tmp_path, "Say hello")

    assert [message["text"] for message in ended(events, "agent_message")] == ["Hello, é!"]
    assert events[-1]["type"] == "turn.completed"
    [prompt] = prompts(engine)
    assert "user: Say hello" in prompt
    assert '"name": "multi_agent_v1__spawn_agent"' in prompt
    assert "web_search" not in prompt


def test_a_turn_with_a_shell_command(client: Environment, tmp_path: Path) -> None:
    engine = scripted("I look." + call("exec_command", cmd='echo "a$((20 + 3))b" > made; cat made'), "It is done.")
    events = run(client, engine, tmp_path, "Make a file")

    assert (tmp_path / "work" / "made").read_text() == "a23b\n"
    [ran] = ended(events, "command_execution")
    assert (ran["exit_code"], ran["status"]) == (0, "completed")
    assert [message["text"] for message in ended(events, "agent_message")] == ["I look.", "It is done."]
    first, second = prompts(engine)
    assert second.startswith(first.removesuffix("assistant:")), "the conversation goes on, and the prefix cache hits"
    rest = second[len(first) - len("assistant:") :]
    assert rest.startswith("assistant: I look.<tool_call>")
    assert "tool: " in rest
    assert "a23b" in rest


def test_a_turn_with_a_tool_of_a_namespace(client: Environment, tmp_path: Path) -> None:
    engine = scripted(call("multi_agent_v1__close_agent", target="nobody"), "There is none.")
    events = run(client, engine, tmp_path, "Close the agent")

    assert [message["text"] for message in ended(events, "agent_message")] == ["There is none."]
    _, second = prompts(engine)
    assert '"name": "multi_agent_v1__close_agent"' in second.rpartition("<tool_call>")[2]
    assert "tool: invalid agent id nobody" in second, "Codex knew the tool"


def test_a_turn_of_a_model_that_reasons(client: Environment, tmp_path: Path) -> None:
    engine = scripted("<think>Hm.</think>" + call("exec_command", cmd="echo a"), "<think>So.</think>It is done.")
    template = TOOLS.replace("{{ m.role }}:", "{{ m.role }}:{{ m.reasoning_content | default('') }}:</think>")
    events = run(client, engine, tmp_path, "Say a", template)

    assert [message["text"] for message in ended(events, "agent_message")] == ["It is done."]
    assert events[-1]["usage"]["reasoning_output_tokens"] > 0
    _, second = prompts(engine)
    assert "assistant:Hm.:</think>" in second, "the reasoning comes back"


def test_a_turn_with_a_tool_of_an_mcp_server(client: Environment, tmp_path: Path) -> None:
    engine = scripted(call("mcp__calc__add", a=41), "It is 42.")
    events = run(client, engine, tmp_path, "Add one to 41")

    [called] = ended(events, "mcp_tool_call")
    assert (called["server"], called["tool"], called["status"]) == ("calc", "add", "completed")
    assert [message["text"] for message in ended(events, "agent_message")] == ["It is 42."]
    first, second = prompts(engine)
    assert "About all tools mcp__calc__" in first
    assert "It counts." in first
    assert second.endswith("\nsum 42assistant:")
