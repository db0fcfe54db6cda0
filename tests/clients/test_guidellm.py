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
def test_every_request_succeeds(
    client: Environment, stories: str, storyteller: Path, tmp_path: Path, path: str
) -> None:
    report = tmp_path / "report.json"
    client.run(
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={stories.removesuffix('/v1')},request_format={path}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=20,output_tokens={NUM_TOKENS}"),
        *("--processor", str(storyteller)),
        *("--output", f"kind=json,path={report}"),
        "--disable-console",
    )
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    done = benchmark["requests"]
    assert (len(done["successful"]), done["errored"], done["incomplete"]) == (NUM_REQUESTS, [], [])
    assert {request["output_tokens"] for request in done["successful"]} == {NUM_TOKENS}
