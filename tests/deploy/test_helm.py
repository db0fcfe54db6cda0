"""The chart: Helm renders it, Kubernetes knows what comes out, and the server takes what it is given."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gptserve.server.core.keys import read_key_file
from gptserve.server.core.settings import server_options
from gptserve.server.core.settings_sources import load_settings
from gptserve.server.serve import CLOSING_LIMIT_S
from tests.deploy.tools import ROOT, run_tool
from tests.server.app_options import make_app
from tests.server.fake_engine import ByteTokenizer, FakeEngineClient

CHART = ROOT / "deploy" / "helm" / "gptserve"
ALL_VALUES = ROOT / "tests" / "deploy" / "values.yaml"
WITH_STATE = ("--set", "state.size=10Gi,state.storageClass=fast,gpu.count=1,model=/model/mine,keysSecret=k")
DNS = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53}]}
RELEASES = {"defaults": (), "all": ("--values", str(ALL_VALUES)), "state": WITH_STATE}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return found


def templates() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((CHART / "templates").iterdir()))


def render(release: str, folder: Path) -> Path:
    """Return the file of what Helm makes of the chart."""
    file = folder / f"{release}.yaml"
    file.write_text(run_tool("helm", "template", "demo", CHART, *RELEASES[release]))
    return file


@pytest.fixture(scope="module", params=RELEASES)
def manifests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render(request.param, tmp_path_factory.mktemp("helm"))


@pytest.fixture
def pod(manifests: Path) -> dict[str, Any]:
    return pod_of(manifests)


def by_kind(manifests: Path) -> dict[str, Any]:
    return {item["kind"]: item for item in yaml.safe_load_all(manifests.read_text()) if item}


def pod_of(manifests: Path) -> dict[str, Any]:
    found: dict[str, Any] = by_kind(manifests)["Deployment"]["spec"]["template"]["spec"]
    return found


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in pod["containers"][0]["env"]}


def test_the_chart_has_the_version_of_the_server() -> None:
    chart = read(CHART / "Chart.yaml")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_every_value_is_described_and_used() -> None:
    values = read(CHART / "values.yaml")
    used = set(re.findall(r"\.Values\.(\w+)", templates()))

    assert set(values) == set(schema()["properties"]) - {"global"} == used
    for name, part in schema()["properties"].items():
        if "properties" in part:
            assert set(part["properties"]) == set(values[name]), name
            assert set(part["properties"]) == set(re.findall(rf"\.Values\.{name}\.(\w+)", templates())), name


@pytest.mark.parametrize("file", [CHART / "values.yaml", ALL_VALUES])
def test_values_follow_the_schema(file: Path) -> None:
    jsonschema.validate(read(file), schema())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replica": 2}, "Additional properties are not allowed ('replica' was unexpected)"),
        ({"settings": {"api-key": "sk"}}, "'api-key' should not be valid under"),
        ({"settings": {"max_num_seqs": 1}}, "'max_num_seqs' does not match"),
        ({"keys": {"alice smith": "sk"}}, "'alice smith' does not match"),
        ({"keys": {"alice": "s k"}}, "'s k' does not match"),
        ({"state": {"size": "10"}}, "'10' does not match"),
        ({"gpu": {"count": 2}}, "2 is not one of [0, 1]"),
        ({"service": {"sessionAffinity": "Cookie"}}, "'Cookie' is not one of ['None', 'ClientIP']"),
        ({"podLabels": {"app.kubernetes.io/name": "a"}}, "'app.kubernetes.io/name' should not be valid under"),
        ({"ingress": {"hosts": [{"host": "a"}]}}, "{'host': 'a'} is not of type 'string'"),
        ({"serviceMonitor": {"interval": "15"}}, "'15' does not match"),
        ({"serviceAccount": {"token": True}}, "Additional properties are not allowed ('token' was unexpected)"),
        ({"extraVolumeMounts": [{"name": "a"}]}, "'mountPath' is a required property"),
    ],
)
def test_a_wrong_value_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=re.escape(message)):
        jsonschema.validate(values, schema())


def test_the_chart_names_only_options_that_exist() -> None:
    options = server_options()
    refused = schema()["properties"]["settings"]["propertyNames"]["not"]["enum"]
    variables = set(re.findall(r"\bGPTSERVE_[A-Z_]+[A-Z]\b", templates()))

    assert set(refused) <= {option.name for option in options}
    assert variables <= {option.variable for option in options}
    assert {option.variable for option in options if option.name in refused} >= variables, (
        "they have values of their own"
    )


def test_helm_finds_nothing_to_say() -> None:
    run_tool("helm", "lint", "--strict", CHART)


def test_kubernetes_knows_every_field(manifests: Path) -> None:
    said = run_tool("kubernetes-validate", "--strict", manifests)
    assert said.count("passed for resource") == len(by_kind(manifests))


def test_the_server_takes_what_a_pod_gives_it(pod: dict[str, Any]) -> None:
    files = {"GPTSERVE_API_KEY_FILE": "tests/server/core/api_keys.txt"}  # instead of the pod's
    given = environment(pod)
    known = {name: files.get(name, value) for name, value in given.items() if name != "HF_TOKEN"}

    assert pod["containers"][0]["args"][0] == "serve"
    assert load_settings({}, known).shutdown_timeout_s == float(given["GPTSERVE_SHUTDOWN_TIMEOUT"])


def test_a_pod_has_the_time_that_its_server_takes_to_end(pod: dict[str, Any]) -> None:
    pause_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    shutdown_s = float(environment(pod)["GPTSERVE_SHUTDOWN_TIMEOUT"])

    assert pod["terminationGracePeriodSeconds"] > pause_s + shutdown_s + CLOSING_LIMIT_S


def test_probes_ask_routes_that_exist_and_wait_for_a_model_to_load(pod: dict[str, Any]) -> None:
    container = pod["containers"][0]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    paths = make_app(FakeEngineClient(), ByteTokenizer()).openapi()["paths"]
    asked = {name: probe["httpGet"]["path"] for name, probe in probes.items()}

    assert asked == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    assert set(asked.values()) <= set(paths)
    patience_s = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
    assert patience_s > float(environment(pod)["GPTSERVE_ENGINE_LOAD_TIMEOUT"])


def test_a_pod_writes_to_volumes_alone_and_has_no_rights(pod: dict[str, Any]) -> None:
    container = pod["containers"][0]

    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    ("values", "rules"),
    [
        ((), []),
        (("--set", "model=openai-community/gpt2"), [DNS, {"ports": [{"port": 443}]}]),
        (
            ("--set", "model=/model/mine,networkPolicy.to[0].podSelector.a=b"),
            [DNS, {"to": [{"podSelector": {"a": "b"}}]}],
        ),
    ],
)
def test_only_a_model_from_the_hub_and_who_is_named_let_a_pod_out(values: tuple[str, ...], rules: list[Any]) -> None:
    rendered = run_tool("helm", "template", "demo", CHART, "--show-only", "templates/networkpolicy.yaml", *values)

    assert yaml.safe_load(rendered)["spec"]["egress"] == rules


MY_PODS = {"podSelector": {}}
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
CONTROLLER = {"namespaceSelector": {"matchLabels": {"a": "b"}}}


@pytest.mark.parametrize(
    ("values", "let_in"),
    [
        ((), [MY_PODS]),
        (("service.type=LoadBalancer",), None),
        (("service.type=NodePort",), None),
        (("ingress.enabled=true",), None),
        (("networkPolicy.from[0].namespaceSelector.matchLabels.a=b", "ingress.enabled=true"), [CONTROLLER]),
        (("networkPolicy.from[0].namespaceSelector.matchLabels.a=b", "service.type=LoadBalancer"), [CONTROLLER]),
        (("serviceMonitor.enabled=true",), [MY_PODS]),
        (("serviceMonitor.enabled=true", "serviceMonitor.namespace=monitoring"), [MY_PODS, MONITORING]),
        (("serviceMonitor.namespace=monitoring",), [MY_PODS]),
    ],
)
def test_the_policy_lets_in_whom_the_service_is_for(values: tuple[str, ...], let_in: list[Any] | None) -> None:
    (rule,) = show("networkpolicy", *values)["spec"]["ingress"]

    assert rule["ports"] == [{"port": "http"}]
    assert rule.get("from") == let_in


def show(template: str, *values: str) -> Any:
    """Return what Helm makes of a template with these values, in which no key may stand twice."""
    settings = [part for value in values for part in ("--set", value)]
    rendered = run_tool("helm", "template", "demo", CHART, "--show-only", f"templates/{template}.yaml", *settings)
    return yaml.load(rendered, UniqueKeys)


class UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        assert len(keys) == len(set(keys)), f"twice in one mapping: {keys}"
        return super().construct_mapping(node, deep)


def test_no_key_stands_twice(manifests: Path) -> None:
    assert all(yaml.load_all(manifests.read_text(), UniqueKeys))
    with pytest.raises(AssertionError, match=r"^twice in one mapping: \['a', 'a'\]"):
        yaml.load("{a: 1, a: 2}", UniqueKeys)


@pytest.mark.parametrize(
    ("values", "profile"),
    [
        ((), {"type": "RuntimeDefault"}),
        (("podSecurityContext.seccompProfile.type=Unconfined",), {"type": "Unconfined"}),
    ],
)
def test_a_profile_of_calls_may_be_chosen(values: tuple[str, ...], profile: dict[str, str]) -> None:
    context = show("deployment", *values)["spec"]["template"]["spec"]["securityContext"]

    assert context["seccompProfile"] == profile
    assert context["runAsNonRoot"] is True


@pytest.mark.parametrize(
    ("values", "account", "is_made"),
    [
        ((), None, False),
        (("serviceAccount.name=there",), "there", False),
        (("serviceAccount.create=true",), "demo-gptserve", True),
        (("serviceAccount.create=true", "serviceAccount.name=mine"), "mine", True),
    ],
)
def test_a_pod_has_the_account_that_is_made_or_named(
    values: tuple[str, ...], account: str | None, is_made: bool
) -> None:
    pod = show("deployment", *values)["spec"]["template"]["spec"]

    assert pod.get("serviceAccountName") == account
    assert pod["automountServiceAccountToken"] is False
    if is_made:
        made = show("serviceaccount", *values)
        assert (made["metadata"]["name"], made["automountServiceAccountToken"]) == (account, False)


def test_an_ingress_leads_its_hosts_to_the_service(tmp_path: Path) -> None:
    kinds = by_kind(render("all", tmp_path))
    backend = {"service": {"name": kinds["Service"]["metadata"]["name"], "port": {"name": "http"}}}
    http = {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}

    assert kinds["Ingress"]["spec"] == {
        "ingressClassName": "nginx",
        "tls": [{"hosts": ["llm.example.com"], "secretName": "llm-tls"}],
        "rules": [{"host": host, "http": http} for host in ("llm.example.com", "*.llm.example.com")],
    }
    assert kinds["Ingress"]["metadata"]["annotations"] == {"nginx.ingress.kubernetes.io/proxy-buffering": "off"}
    assert show("ingress", "ingress.enabled=true")["spec"] == {"rules": [{"http": http}]}


def test_a_monitor_scrapes_the_port_of_the_service() -> None:
    monitor = show("servicemonitor", "serviceMonitor.enabled=true", "serviceMonitor.labels.release=prometheus")
    service = show("service")

    assert monitor["metadata"]["labels"] == {**service["metadata"]["labels"], "release": "prometheus"}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"] == [{"port": "http", "path": "/metrics", "interval": "15s"}]
    assert "http" in [port["name"] for port in service["spec"]["ports"]]


def test_a_pod_gets_what_values_add_to_it(tmp_path: Path) -> None:
    given, kinds = read(ALL_VALUES), by_kind(render("all", tmp_path))
    template = kinds["Deployment"]["spec"]["template"]
    pod, annotations = template["spec"], template["metadata"]["annotations"]

    assert given["podLabels"].items() <= template["metadata"]["labels"].items()
    assert annotations == {**given["podAnnotations"], "prometheus.io/port": "8000"}
    for name in ("affinity", "topologySpreadConstraints"):
        assert pod[name] == given[name]
    assert pod["volumes"][-1:] == given["extraVolumes"]
    assert pod["containers"][0]["volumeMounts"][-1:] == given["extraVolumeMounts"]
    assert kinds["Service"]["spec"]["sessionAffinity"] == "ClientIP"
    assert kinds["Service"]["metadata"]["annotations"] == {"example.com/zone": "a"}


BY_CHANCE = "reach that pod by chance"


@pytest.mark.parametrize(
    ("values", "told", "not_told"),
    [
        ((), ["No key is set"], [BY_CHANCE, "Others than this cluster"]),
        (("keysSecret=k", "ingress.enabled=true"), [], ["No key is set", "Others than this cluster"]),
        (("replicas=2",), [BY_CHANCE, "service.sessionAffinity=ClientIP"], []),
        (("replicas=2", "service.sessionAffinity=ClientIP"), [BY_CHANCE], ["service.sessionAffinity=ClientIP"]),
        (("autoscaling.enabled=true",), [BY_CHANCE], []),
        (("replicas=2", "state.urlSecret=db"), [], [BY_CHANCE]),
        (("service.type=LoadBalancer",), ["Others than this cluster may reach it: service.type LoadBalancer."], []),
        (("ingress.enabled=true",), ["may reach it: service.type ClusterIP, and an ingress."], []),
    ],
)
def test_the_notes_warn(tmp_path: Path, values: tuple[str, ...], told: list[str], not_told: list[str]) -> None:
    chart = Path(shutil.copytree(CHART, tmp_path / "gptserve"))  # Helm shows notes only where there is a cluster
    notes = (chart / "templates/NOTES.txt").read_text()
    (chart / "templates/_notes.tpl").write_text('{{ define "notes" }}' + notes + "{{ end }}")
    (chart / "templates/notes.yaml").write_text('{ kind: Notes, text: {{ include "notes" . | quote }} }')
    settings = [part for value in values for part in ("--set", value)]
    shown = run_tool("helm", "template", "demo", chart, "--show-only", "templates/notes.yaml", *settings)
    text = str(yaml.safe_load(shown)["text"])

    assert all(part in text for part in told)
    assert not any(part in text for part in not_told)


def test_selectors_find_the_pods(manifests: Path) -> None:
    kinds = by_kind(manifests)
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]

    selectors = [kinds[kind]["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
    selectors += [kinds["Service"]["spec"]["selector"], kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]]
    for selector in selectors:
        assert selector == {name: value for name, value in labels.items() if name.startswith("app.kubernetes.io/")}


def test_settings_keep_their_values(tmp_path: Path) -> None:
    variables = environment(pod_of(render("all", tmp_path)))
    wanted = {"max-num-seqs": "32", "max-body-bytes": "2000000", "write-timeout": "0.5", "strict-fields": "true"}

    assert {name: variables["GPTSERVE_" + name.upper().replace("-", "_")] for name in wanted} == wanted
    assert variables["OTEL_TRACES_SAMPLER"] == "parentbased_always_off"


def test_keys_become_a_file_that_the_server_can_read(tmp_path: Path) -> None:
    manifests = render("all", tmp_path)
    secret, pod = by_kind(manifests)["Secret"], pod_of(manifests)
    keys = tmp_path / "keys"
    keys.write_text(secret["stringData"]["keys"])

    assert read_key_file(keys) == {"sk-a": "alice", "sk-'\"b": "bob.b@example.com"}
    assert environment(pod)["GPTSERVE_API_KEY_FILE"] == "/keys/keys"
    assert [v["secret"]["secretName"] for v in pod["volumes"] if v["name"] == "keys"] == [secret["metadata"]["name"]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("state.size=1Gi,replicas=2", "state.size needs replicas 1 and no autoscaling"),
        ("state.size=1Gi,autoscaling.enabled=true", "state.size needs replicas 1 and no autoscaling"),
        ("state.size=1Gi,state.urlSecret=db", "give state.size or state.urlSecret, not both"),
        ("keys.alice=a,keysSecret=b", "give keys or keysSecret, not both"),
        ("settings.port=1", r"(?i)property ?name.*port"),  # in the words of this version of Helm
    ],
)
def test_helm_refuses_values_that_do_not_go_together(values: str, message: str) -> None:
    assert re.search(message, run_tool("helm", "template", "demo", CHART, "--set", values, status=1))
