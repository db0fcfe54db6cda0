"""Alerts and dashboard: their own tools accept them, and they ask for what /metrics has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gptserve.server.http.connections import Connections
from gptserve.weights.workers import NUM_WORKERS
from tests.deploy.tools import ROOT, run_tool
from tests.server.conftest import Api
from tests.server.fake_engine import FakeEngineClient

PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
UNIT_TESTS = ROOT / "tests" / "deploy" / "alerts_test.yml"
OF_PROMETHEUS = {"job", "instance"}
"""The labels that a scrape adds."""


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON, too, is YAML


def rules() -> dict[str, dict[str, Any]]:
    [group] = read(PROMETHEUS / "alerts.yml")["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "gptserve.json").read_text(encoding="utf-8"))
    return found


def targets() -> Iterator[dict[str, Any]]:
    for panel in dashboard()["panels"]:
        yield from panel["targets"]


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """The names of the labels of each sample at /metrics."""
    api = Api(FakeEngineClient(), template=None)
    api.app.state.metrics.connections = Connections(8)
    api.complete(prompt="a")
    api.engine.max_requests = 0
    api.complete(prompt="a")  # is refused
    families = text_string_to_metric_families(api.get("/metrics").text)
    api.close()
    return {sample.name: set(sample.labels) for family in families for sample in family.samples} | {"up": set()}


def selected(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric that an expression selects, with the labels it selects by; `up` is Prometheus' own."""
    for name, braces in re.findall(r"\b((?:gptserve|process)_\w+|up)\b(?:\{([^}]*)\})?", expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", braces))


def assert_exposed(expression: str, legend: str, exposed: dict[str, set[str]]) -> None:
    found = dict(selected(expression))
    known = OF_PROMETHEUS.union(*(exposed.get(name, set()) for name in found))
    grouped = {label for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(", ")}
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))

    assert found, expression
    assert set(found) <= set(exposed), expression
    assert all(labels <= exposed[name] | OF_PROMETHEUS for name, labels in found.items()), expression
    assert grouped <= known, expression
    assert shown <= grouped, legend


def test_a_metric_or_a_label_that_does_not_exist_is_found(exposed: dict[str, set[str]]) -> None:
    good = 'sum by (code) (rate(gptserve_admission_rejections_total{code!="draining"}[5m]))'

    assert_exposed(good, "{{code}}", exposed)
    for old, new in (("rejections", "refusals"), ("(code)", "(reason)"), ("{code", "{reason")):
        with pytest.raises(AssertionError):
            assert_exposed(good.replace(old, new), "", exposed)


@pytest.mark.parametrize("name", rules())
def test_an_alert_asks_for_metrics_that_exist(name: str, exposed: dict[str, set[str]]) -> None:
    assert_exposed(rules()[name]["expr"], "", exposed)


def test_every_panel_asks_for_metrics_that_exist(exposed: dict[str, set[str]]) -> None:
    for target in targets():
        assert_exposed(target["expr"], target["legendFormat"], exposed)


def test_the_unit_tests_of_alerts_have_series_as_the_server_does(exposed: dict[str, set[str]]) -> None:
    tests = read(UNIT_TESTS)["tests"]
    series = {one["series"] for test in tests for one in test["input_series"]}

    assert {case["alertname"] for test in tests for case in test["alert_rule_test"]} == set(rules())
    for name, labels in (found for one in series for found in selected(one)):
        assert labels - OF_PROMETHEUS == exposed[name], name


def test_an_alert_says_how_bad_it_is_and_what_has_happened() -> None:
    for rule in rules().values():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]


def test_panels_lie_beside_each_other_and_have_ids_of_their_own() -> None:
    panels = dashboard()["panels"]
    places = {(x, y) for grid in (p["gridPos"] for p in panels) for x, y in cells(grid)}

    assert len(places) == sum(p["gridPos"]["w"] * p["gridPos"]["h"] for p in panels)
    assert max(x for x, _ in places) < 24
    assert len({p["id"] for p in panels}) == len(panels)


def cells(grid: dict[str, int]) -> Iterator[tuple[int, int]]:
    return ((grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"]))


def test_promtool_accepts_configuration_and_alerts() -> None:
    assert f"{len(rules())} rules found" in run_tool("promtool", "check", "config", PROMETHEUS / "prometheus.yml")


def test_every_alert_fires_on_its_cause_alone() -> None:
    run_tool("promtool", "test", "rules", UNIT_TESTS)


def test_promtool_can_read_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [target["expr"].replace("$__rate_interval", "1m") for target in targets()]
    recorded = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))

    assert f"{len(queries)} rules found" in run_tool("promtool", "check", "rules", file)


def test_a_queue_is_more_than_what_may_be_prepared_at_once() -> None:
    expression = rules()["GptserveQueue"]["expr"]

    assert expression == f"min_over_time(gptserve_num_requests_waiting[10m]) > {NUM_WORKERS}"
