from __future__ import annotations

import pytest

from tests.server.conftest import Api


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_of_a_healthy_server(api: Api, path: str) -> None:
    response = api.get(path)
    assert response.status_code == 200
    assert response.json() == {"status": "ok"}


def test_an_engine_that_restarts_is_not_ready_but_lets_completions_wait(api: Api) -> None:
    api.engine.is_restarting = True
    response = api.get("/ready")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_restarting")
    assert "retry-after" in response.headers
    assert api.get("/health").status_code == 200
    assert api.complete(prompt="x", max_tokens=3).status_code == 200


def test_the_version_is_the_packages(api: Api) -> None:
    assert api.get("/version").json() == {"version": api.app.version}


def test_metrics_are_in_prometheus_format(api: Api) -> None:
    response = api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "# TYPE gptserve_num_requests_running gauge" in response.text
