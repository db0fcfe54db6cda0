"""The examples for Ray: gptserve takes their options, and KubeRay's has the version of Ray that is pinned."""

from __future__ import annotations

import re
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

        assert engine.num_threads == application["deployments"][0]["ray_actor_options"]["num_cpus"]

    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={service['spec']['rayClusterConfig']['rayVersion']}" in pins


def test_the_image_has_what_kuberay_starts_and_probes() -> None:
    service: dict[str, Any] = yaml.safe_load((RAY / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    dockerfile = (RAY / "Dockerfile").read_text()
    groups = [service["headGroupSpec"], *service["workerGroupSpecs"]]
    images = {container["image"] for group in groups for container in group["template"]["spec"]["containers"]}
    assert images == set(re.findall(r"docker build -t (\S+) -f deploy/ray/Dockerfile \.", dockerfile))
    assert "install -y --no-install-recommends wget" in dockerfile
    assert "--constraint /tmp/constraints.txt 'ray[serve]'" in dockerfile
