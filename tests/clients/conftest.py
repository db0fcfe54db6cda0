"""The servers that clients talk to, each a process of its own, and the environment of the client that a file names."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gptserve.engine.request import Request, TokenOutput
from tests.clients.environments import Environment, environments
from tests.clients.servers import CALL, OFTEN, TOOLS, served, write_chat_model
from tests.engine.held_engine import VARIABLE, EngineGate
from tests.server.conftest import LiveServer, close_all_templates, close_templates  # noqa: F401 - fixtures
from tests.server.fake_engine import EOS, INFO, FakeEngineClient, say
from tests.server.serving import LIMIT_S, MORTAL

LONG = replace(INFO, max_model_len=4096)


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest) -> Environment:
    """The environment of the client that the test file names as its CLIENT."""
    environment = environments()[request.module.CLIENT]
    if not environment.is_made:
        pytest.skip(f"build/clients/{environment.name} is missing or old; `make clients` makes it")
    return environment


@pytest.fixture(scope="session")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("Chromium is not installed")
    return found


@pytest.fixture(scope="session")
def stories() -> Iterator[str]:
    """The URL of a server with the embedded model, in fp32."""
    with served("--dtype", "float32", *OFTEN) as url:
        yield url


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def chats(chat_model: Path) -> Iterator[str]:
    """The URL of a server with a tiny model that has a chat template."""
    with served("--model", str(chat_model), "--served-model-name", "tiny", *OFTEN) as url:
        yield url


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server with the embedded model and a chat template that knows tools."""
    template = tmp_path_factory.mktemp("tools") / "template.jinja"
    template.write_text(TOOLS)
    with served("--chat-template", str(template), *OFTEN) as url:
        yield url


@pytest.fixture(scope="module")  # as close_templates is
def caller() -> Iterator[str]:
    """The URL of a server whose model calls get_weather, says what that returned, and writes JSON if it has to."""

    def reply(request: Request) -> Iterator[TokenOutput]:
        prompt = bytes(token_id for token_id in request.prompt_token_ids if token_id < EOS).decode()
        text = "It rains." if "Rain" in prompt else CALL
        grammar = request.params.grammar
        if grammar is not None and grammar.kind == "json":
            text = '{"city": "Oslo"}'
        return iter(say(text, then_eos=True)(request))

    with LiveServer(
        FakeEngineClient(reply, info=LONG), template=TOOLS, name_patterns=("claude-*",)
    ).running() as server:
        yield f"{server.url}/v1"


@pytest.fixture(scope="session")
def strict(chat_model: Path) -> Iterator[str]:
    """The URL of one with a key, and bodies of at most 5,000 bytes."""
    limits = ("--api-key", "secret", "--max-body-bytes", "5000")
    with served("--model", str(chat_model), "--served-model-name", "tiny", *limits) as url:
        yield url


@pytest.fixture(scope="session")
def full(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one that computes one request at a time, and is held amid one."""
    gate = EngineGate(tmp_path_factory.mktemp("gate"))
    gate.shut()
    limits = ("--max-num-seqs", "1", "--max-num-queued-reqs", "0")
    flags = ("--model", str(chat_model), "--served-model-name", "tiny", *limits)
    with served(*flags, main=MORTAL, **{VARIABLE: str(gate.folder)}) as url:
        body = {"prompt": "The cat", "max_tokens": 9, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=LIMIT_S) as response:
            lines = response.iter_lines()
            assert next(line for line in lines if line.startswith("data: "))
            yield url
            gate.open()
            assert "data: [DONE]" in lines
