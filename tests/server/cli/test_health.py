from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngineClient


def test_health_asks_the_server_of_the_same_settings(
    run: Any, serve: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(FakeEngineClient())
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    assert run("health", "--port", str(server.port)) == (0, f"{server.url}/health is healthy\n", "")
    monkeypatch.setenv("GPTSERVE_PORT", str(server.port))
    assert run("health", "--host", "0.0.0.0")[0] == 0
    server.engine.is_alive = False
    status, _, err = run("health")
    assert (status, err.partition(": {")[0]) == (1, f"gptserve: {server.url}/health answers 503")


def test_health_without_a_server_or_with_a_wrong_setting_has_status_1(run: Any) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/health"
        assert run("health", "--port", str(unused.getsockname()[1])) == (
            *(1, "", f"gptserve: {url} does not answer: [Errno 111] Connection refused\n"),
        )
    assert run("health", "--port", "x") == (1, "", "gptserve: --port must be a whole number, got 'x'\n")


def test_config_shows_values_and_where_they_are_from(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('max_num_seqs = 3\napi-key = ["sk-secret"]\n')
    monkeypatch.setenv("GPTSERVE_HOST", "0.0.0.0")
    status, out, err = run("config", "/no/such/model", "--config", str(file), "--port", "9000")

    assert (status, err) == (0, "")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines()}
    assert rows["port"] == ["9000", "--port"]
    assert rows["host"] == ["0.0.0.0", "GPTSERVE_HOST"]
    assert rows["max-num-seqs"] == ["3", f"max_num_seqs in {file}"]
    assert rows["api-key"] == ["***", f"api-key in {file}"]
    assert rows["block-size"] == ["16", "default"]
    assert rows["model"] == ["/no/such/model", "--model"]
    assert "sk-secret" not in out


def test_config_names_what_is_wrong(run: Any) -> None:
    assert run("config", "--port", "70000") == (2, "", "gptserve config: port must be in [0, 65535], got 70000\n")
