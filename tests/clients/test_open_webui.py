"""Open WebUI: its own API before a server: models, chats, whole and streamed, with its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import text_of

CLIENT = "open-webui"
pytestmark = pytest.mark.clients
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The cat sat"}]
FIELDS = {"max_tokens": 12, "temperature": 0, "seed": 1}


def converse(url: str, folder: str, asked: list[dict[str, str]], fields: dict[str, Any]) -> dict[str, Any]:
    import json
    import os
    import socket
    import subprocess
    import sys
    import time
    from pathlib import Path

    import httpx

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        **{"DATA_DIR": folder, "WEBUI_AUTH": "False", "OFFLINE_MODE": "true", "RAG_EMBEDDING_ENGINE": "openai"},
        **{"ENABLE_OLLAMA_API": "false", "OPENAI_API_BASE_URL": url, "OPENAI_API_KEY": "none"},
        **{"WEBUI_SECRET_KEY": "x", "HOME": folder},
    }
    command = [str(Path(sys.executable).parent / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    log = (Path(folder) / "log").open("w")
    with log, subprocess.Popen(command, cwd=folder, env=os.environ | settings, stdout=log, stderr=log) as process:
        try:
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
            deadline = time.monotonic() + 200
            while True:
                assert process.poll() is None, "it does not start"
                assert time.monotonic() < deadline, "it does not answer"
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.5)
            token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
            client.headers["authorization"] = f"Bearer {token}"
            models = [model["id"] for model in client.get("/api/models").json()["data"]]
            body = {"model": models[0], "messages": asked, "features": {"web_search": False}, "tool_servers": []}
            whole = client.post("/api/chat/completions", json={**body, **fields, "stream": False})
            told = {**body, "stream": True, "params": fields, "stream_options": {"include_usage": True}}
            streamed = client.post("/api/chat/completions", json=told).text
            lines = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
            deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
        finally:
            process.terminate()
    return {
        "models": models,
        "whole": whole.json()["choices"][0]["message"]["content"],
        "streamed": "".join(delta.get("content") or "" for delta in deltas),
    }


def test_its_page_can_talk_with_a_server(client: Environment, chats: str, tmp_path: Path) -> None:
    found = client.call(converse, chats, str(tmp_path), ASKED, FIELDS)

    text = text_of(chats, messages=ASKED, **FIELDS)
    assert (found["whole"], found["streamed"]) == (text, text)
    assert len(found["models"]) == 1
