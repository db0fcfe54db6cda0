"""nginx, Caddy and HAProxy before the server: answers, streams, and no way around their rules by an upgrade."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.clients.nginx import nginx_template
from tests.clients.servers import OFTEN, served
from tests.server.serving import LIMIT_S

pytestmark = pytest.mark.clients
NGINX = nginx_template("""
        location = /version {{ return 403; }}
        location / {{
            proxy_pass http://{server};
            proxy_http_version 1.1;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection "upgrade";
            proxy_buffering off;
        }}
""")
CADDY = """
{{
    admin off
    auto_https off
    storage file_system {folder}
}}
http://:{port} {{
    bind 127.0.0.1
    respond /version 403
    reverse_proxy {server}
}}
"""
HAPROXY = """
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend front
    bind 127.0.0.1:{port}
    http-request deny if {{ path /version }}
    default_backend back
backend back
    server only {server}
"""
PROXIES = {
    "nginx": (NGINX, ["-c"]),
    "caddy": (CADDY, ["run", "--adapter", "caddyfile", "--config"]),
    "haproxy": (HAPROXY, ["-f"]),
}
BODY = {"prompt": "The cat", "max_tokens": 12, "temperature": 0}
HIDDEN = b"GET /version HTTP/1.1\r\nHost: t\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served("--dtype", "float32", "--allowed-hosts", "*", *OFTEN) as url:
        yield url.removesuffix("/v1")


@pytest.fixture(scope="module", params=PROXIES)
def proxy(request: pytest.FixtureRequest, server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a proxy that passes all to the server but /version."""
    program, folder = shutil.which(request.param), tmp_path_factory.mktemp(request.param)
    if program is None:
        pytest.skip(f"{request.param} is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    template, arguments = PROXIES[request.param]
    settings = folder / "settings"
    settings.write_text(template.format(folder=folder, port=port, server=server.removeprefix("http://")))
    with (folder / "log").open("w") as log, subprocess.Popen([program, *arguments, settings], stderr=log) as process:
        try:
            until = time.monotonic() + LIMIT_S
            while not _accepts(port):
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < until
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _accepts(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def _data(response: httpx.Response) -> list[object]:
    """Return what all answers to one request have in common: the events' texts."""
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith(("data: {", "{"))]
    return [json.loads(event)["choices"] for event in events]


@pytest.mark.parametrize("upgrade", [None, "h2c", "websocket"])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_the_server(proxy: str, server: str, stream: bool, upgrade: str | None) -> None:
    body = {**BODY, "stream": stream}
    headers = {} if upgrade is None else {"connection": "Upgrade, HTTP2-Settings", "upgrade": upgrade}
    direct = httpx.post(f"{server}/v1/completions", json=body, timeout=LIMIT_S)
    with httpx.Client(timeout=LIMIT_S) as client:
        for _ in range(2):
            response = client.post(f"{proxy}/v1/completions", json=body, headers=headers)
            assert response.status_code == 200
            assert _data(response) == _data(direct)
            assert client.get(f"{proxy}/version").status_code == 403
            assert client.get(f"{proxy}/v1/models").status_code == 200


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_a_body_is_no_way_around_the_rules(proxy: str, server: str, upgrade: bytes) -> None:
    fields = b"Host: t\r\nContent-Type: application/json\r\nConnection: Upgrade\r\nUpgrade: " + upgrade
    head = b"POST /v1/completions HTTP/1.1\r\n" + fields + b"\r\nContent-Length: %d\r\n\r\n" % len(HIDDEN)
    last = b"GET /v1/models HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"
    before = _num_versions(server)
    for parts in ([head + HIDDEN + last], [head, HIDDEN, last], [head, HIDDEN + last]):
        answer = b""
        with socket.create_connection(("127.0.0.1", int(proxy.rpartition(":")[2])), timeout=LIMIT_S) as client:
            for part in parts:
                client.sendall(part)
            while received := client.recv(65536):
                answer += received
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"version"' not in answer
    assert _num_versions(server) == before


def _num_versions(server: str) -> float:
    """Return how often the server has answered GET /version."""
    lines = httpx.get(f"{server}/metrics", timeout=LIMIT_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if "http_requests_total{" in line and '"/version"' in line)
