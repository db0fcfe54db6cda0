"""Who may ask a serving process, and what for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.serving import LIMIT_S, Process

METRICS = "/metrics"
MODELS = "/v1/models"


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    (tmp_path / "keys").write_text("alice: 0ne\n")
    flags = ("--api-key", "m1ne,too", "--api-key-file", str(tmp_path / "keys"), "--protect-operations")
    process = Process(*flags, "--priority-scheduling", "--log-format", "json")
    yield process
    process.kill()


@pytest.mark.slow
def test_keys_open_under_their_names_and_the_file_is_followed(process: Process, tmp_path: Path) -> None:
    url = json.loads(process.wait_for_line(" ready on "))["message"].split()[-1]

    def status(path: str, key: str | None) -> int:
        headers = {"x-request-id": f"{path}:{key}"} | ({} if key is None else {"authorization": f"Bearer {key}"})
        return httpx.get(url + path, headers=headers, timeout=LIMIT_S).status_code

    assert [status(MODELS, key) for key in ("m1ne,too", "0ne", "m1ne", "2wo", None)] == [200, 200, 401, 401, 401]
    assert [status(path, None) for path in ("/health", "/ready", METRICS, "/version")] == [200, 200, 401, 401]
    assert status(METRICS, "0ne") == 200
    body = {"prompt": "Once", "max_tokens": 1, "priority": -1}
    bearer = {"authorization": "Bearer 0ne", "x-request-id": "a priority"}
    assert httpx.post(url + "/v1/completions", json=body, headers=bearer, timeout=LIMIT_S).status_code == 200

    (tmp_path / "new").write_text("bob: 2wo\n")
    (tmp_path / "new").replace(tmp_path / "keys")
    deadline = time.monotonic() + LIMIT_S
    while status(MODELS, "2wo") != 200:
        assert time.monotonic() < deadline, "the new key never opened"
    assert status(MODELS, "0ne") == 401

    process.popen.terminate()
    _, log = process.wait()
    lines = [json.loads(line) for line in log.splitlines() if '"request_id"' in line]
    names = {(line["request_id"], line.get("key")) for line in lines if line["status"] == 200}
    assert {(f"{MODELS}:m1ne,too", "key-76fd109da529"), (f"{MODELS}:0ne", "alice"), (f"{MODELS}:2wo", "bob")} <= names
    told = "".join(line for line in log.splitlines(keepends=True) if '"request_id"' not in line)
    assert not any(key in told for key in ("m1ne", "0ne", "2wo"))
