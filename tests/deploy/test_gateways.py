"""The examples for gateways: the chart and the server take what they give."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml

from gptserve.server.cli.main import _build_parser
from gptserve.server.core.settings_sources import load_settings
from tests.deploy.tools import ROOT

GATEWAYS = ROOT / "deploy" / "gateways"
CHART = ROOT / "deploy" / "helm" / "gptserve"
OF_CHART = ("llm-d", "aibrix", "production-stack")


@pytest.mark.parametrize("name", OF_CHART)
def test_the_chart_and_the_server_take_the_values_of_an_example(name: str) -> None:
    values = yaml.safe_load((GATEWAYS / f"{name}.yaml").read_text())

    jsonschema.validate(values, json.loads((CHART / "values.schema.json").read_text()))
    assert load_settings(values["settings"], {}).metrics_prefix == "vllm"


def test_the_server_takes_the_arguments_of_the_example_for_kserve() -> None:
    service: dict[str, Any] = yaml.safe_load((GATEWAYS / "kserve.yaml").read_text())
    [container] = service["spec"]["predictor"]["containers"]
    options = _build_parser().parse_args(container["args"])

    assert (options.host, vars(options)["metrics-prefix"]) == ("0.0.0.0", "vllm")
