from __future__ import annotations

import pytest

from tests.server.conftest import Api


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_of_a_healthy_server(api: Api, path: str) -> None:
    response = api.get(path)
    assert response.status_code == 200
    assert response.json() == {"status": "ok"}


def test_the_version_is_the_packages(api: Api) -> None:
    assert api.get("/version").json() == {"version": api.app.version}


def test_metrics_are_in_prometheus_format(api: Api) -> None:
    response = api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "# TYPE gptserve_num_requests_running gauge" in response.text
