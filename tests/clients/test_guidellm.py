"""guidellm: every request of a short run succeeds, and it counts the tokens that were asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.environments import Environment

CLIENT = "guidellm"
pytestmark = pytest.mark.clients
NUM_REQUESTS, NUM_TOKENS = 6, 12


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_request_succeeds(client: Environment, chats: str, chat_model: Path, tmp_path: Path, path: str) -> None:
    report = tmp_path / "report.json"
    client.run(
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={chats.removesuffix('/v1')},request_format={path}"),
        *("--tokenizer", f"kind=huggingface_auto,model={chat_model}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=20,output_tokens={NUM_TOKENS}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--output", f"kind=json,path={report}"),
        "--disable-console",
    )
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    done = benchmark["requests"]
    assert (len(done["successful"]), done["errored"], done["incomplete"]) == (NUM_REQUESTS, [], [])
    assert {request["output_tokens"] for request in done["successful"]} == {NUM_TOKENS}
