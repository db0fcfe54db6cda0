"""Claude Code's program in print mode: a text of the embedded model, a file read and edited, a prompt too long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import TOOLS, scripted, served
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngineClient

CLIENT = "claude-code"
pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def run(client: Environment, url: str, home: Path, asked: str, *flags: str) -> dict[str, Any]:
    """Let it do what is asked, to the end; return the last of its events. It chooses the name of the model."""
    home.mkdir(exist_ok=True)
    (home / "settings.json").write_text("{}")
    [program] = (client.folder / "node_modules" / "@anthropic-ai").glob("claude-code-linux-*/claude")
    words = ["--print", asked, "--output-format", "stream-json", "--verbose", *flags]
    said = client.run(
        "sh",
        "-c",
        'cd "$0" && exec "$@"',
        str(home),
        str(program),
        *words,
        HOME=str(home),
        CLAUDE_CONFIG_DIR=str(home),
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_RETRIES="0",
    )
    events: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines()]
    return events[-1]


def prompts(engine: FakeEngineClient) -> list[str]:
    return [bytes(request.prompt_token_ids).decode() for request in engine.submitted]


def test_the_embedded_model_answers(client: Environment, tmp_path: Path) -> None:
    names = ("--served-model-name", "storyteller", "--served-model-name", "claude-*")
    with served("--chat-template", "plain", *names) as url:
        short = ("--system-prompt", "Tell a story.", "--tools", "")
        result = run(client, url.removesuffix("/v1"), tmp_path / "home", "Say hello", *short)
    assert (result["subtype"], result["is_error"], result["num_turns"]) == ("success", False, 1)
    assert result["result"].strip()
    assert result["usage"]["output_tokens"] > 0


def test_it_reads_and_edits_a_file(client: Environment, tmp_path: Path) -> None:
    home, file = tmp_path / "home", tmp_path / "home" / "poem.txt"
    home.mkdir()
    file.write_text("Roses are blue\n")
    engine = scripted(
        "<think>Hm.</think>I read it." + call("Read", file_path=str(file)),
        "<think>So.</think>" + call("Edit", file_path=str(file), old_string="blue", new_string="réd"),
        "It is mended.",
    )
    template = TOOLS.replace("{{ m.role }}:", "{{ m.role }}:{{ m.reasoning_content | default('') }}:</think>")
    with LiveServer(engine, template=template, name_patterns=("claude-*",)).running() as server:
        result = run(client, server.url, home, "Mend the poem", "--permission-mode", "acceptEdits")

    assert (result["subtype"], result["is_error"], result["result"]) == ("success", False, "It is mended.")
    assert file.read_text() == "Roses are réd\n"
    first, second, third = prompts(engine)
    assert "Mend the poem" in first
    assert '"name": "Edit"' in first
    assert "Roses are blue" in second.rpartition("I read it.")[2]
    assert "assistant:Hm.:</think>" in second, "the thinking comes back, though it was left out of the answer"
    assert "assistant:So.:</think>" in third


def test_a_prompt_that_is_too_long_is_known_as_such(client: Environment, chats: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as ended:
        run(client, chats.removesuffix("/v1"), tmp_path / "home", "Say hello", "--model", "tiny", "--tools", "")
    assert "Prompt is too long" in str(ended.value)
