"""The examples for Ray: gptserve takes their options, and KubeRay's has the version of Ray that is pinned."""

from __future__ import annotations

from typing import Any

import yaml

from gptserve.server.cluster.options import cluster_settings
from tests.deploy.tools import ROOT

RAY = ROOT / "deploy" / "ray"


def test_both_examples_have_the_application_and_options_that_gptserve_takes() -> None:
    service: dict[str, Any] = yaml.safe_load((RAY / "rayservice.yaml").read_text())
    both = [yaml.safe_load((RAY / "serve.yaml").read_text()), yaml.safe_load(service["spec"]["serveConfigV2"])]
    for configuration in both:
        [application] = configuration["applications"]
        assert application["import_path"] == "gptserve.server.cluster.ray_app:build"
        assert [deployment["name"] for deployment in application["deployments"]] == ["Engine", "Ingress"]
        options = {name: str(value) for name, value in application["args"].items()}
        engine = cluster_settings(options, {}).engine
        target = application["deployments"][0]["autoscaling_config"]["target_ongoing_requests"]
        assert target == engine.max_num_seqs * 3 // 4

    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={service['spec']['rayClusterConfig']['rayVersion']}" in pins
