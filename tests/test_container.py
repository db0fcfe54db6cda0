"""What compose.yaml and the Dockerfile give to the server in the container, read without an engine for containers."""

from __future__ import annotations

import json
import shlex
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from gptserve.server.cli.main import main
from gptserve.server.core.settings import server_options
from gptserve.server.core.settings_sources import load_settings
from gptserve.server.serve import CLOSING_LIMIT_S
from tests.deploy.tools import run_tool

ROOT = Path(__file__).parents[1]
INSTALL = ["install", "--directory", "--owner", "1000", "--group", "0", "--mode", "775"]
REPLICAS = ROOT / "deploy" / "nginx" / "replicas.conf.template"


def instructions(stage: str) -> list[tuple[str, str]]:
    """Return the instructions of a stage of the Dockerfile and of those it begins with, in order."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    stages: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = stages[name] = list(stages.get(base, []))
        else:
            current.append((word, rest))
    return stages[stage]


def image_environment(stage: str) -> dict[str, str]:
    pairs = [pair for word, rest in instructions(stage) if word == "ENV" for pair in shlex.split(rest)]
    return dict(pair.split("=", 1) for pair in pairs)


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    return found


@pytest.fixture(params=["gptserve", "cpu"])
def service(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = compose()["services"][request.param]
    return found


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return what is mounted, by its path in the container."""
    return {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}


def test_the_secrets_of_the_shell_reach_the_server(service: dict[str, Any]) -> None:
    assert {"HF_TOKEN", "GPTSERVE_API_KEY"} <= set(service["environment"])


def test_every_setting_reaches_the_server_from_one_file_that_may_be_missing(service: dict[str, Any]) -> None:
    assert service["env_file"] == [{"path": ".env", "required": False}]
    # A name without a value takes it from the shell or from .env: in any other file it would be unset again.
    assert {file["path"] for file in service["env_file"]} == {".env"}
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert ".env" in ignored, "it holds secrets"


def test_what_compose_sets_is_valid_and_nothing_else(service: dict[str, Any]) -> None:
    known = {option.variable for option in server_options()} | {"HF_TOKEN"}
    given = dict(entry.partition("=")[::2] for entry in service["environment"])
    settings = load_settings({}, {name: value for name, value in given.items() if value})

    assert set(given) <= known
    assert settings.state_dir == Path("/state")


def test_the_state_is_on_a_volume_that_outlives_the_container(service: dict[str, Any]) -> None:
    given = dict(entry.partition("=")[::2] for entry in service["environment"])
    volume = mounts(service)[given["GPTSERVE_STATE_DIR"]]

    assert volume in compose()["volumes"]


def test_only_this_machine_reaches_what_has_no_key() -> None:
    for name, service in compose()["services"].items():
        if name in ("replica", "database"):
            assert not service.get("ports"), "the balancer is before it, or nobody"
            continue
        [port] = service["ports"]
        assert port.startswith(("127.0.0.1:", "${ADDRESS:-127.0.0.1}:")), name
    assert "GPTSERVE_API_KEY:?" in compose()["x-published-with"]


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({}, "127.0.0.1"),
        ({"GPTSERVE_API_KEY": "k"}, "127.0.0.1"),
        ({"GPTSERVE_API_KEY": "k", "ADDRESS": "0.0.0.0"}, "0.0.0.0"),
        ({"GPTSERVE_API_KEY_FILE": "/models/keys", "ADDRESS": "::"}, "::"),
    ],
)
def test_docker_compose_publishes_the_server_where_it_is_told(given: dict[str, str], address: str) -> None:
    command = ("--env-file", "/dev/null", "--profile", "*", "config", "--format", "json")
    services = json.loads(run_tool("docker-compose", *command, **given))["services"]

    assert {name: service["ports"][0]["host_ip"] for name, service in services.items() if service.get("ports")} == {
        **{"gptserve": address, "cpu": address, "balancer": address},
        **{"prometheus": "127.0.0.1", "grafana": "127.0.0.1"},
    }


def test_docker_compose_publishes_no_server_without_a_key() -> None:
    command = ("--env-file", "/dev/null", "config")
    assert "a published server needs a key" in run_tool("docker-compose", *command, status=1, ADDRESS="0.0.0.0")


def test_the_server_has_the_time_that_it_takes_to_end(service: dict[str, Any]) -> None:
    limit_s = load_settings({}, {}).shutdown_timeout_s + CLOSING_LIMIT_S
    assert int(service["stop_grace_period"].removesuffix("s")) > limit_s


def test_what_monitoring_mounts_exists() -> None:
    sources = [
        source
        for name in ("prometheus", "grafana")
        for source in mounts(compose()["services"][name]).values()
        if source.startswith("./")
    ]

    assert len(sources) == 3
    assert all((ROOT / source).is_dir() for source in sources)


def test_replicas_share_a_database_that_nobody_else_reaches() -> None:
    found, servers = compose()["services"], load_settings({}, {})
    replica, database, balancer = found["replica"], found["database"], found["balancer"]
    given = dict(entry.partition("=")[::2] for entry in replica["environment"])
    settings = load_settings({}, {name: value for name, value in given.items() if value})
    url = urlsplit(settings.state_url or "")

    assert settings.state_dir is None
    assert (url.hostname, url.path) == ("database", f"/{url.username}")
    assert f"POSTGRES_USER={url.username}" in database["environment"]
    assert replica["deploy"] == {"replicas": 2}
    assert {service["profiles"][0] for service in (replica, database, balancer)} == {"replicas"}
    networks = compose()["networks"]
    assert networks == {"default": None, "database": {"internal": True}}
    assert [name for name, service in found.items() if "database" in service.get("networks", ())] == [
        "replica",
        "database",
    ]
    assert database["volumes"][0].split(":")[0] in compose()["volumes"]
    assert f"replica:{servers.port};" in REPLICAS.read_text(encoding="utf-8")


def test_nginx_takes_the_configuration_of_the_balancer(tmp_path: Path) -> None:
    [mounted] = compose()["services"]["balancer"]["volumes"]
    assert (ROOT / mounted.split(":")[0]).samefile(REPLICAS.parent)
    assert mounted.split(":")[1] == "/etc/nginx/templates"  # whose texts the image fills in and reads
    text = REPLICAS.read_text(encoding="utf-8").replace("${NGINX_LOCAL_RESOLVERS}", "127.0.0.1")
    (tmp_path / "all.conf").write_text(f"pid {tmp_path}/pid; events {{}} http {{ access_log off; {text} }}")

    assert "test is successful" in run_tool("nginx", "-t", "-e", "stderr", "-c", tmp_path / "all.conf")


def test_prometheus_asks_every_server_by_one_name() -> None:
    services = compose()["services"]
    text = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    [job] = yaml.safe_load(text)["scrape_configs"]

    assert job["static_configs"] == [{"targets": ["gptserve:8000"]}]
    assert services["cpu"]["networks"]["default"]["aliases"] == ["gptserve"]


def test_the_server_can_write_to_its_volumes_alone_and_has_no_rights(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_a_model_of_this_machine_is_where_the_comment_says(service: dict[str, Any]) -> None:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    [source] = [source for target, source in mounts(service).items() if target == "/models"]

    assert "/models/NAME for the folder ./models/NAME" in text
    assert source == "./models"
    assert service["command"] == "serve ${MODEL:-storyteller}"


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_the_server_owns_the_folders_it_writes_to(stage: str, service: dict[str, Any]) -> None:
    commands = [shlex.split(part) for word, rest in instructions(stage) if word == "RUN" for part in rest.split("&&")]
    [install] = [command for command in commands if command[0] == "install"]
    writable = {target for target, source in mounts(service).items() if source in compose()["volumes"]}

    folders = install[len(INSTALL) :]

    assert install[: len(INSTALL)] == INSTALL
    assert writable <= set(folders)
    assert all(PurePosixPath(folder).is_absolute() for folder in folders)
    assert image_environment(stage)["HF_HOME"] in folders
    assert [rest for word, rest in instructions(stage) if word == "USER"][-1] == "1000:1000"


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_the_state_can_be_written_in_a_container_whose_own_files_are_read_only(stage: str) -> None:
    words = [word for word, _ in instructions(stage)]

    assert ("VOLUME", '["/cache", "/state"]') in instructions(stage)
    assert words.index("RUN") < words.index("VOLUME"), "a volume takes its owner from the folder as it is then"


def test_the_labels_of_the_image_are_those_of_the_project() -> None:
    [labels] = [shlex.split(rest) for word, rest in instructions("cuda") if word == "LABEL"]
    shown = {
        name.removeprefix("org.opencontainers.image."): text for name, _, text in (x.partition("=") for x in labels)
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert [shown["title"], shown["version"]] == [project["name"], project["version"]]
    assert [shown["description"], shown["licenses"]] == [project["description"], project["license"]]


class Health(BaseHTTPRequestHandler):
    """Says that all is well."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield http.server_port
        http.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("given", "is_well"), [(None, True), ("{port}", True), ("tcp://10.0.0.1:8000", True), ("1", False)]
)
def test_the_health_check_asks_the_port_that_the_server_has(
    port: int, given: str | None, is_well: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [check] = [rest for word, rest in instructions("cpu") if word == "HEALTHCHECK"]
    command, *arguments = json.loads(check.partition("CMD ")[2])
    file = tmp_path / "gptserve.toml"
    file.write_text(f"port = {port}\n")
    environment = image_environment("cpu") | {"GPTSERVE_CONFIG": str(file)}
    environment |= {} if given is None else {"GPTSERVE_PORT": given.format(port=port)}
    for name, value in environment.items():
        if name.startswith("GPTSERVE_"):
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        main(arguments)

    assert command == "gptserve"
    assert end.value.code == (0 if is_well else 1)


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_the_settings_of_the_image_are_valid(stage: str) -> None:
    settings = load_settings({}, image_environment(stage))

    assert settings.host == "0.0.0.0"
