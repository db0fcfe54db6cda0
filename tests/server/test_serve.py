"""A serving process from its start to its end, as an operator sees it: lines on stderr, answers, exit status."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.engine.held_engine import VARIABLE, EngineGate
from tests.server.serving import LIMIT_S, MAIN, MORTAL, ROOT, Process
from tests.weights.hub import Hub, serve_hub

LOSING_KEYS = """
import sys
import gptserve.server.serve
from gptserve.server.cli.main import main
load = gptserve.server.serve.local_model
def lose_keys(*arguments):
    from pathlib import Path
    Path(sys.argv[sys.argv.index("--api-key-file") + 1]).unlink()
    return load(*arguments)
gptserve.server.serve.local_model = lose_keys
main(sys.argv[1:])
"""
"""A server whose file of keys is deleted once the settings are checked."""


@pytest.fixture
def launch() -> Iterator[Any]:
    launched: list[Process] = []

    def start(*flags: str, **environment: str) -> Process:
        launched.append(Process(*flags, **environment))
        return launched[-1]

    yield start
    for process in launched:
        process.kill()


@pytest.fixture
def gate(tmp_path_factory: pytest.TempPathFactory) -> EngineGate:
    return EngineGate(tmp_path_factory.mktemp("gate"))


@pytest.fixture
def launch_held(launch: Any, gate: EngineGate) -> Any:
    """Launch a server whose engine makes the first tokens of what it gets, and no more until the gate is opened."""
    gate.shut()
    return functools.partial(launch, main=MORTAL, **{VARIABLE: str(gate.folder)})


def link_storyteller(folder: Path) -> None:
    """Fill a folder with links to the files of the embedded model."""
    for path in (ROOT / "weights" / "storyteller").iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path)


@contextlib.contextmanager
def stream(client: httpx.Client, *, max_tokens: int, n: int = 1) -> Iterator[Iterator[str]]:
    """Stream a completion of exactly max_tokens and give its lines from the first event on."""
    body = {"prompt": "Once", "max_tokens": max_tokens, "n": n, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        next(lines)
        yield lines


def error_of(line: str) -> str:
    return str(json.loads(line.removeprefix("data: "))["error"]["message"])


def test_sigterm_refuses_what_is_new_finishes_what_runs_and_ends_with_status_0(
    launch_held: Any, gate: EngineGate
) -> None:
    process = launch_held("--shutdown-timeout", "600")
    with process.wait_until_ready() as client, contextlib.ExitStack() as streams:
        occupation = streams.enter_context(stream(client, max_tokens=1000))
        running = streams.enter_context(stream(client, max_tokens=60))

        # To the whole group, as a terminal's Ctrl-C is: the engine's process must not die of it.
        os.killpg(process.popen.pid, signal.SIGINT)
        process.wait_for_line("shutting down, waiting up to 600 s for 2 requests, Ctrl-C again to quit")
        refused = client.post("/v1/completions", json={"prompt": "Once"})
        ready = client.get("/ready")
        health = client.get("/health")
        gate.open()
        *_, last = running
        next(occupation)

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert "retry-after" in refused.headers
    assert (ready.status_code, health.status_code) == (503, 200)
    assert last == "data: [DONE]"
    status, log = process.wait()
    assert status == 0
    assert "cut off" not in log


@contextlib.contextmanager
def loading(launch: Any, gate: EngineGate) -> Iterator[tuple[Process, httpx.Client, httpx.Response]]:
    """Start a server that loads until the gate is opened; give it, a client and an answer about its health.

    What is posted waits for the gate.
    """
    gate.shut_to_new()
    patient = f"import gptserve.server.http.loading; gptserve.server.http.loading.PATIENCE_S = {LIMIT_S}; {MORTAL}"
    process = launch(main=patient, **{VARIABLE: str(gate.folder)})
    url = process.wait_for_line(" listening on ").partition(" listening on ")[2].partition(";")[0]
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        while (health := client.get("/health")).json()["progress"] == 0:  # the engine has not said more yet
            assert health.status_code == 503
        yield process, client, health


def test_while_the_model_loads_what_is_posted_waits_and_others_get_503_and_the_progress(
    launch: Any, gate: EngineGate
) -> None:
    with loading(launch, gate) as (process, client, health), background_completion(client) as early:
        refused = client.get("/v1/models")
        gate.open()
        process.wait_until_ready().close()
        answer = early.recv(12)
        healthy = client.get("/health")

    assert (health.status_code, health.json()["status"], health.json()["progress"]) == (503, "loading", 0.25)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
    assert answer == b"HTTP/1.1 202"
    assert healthy.json() == {"status": "ok"}


def test_what_waits_for_a_model_is_refused_by_a_signal(launch: Any, gate: EngineGate) -> None:
    with loading(launch, gate) as (process, client, _), background_completion(client) as early:
        client.get("/v1/models")  # the server has seen what was posted before
        process.popen.terminate()
        answer = early.recv(12)

    assert answer == b"HTTP/1.1 503"
    assert process.wait()[0] == 0


@pytest.fixture
def launch_from_hub(launch: Any, tmp_path: Path) -> Iterator[tuple[Any, Hub]]:
    """Launch a server whose model is on a hub; its weights wait for the hub's gate."""
    files = {path.name: path.read_bytes() for path in (ROOT / "weights" / "storyteller").iterdir() if path.is_file()}
    with serve_hub(Hub({"someone/storyteller": {"main": files}}, held="model.safetensors")) as hub:
        yield functools.partial(launch, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0"), hub


@contextlib.contextmanager
def waiting_for_weights(process: Process) -> Iterator[httpx.Client]:
    """Give a client of a server that has all files of the model but the weights."""
    url = process.wait_for_line(" listening on ").partition(" listening on ")[2].partition(";")[0]
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        while not client.get("/health").json()["detail"].startswith("6 of 7 files, 0."):
            pass
        yield client


@pytest.mark.slow
def test_while_the_model_is_downloaded_requests_get_503_and_the_progress(launch_from_hub: tuple[Any, Hub]) -> None:
    launch, hub = launch_from_hub
    process = launch("someone/storyteller")
    with waiting_for_weights(process) as client:
        health, ready = client.get("/health"), client.get("/ready")
        hub.gate.set()
        process.wait_until_ready().close()
        answer = client.post("/v1/completions", json={"prompt": "Once"})

    assert (health.status_code, health.json()["status"]) == (503, "downloading")
    assert 0 < health.json()["progress"] < 1
    assert ready.status_code == 503
    assert ready.json()["error"]["message"].startswith(f"the model is downloading: {health.json()['detail']}; try")
    assert answer.json()["model"] == "someone/storyteller"


@pytest.mark.slow
def test_a_signal_ends_a_download(launch_from_hub: tuple[Any, Hub]) -> None:
    process = launch_from_hub[0]("someone/storyteller")
    with waiting_for_weights(process):
        process.popen.send_signal(signal.SIGINT)
        status, log = process.wait()

    assert status == 0
    assert "Traceback" not in log
    assert "gave up waiting" not in log


@pytest.mark.slow
def test_a_model_that_cannot_be_downloaded_ends_the_start_with_one_sentence(launch_from_hub: tuple[Any, Hub]) -> None:
    status, log = launch_from_hub[0]("someone/none").wait()

    assert status == 1
    assert log.splitlines()[-1].startswith("gptserve: someone/none is not a folder here, and the hub has no such model")
    assert "Traceback" not in log


@pytest.mark.slow
def test_after_the_time_limit_streams_end_with_an_error_and_the_status_is_0(launch_held: Any) -> None:
    process = launch_held("--shutdown-timeout", "0")
    with process.wait_until_ready() as client, stream(client, max_tokens=1000, n=16) as running:
        process.popen.terminate()
        *_, last = running

    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["message"], error["code"]) == ("the server is shutting down", "draining")
    status, log = process.wait()
    assert status == 0
    assert "cutting off 1 request\n" in log


@pytest.mark.slow
def test_a_second_signal_ends_at_once(launch_held: Any) -> None:
    process = launch_held("--shutdown-timeout", "3600")
    with process.wait_until_ready() as client, stream(client, max_tokens=1000, n=16):
        process.popen.terminate()
        process.wait_for_line("shutting down, waiting up to 3600 s for 1 request, Ctrl-C again to quit")
        process.popen.terminate()
        status, log = process.wait()

    assert status == 0
    assert "cutting off 1 request" in log


@contextlib.contextmanager
def client_that_does_not_read(client: httpx.Client) -> Iterator[None]:
    """Hold a stream whose client reads nothing; on entry all of it is made, and more than the system buffers."""
    body = {"prompt": "Once", "max_tokens": 600, "n": 16, "ignore_eos": True, "stream": True, "logprobs": 4}
    body["stream_options"] = {"continuous_usage_stats": True}  # so that each event is long
    data = json.dumps(body).encode()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((client.base_url.host, client.base_url.port))
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        deaf.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        while metric(client, "gptserve_generation_tokens_total") < 16 * 600:
            pass
        yield


def metric(client: httpx.Client, name: str) -> float:
    [line] = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(line.split()[-1])


@pytest.mark.slow
def test_a_second_signal_ends_at_once_what_a_client_does_not_read(launch: Any) -> None:
    patient = f"import gptserve.server.serve; gptserve.server.serve.LAST_EVENTS_LIMIT_S = {2 * LIMIT_S}; {MAIN}"
    process = launch("--shutdown-timeout", "0", "--write-timeout", "3600", main=patient)
    with process.wait_until_ready() as client, client_that_does_not_read(client):
        process.popen.terminate()
        process.wait_for_line("cutting off 1 request")
        process.popen.terminate()
        status, log = process.wait()

    assert status == 0
    assert "told to stop again" in log
    assert "ERROR" not in log
    assert "status=499" in log


@pytest.mark.slow
def test_a_client_that_does_not_read_its_last_events_is_hung_up_on(launch: Any) -> None:
    process = launch("--shutdown-timeout", "0", "--write-timeout", "3600")
    with process.wait_until_ready() as client, client_that_does_not_read(client):
        process.popen.terminate()
        status, log = process.wait()

    assert status == 0
    assert "hanging up on 1 client: 5 s have passed" in log
    assert "ERROR" not in log


DISK_THAT_HANGS = """
import functools, os, sqlite3, sys
import gptserve.server.serve
from gptserve.server.cli.main import main

class Connection(sqlite3.Connection):
    def execute(self, statement, *arguments):
        if statement == "BEGIN IMMEDIATE" and os.path.exists(os.environ["GATE"]):
            print("the disk hangs", file=sys.stderr, flush=True)
            open(os.environ["GATE"]).read()
        return super().execute(statement, *arguments)

sqlite3.connect = functools.partial(sqlite3.connect, factory=Connection)
gptserve.server.serve.CLOSING_LIMIT_S = float(os.environ["CLOSING_LIMIT_S"])
main(sys.argv[1:])
"""
BACKGROUND = b'{"prompt": "Once", "background": true}'


@contextlib.contextmanager
def background_completion(client: httpx.Client) -> Iterator[socket.socket]:
    """Ask for a background completion, and wait for no answer; give the connection."""
    address = client.base_url.host, client.base_url.port
    with socket.create_connection(address, timeout=LIMIT_S) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(BACKGROUND)}\r\n"
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + BACKGROUND)
        yield connection


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while loading", "while serving"])
def test_a_second_signal_ends_a_server_whose_disk_hangs(launch: Any, tmp_path: Path, moment: str) -> None:
    gate, flags = tmp_path / "gate", ("--state-dir", str(tmp_path), "--shutdown-timeout", "3600")
    if moment == "while loading":
        os.mkfifo(gate)
    process = launch(*flags, main=DISK_THAT_HANGS, GATE=str(gate), CLOSING_LIMIT_S="3600")
    with contextlib.ExitStack() as stack:
        if moment == "while serving":
            client = stack.enter_context(process.wait_until_ready())
            os.mkfifo(gate)
            stack.enter_context(background_completion(client))
        process.wait_for_line("the disk hangs")
        process.popen.terminate()
        process.wait_for_line("shutting down")
        process.popen.terminate()
        status, log = process.wait()

    assert status == 0
    assert "gave up waiting for" in log


@pytest.mark.slow
def test_without_a_second_signal_a_server_waits_for_a_disk_that_hangs_up_to_its_limit(
    launch: Any, tmp_path: Path
) -> None:
    gate, flags = tmp_path / "gate", ("--state-dir", str(tmp_path), "--shutdown-timeout", "0")
    process = launch(*flags, main=DISK_THAT_HANGS, GATE=str(gate), CLOSING_LIMIT_S="0.5")
    with process.wait_until_ready() as client:
        os.mkfifo(gate)
        with background_completion(client):
            process.wait_for_line("the disk hangs")
            process.popen.terminate()
            status, log = process.wait()

    assert status == 0
    assert "shutdown: gave up waiting for the journal" in log


@pytest.mark.slow
def test_a_disk_that_only_was_slow_ends_a_server_in_order(launch: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    process = launch("--state-dir", str(tmp_path), main=DISK_THAT_HANGS, GATE=str(gate), CLOSING_LIMIT_S="3600")
    with process.wait_until_ready() as client:
        os.mkfifo(gate)
        with background_completion(client):
            process.wait_for_line("the disk hangs")
            process.popen.terminate()
            process.wait_for_line("shutting down")
            with gate.open("w"):
                gate.unlink()
            status, log = process.wait()

    assert status == 0
    assert "gave up waiting" not in log


@pytest.mark.slow
def test_a_load_that_hangs_ends_the_start(launch: Any) -> None:
    status, log = launch("--engine-load-timeout", "0.01").wait()

    assert_one_sentence(status, log, "gptserve: the engine did not load within 0.01 s")


@pytest.mark.slow
def test_an_engine_that_is_not_replaced_ends_streams_with_an_error_and_the_process_with_status_1(
    launch_held: Any,
) -> None:
    process = launch_held("--max-engine-restarts", "0")
    with process.wait_until_ready() as client, stream(client, max_tokens=1000, n=16) as running:
        process.engine().kill()
        *_, last = running

    assert "the engine process was killed by signal 9" in error_of(last)
    status, log = process.wait()
    assert status == 1
    assert "CRITICAL gptserve.server.serve: ending: " in log
    assert "leaked" not in log


@pytest.mark.slow
def test_idle_connections_leave_the_descriptors_that_a_new_engine_takes() -> None:
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 256)); "
    process = Process(main=few + MAIN)
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        process.wait_for_line("max-connections is 192 instead of 1024: 256 files may be open")
        client = stack.enter_context(process.wait_until_ready())
        events = stack.enter_context(stream(client, max_tokens=1000, n=16))
        for _ in range(1000):
            stack.enter_context(socket.create_connection((client.base_url.host, client.base_url.port), LIMIT_S))
        process.engine().kill()
        *_, last = events
        closed = metric(client, "gptserve_connections_closed_idle_total")
        is_open = metric(client, "gptserve_connections{")
        process.popen.terminate()
        status, log = process.wait()

    assert (last, status) == ("data: [DONE]", 0)
    assert (closed >= 1000 - 96, is_open <= 96 + 2) == (True, True)
    assert "Too many open files" not in log
    assert log.count("closing idle connections") == 1


def test_a_signal_while_loading_ends_with_status_0(launch: Any) -> None:
    process = launch()
    process.wait_for_line("settings: ")
    while not psutil.Process(process.popen.pid).children():
        assert process.popen.poll() is None
    process.popen.terminate()

    status, log = process.wait()

    assert status in (0, 130)
    assert "Traceback" not in log


@pytest.mark.slow
def test_metrics_are_not_shared_by_files(launch: Any, tmp_path: Path) -> None:
    process = launch(PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "missing"))
    process.wait_for_line("ignoring PROMETHEUS_MULTIPROC_DIR: this server is one process")
    with process.wait_until_ready() as http:
        assert "gptserve_connections{" in http.get("/metrics").text
    assert list(tmp_path.iterdir()) == []
    process.popen.terminate()
    assert process.wait()[0] == 0


@pytest.mark.slow
def test_the_engine_may_run_in_a_thread(launch: Any) -> None:
    process = launch("--in-process")
    with process.wait_until_ready() as client:
        answer = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3}).json()
        children = [p for p in psutil.Process(process.popen.pid).children() if "spawn_main" in " ".join(p.cmdline())]
    process.popen.terminate()

    assert answer["usage"]["completion_tokens"] >= 1
    assert children == []
    assert process.wait()[0] == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="runs a line with curl")
@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        pytest.param((), {}, marks=pytest.mark.slow),
        (("--chat-template", "plain"), {"GPTSERVE_API_KEY": "open-sesame"}),
    ],
)
def test_the_line_to_try_works(flags: tuple[str, ...], environment: dict[str, str], launch: Any) -> None:
    process = launch(*flags, **environment)
    process.wait_for_line("gptserve: model: storyteller, ")
    command = process.wait_for_line("gptserve: try: ").partition(" try: ")[2]
    done = subprocess.run(
        ["sh", "-c", command], env=os.environ | environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    process.popen.terminate()

    assert "--json" not in command, "curl knows it since 7.82"
    assert done.returncode == 0, done.stderr
    assert '"finish_reason":"length"' in done.stdout or '"finish_reason":"stop"' in done.stdout
    assert done.stdout.endswith("data: [DONE]\n\n")
    assert process.wait()[0] == 0


@pytest.mark.slow
def test_json_logs_name_the_request_and_hide_the_key(launch: Any) -> None:
    process = launch("--log-format", "json", "--served-model-name", "teller", GPTSERVE_API_KEY="open-sesame")
    first = json.loads(process.wait_for_line("settings: "))
    url = json.loads(process.wait_for_line(" ready on "))["message"].split()[-1]
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        refused = client.get("/v1/models")
        client.headers["authorization"] = "Bearer open-sesame"
        models = client.get("/v1/models", headers={"x-request-id": "mine-1"}).json()
    line = json.loads(process.wait_for_line("mine-1"))
    process.popen.terminate()

    assert "api-key=*** (GPTSERVE_API_KEY)" in first["message"]
    assert refused.status_code == 401
    assert [model["id"] for model in models["data"]] == ["teller"]
    assert (line["request_id"], line["path"], line["status"]) == ("mine-1", "/v1/models", 200)
    status, log = process.wait()
    assert (status, "open-sesame" in log) == (0, False)
    assert all(json.loads(line)["message"] for line in log.splitlines())


@pytest.mark.slow
def test_a_model_without_a_chat_template_takes_the_one_chosen(launch: Any, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 5, "temperature": 0}
    complete = {"max_tokens": 5, "temperature": 0}
    ids = Tokenizer.open(ROOT / "weights" / "storyteller").encode_with_special("<|endoftext|>User: Once\nAssistant:")
    mine = tmp_path / "mine.jinja"
    mine.write_text("{{ messages[0].content }} upon a time")
    model = tmp_path / "model"
    model.mkdir()
    link_storyteller(model)
    fields = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({**fields, "chat_template": None}))
    without, with_plain, with_mine = (
        launch(str(model), *flags) for flags in ((), ("--chat-template", "plain"), ("--chat-template", str(mine)))
    )
    with without.wait_until_ready() as client:
        refused = client.post("/v1/chat/completions", json=chat)
        expected = client.post("/v1/completions", json={**complete, "prompt": "Once upon a time"}).json()
    with with_plain.wait_until_ready() as client:
        answer = client.post("/v1/chat/completions", json=chat).json()
        text = client.post("/v1/completions", json={**complete, "prompt": ids}).json()
    with with_mine.wait_until_ready() as client:
        mine_answer = client.post("/v1/chat/completions", json=chat).json()

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_chat_template")
    assert answer["choices"][0]["message"]["content"] == text["choices"][0]["text"]
    assert mine_answer["choices"][0]["message"]["content"] == expected["choices"][0]["text"]


@pytest.mark.slow
def test_a_model_has_names_sampling_defaults_and_a_tokenizer(launch: Any) -> None:
    process = launch("--served-model-name", "teller", "--served-model-name", "gpt-4o", "--served-model-name=claude-*")
    process.wait_for_line("sampling defaults of the model: temperature=0.8 (--generation-config none turns them off)")
    with process.wait_until_ready() as client:
        models = client.get("/v1/models").json()["data"]
        info = client.get("/tokenizer_info").json()
        eos = client.post("/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False}).json()
        text = client.post("/detokenize", json={"tokens": [*eos["tokens"], 5]}).json()["prompt"]
        by_pattern = client.post("/detokenize", json={"tokens": [5], "model": "claude-opus-5"})
        again = client.post("/tokenize", json={"prompt": text, "model": "gpt-4o"}).json()
        drawn = {"prompt": "Once upon a time", "seed": 3, "max_tokens": 30, "model": "gpt-4o"}
        by_default, as_said, otherwise = (
            client.post("/v1/completions", json={**drawn, **fields}).json()
            for fields in ({}, {"temperature": 0.8}, {"temperature": 1.3})
        )

    assert [(model["id"], model["sampling_defaults"]) for model in models] == [
        ("teller", {"temperature": 0.8}),
        ("gpt-4o", {"temperature": 0.8}),
    ]
    assert (info["tokenizer_class"], eos["tokens"], again["tokens"]) == ("GPT2Tokenizer", [0], [0, 5])
    assert by_pattern.status_code == 200
    assert by_default["model"] == "teller"
    assert by_default["choices"] == as_said["choices"] != otherwise["choices"]


@pytest.mark.slow
def test_sampling_defaults_that_are_not_valid_end_the_start(launch: Any, tmp_path: Path) -> None:
    link_storyteller(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"temperature": 3.0}')
    status, log = launch(str(tmp_path)).wait()
    assert status == 1
    rule = "generation_config.json: temperature must be in [0.0, 2.0], got 3.0; start with --generation-config none"
    assert rule in log
    assert "Traceback" not in log
    with launch(str(tmp_path), "--generation-config", "none").wait_until_ready() as client:
        assert client.get("/v1/models").json()["data"][0]["sampling_defaults"] == {}


@pytest.mark.slow
def test_a_chat_template_that_is_not_valid_ends_the_start(launch: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% if %}")
    status, log = launch("--chat-template", str(tmp_path / "broken.jinja")).wait()

    assert status == 1
    assert "gptserve: the chat template is not valid: Expected an expression" in log


@pytest.mark.slow
def test_what_does_not_fit_into_the_queue_gets_status_429_until_it_does(launch_held: Any, gate: EngineGate) -> None:
    process = launch_held("--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    ask = {"prompt": "Once", "max_tokens": 2}
    with process.wait_until_ready() as client:
        with stream(client, max_tokens=1000):
            beside_one = client.post("/v1/completions", json=ask | {"n": 2})
        gate.open()
        while metric(client, "gptserve_num_requests_running"):
            pass
        fits = client.post("/v1/completions", json=ask | {"n": 2})
    process.popen.terminate()

    assert (beside_one.status_code, beside_one.json()["error"]["code"]) == (429, "queue_full")
    assert int(beside_one.headers["retry-after"]) >= 1
    assert fits.status_code == 200
    assert process.wait()[0] == 0


@pytest.mark.slow
def test_what_is_not_started_in_time_gets_status_503(launch_held: Any, gate: EngineGate) -> None:
    process = launch_held("--max-num-seqs", "1", "--max-queue-time", "0.05")
    with process.wait_until_ready() as client, ThreadPoolExecutor() as beside:
        with stream(client, max_tokens=1000):
            waiting = beside.submit(client.post, "/v1/completions", json={"prompt": "Once", "max_tokens": 2})
            while not metric(client, "gptserve_num_requests_waiting"):
                pass
            gate.open()  # no machine makes the nearly 1000 steps that the stream has left in 0.05 s
            waited = waiting.result()
        while metric(client, "gptserve_num_requests_running"):
            pass
        fits = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
    process.popen.terminate()

    assert (waited.status_code, waited.json()["error"]["code"]) == (503, "queue_timeout")
    assert waited.json()["error"]["message"] == "choice 0: the request was not admitted within 0.05 s"
    assert int(waited.headers["retry-after"]) >= 1
    assert fits.status_code == 200
    assert process.wait()[0] == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with the openssl command")
def test_tls_is_served_and_the_probe_of_the_container_follows(launch: Any, tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate)
    subprocess.run([*make.split(), *names], check=True, capture_output=True)
    tls = {"GPTSERVE_SSL_KEYFILE": key, "GPTSERVE_SSL_CERTFILE": certificate}

    process = launch(**tls)
    url = httpx.URL(process.wait_for_line(" ready on ").partition(" ready on ")[2].split()[0])
    trust = ssl.create_default_context(cafile=certificate)
    with httpx.Client(base_url=url, verify=trust, timeout=LIMIT_S) as client, stream(client, max_tokens=5) as events:
        *_, last = events
    probes = probe(url.port, **tls), probe(url.port)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(url)
    process.popen.terminate()

    assert url.scheme == "https"
    assert last == "data: [DONE]"
    assert (probes[0], probes[1] != 0) == (0, True)
    assert process.wait()[0] == 0


@pytest.mark.slow
def test_the_probe_of_the_container_asks_for_the_health_of_its_server(launch: Any) -> None:
    process = launch()
    with process.wait_until_ready() as client:
        port = client.base_url.port
        assert probe(port) == 0
    process.popen.terminate()

    assert process.wait()[0] == 0
    assert probe(port) != 0


def probe(port: int | None, **environment: str) -> int:
    """Run the Dockerfile's HEALTHCHECK beside a proxy that leads nowhere; return its status."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    [command] = re.findall(r"^HEALTHCHECK .*\\\n +CMD (.*)$", dockerfile, re.M)
    environment |= {"GPTSERVE_PORT": str(port), "http_proxy": "http://127.0.0.1:1"}
    assert json.loads(command) == ["gptserve", "health"]
    arguments = [sys.executable, "-c", "from gptserve.server.cli.main import main; main(['health'])"]
    return subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, timeout=LIMIT_S).returncode


def test_a_taken_port_is_known_before_anything_is_loaded(launch: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, log = launch("--port", str(port), "--model", "/no/such/model").wait()

    assert status == 1
    assert log.splitlines()[-1] == f"gptserve: cannot listen on 127.0.0.1 port {port}: Address already in use"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--model", "/no/such/model"), "gptserve: model must be an existing folder or a hub id, got '/no/such/model'"),
        pytest.param(
            ("--host", "no-such-host.invalid"),
            "gptserve: cannot listen on no-such-host.invalid port 0: ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--ssl-keyfile", __file__, "--ssl-certfile", __file__),
            f"gptserve: ssl-certfile {__file__} holds no certificate in PEM: ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--num-blocks", "1", "--max-model-len", "1024"),
            "the KV cache is too small for one sequence",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failing_start_is_one_sentence_and_status_1(flags: tuple[str, ...], expected: str, launch: Any) -> None:
    status, log = launch(*flags).wait()

    assert_one_sentence(status, log, expected)


@pytest.mark.slow
def test_a_key_file_that_is_lost_after_the_check_of_the_settings_is_one_sentence(launch: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice: s3cret")

    status, log = launch("--api-key-file", str(tmp_path / "keys"), main=LOSING_KEYS).wait()

    assert_one_sentence(status, log, "gptserve: api-key-file must be a file that can be read, got")


UNREADABLE = "model.safetensors is not a readable safetensors file: "


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 10**6)


def claim_a_giant_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", 2**63))


def place_a_tensor_past_the_end(folder: Path) -> None:
    def place(header: dict[str, Any]) -> None:
        header["transformer.wte.weight"]["data_offsets"][1] += 2**40

    rewrite_header(folder, place)


def lose_a_tensor(folder: Path) -> None:
    def rename(header: dict[str, Any]) -> None:
        header["lost"] = header.pop("transformer.h.0.attn.c_attn.weight")

    rewrite_header(folder, rename)


def claim_heads_that_do_not_divide(folder: Path) -> None:
    rewrite_config(folder, n_head=7)


def claim_more_layers(folder: Path) -> None:
    rewrite_config(folder, n_layer=99)


def rewrite_config(folder: Path, **fields: int) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")


def rewrite_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Apply `change` to the header of the safetensors file and leave the data as they are."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    change(header)
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + length :])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        pytest.param(truncate, UNREADABLE, marks=pytest.mark.slow),
        pytest.param(claim_a_giant_header, UNREADABLE, marks=pytest.mark.slow),
        pytest.param(place_a_tensor_past_the_end, UNREADABLE, marks=pytest.mark.slow),
        (lose_a_tensor, "h.0.attn.c_attn.weight), 1 unexpected ('lost')"),
        pytest.param(
            claim_heads_that_do_not_divide,
            "config.json: n_embd must be a multiple of n_head (7), got ",
            marks=pytest.mark.slow,
        ),
        pytest.param(claim_more_layers, "do not fit its config.json: ", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_model_is_one_sentence_and_status_1(
    damage: Callable[[Path], None], expected: str, launch: Any, storyteller: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(storyteller, tmp_path / "model"))
    damage(folder)

    status, log = launch(str(folder)).wait()

    assert_one_sentence(status, log, expected)


def assert_one_sentence(status: int, log: str, expected: str) -> None:
    """Assert that a start failed with this cause, told in the last line, and with no traceback."""
    settings, *rest = log.splitlines()
    assert status == 1
    assert "settings: " in settings
    assert expected in rest[-1]
    assert not any(line.startswith(("Traceback", " ")) for line in rest)
