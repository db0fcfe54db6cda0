"""The real server with the real engine and the embedded model: what it costs, and what hang-ups leave behind."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gptserve import LLM
from gptserve.engine.request import SamplingParams
from tests.engine.held_engine import VARIABLE, EngineGate
from tests.exactness_table import compare, contrast
from tests.server.serving import LIMIT_S, MORTAL, Process

RSS_LIMIT_BYTES = 150 * 10**6
AT_ONCE = 40
"""So many of the clients that hang up do it while the engine is held: none of them can have been answered before."""
NUM_ANSWERS = 24
PARTS = ("queue", "prefill", "decode", "inference")
GAUGES = ("gptserve_num_requests_running", "gptserve_num_requests_waiting", "gptserve_kv_cache_usage_perc")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> EngineGate:
    return EngineGate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def process(gate: EngineGate) -> Iterator[Process]:
    """One server for all tests of this file."""
    flags = ("--num-blocks", "512", "--max-num-queued-reqs", "512", "--chat-template", "plain")
    server = Process(*flags, main=MORTAL, **{VARIABLE: str(gate.folder)})
    try:
        yield server
    finally:
        server.popen.terminate()
        assert server.wait()[0] == 0


@pytest.fixture(scope="module")
def client(process: Process) -> Iterator[httpx.Client]:
    with process.wait_until_ready() as client:
        yield client


def gauges(client: httpx.Client) -> dict[str, float]:
    """Return the metrics without labels, by name."""
    lines = client.get("/metrics").text.splitlines()
    return {
        re.sub(r"\{.*\}", "", name): float(value) for name, value in (x.rsplit(" ", 1) for x in lines if x[0] != "#")
    }


def resources(process: Process) -> dict[str, int]:
    counts = {}
    for name, p in (("server", psutil.Process(process.popen.pid)), ("engine", process.engine())):
        counts |= {f"{name} threads": p.num_threads(), f"{name} descriptors": p.num_fds()}
    return counts


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"prompt": "Once upon a time", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_http_gives_what_the_engine_gives(client: httpx.Client) -> None:
    answer = complete(client, max_tokens=40, temperature=0.8, seed=3)
    llm = LLM(num_threads=1, kv_cache_bytes=2**26, device="cpu")
    (expected,) = llm.generate("Once upon a time", SamplingParams(max_tokens=40, temperature=0.8), seed=3)
    assert answer["choices"][0]["text"] == expected.text
    assert answer["system_fingerprint"] == llm.engine.info.fingerprint


def test_a_stream_gives_the_same_text_in_parts(client: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0.8, "seed": 3}
    text = ""
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    text = "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
    assert text == complete(client, **body)["choices"][0]["text"]
    assert len(events) > 20


@pytest.mark.slow
def test_a_streamed_answer_joined_is_the_plain_one(client: httpx.Client) -> None:
    """Text, logprobs, reasons and usage of many at once, as text and as chat, one choice and several."""
    bodies = {str(i): any_body(i) for i in range(NUM_ANSWERS)}
    reseeded = {f"other {i}": {**body, "seed": body["seed"] + 1000} for i, body in bodies.items()}
    plain, streamed = asyncio.run(plain_and_streamed(str(client.base_url), bodies | reseeded))
    compare("streamed, over HTTP", {i: streamed[i] for i in bodies}, {i: plain[i] for i in bodies})
    contrast("another seed, streamed", {i: streamed[f"other {i}"] for i in bodies}, {i: plain[i] for i in bodies})


def any_body(i: int) -> dict[str, Any]:
    """Return one of many kinds of bodies, drawn from a seed of its own."""
    is_chat = i % 3 == 2
    return {
        **({"messages": [{"role": "user", "content": f"Tell {i}."}]} if is_chat else {"prompt": f"Once, {i} days ago"}),
        **({"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2, "echo": i % 4 == 0}),
        **{"max_tokens": 30, "temperature": 0.7 + i / NUM_ANSWERS, "seed": i, "n": 1 + i % 2},
        **{"stop": [". "] if i % 5 == 0 else None, "top_p": 0.95},
    }


async def plain_and_streamed(url: str, bodies: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the answers to all bodies, asked for at the same time, in one piece and joined from events."""
    streaming = {"stream": True, "stream_options": {"include_usage": True}}

    async def ask(body: dict[str, Any]) -> Any:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        return joined(response.text) if "stream" in body else essence(response.json())

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        asked = [ask(body | extra) for extra in ({}, streaming) for body in bodies.values()]
        answers = await asyncio.gather(*asked)
    return dict(zip(bodies, answers[: len(bodies)], strict=True)), dict(
        zip(bodies, answers[len(bodies) :], strict=True)
    )


def essence(answer: dict[str, Any]) -> Any:
    """Return what of an answer the request alone decides; how much of a prompt was cached is the server's luck."""
    usage = {name: count for name, count in answer["usage"].items() if name != "prompt_tokens_details"}
    return answer["system_fingerprint"], answer["seed"], list(map(given, answer["choices"])), usage


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null: whole answers name some that chunks leave out."""
    return {
        name: given(value) if isinstance(value, dict) else value for name, value in fields.items() if value is not None
    }


def joined(events: str) -> Any:
    """Return the essence of the answer whose parts these events are."""
    data = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    *chunks, last = map(json.loads, data)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        [part] = chunk["choices"]
        whole = choices.setdefault(part["index"], part)
        if whole is not part:
            join(whole, part)
    for choice in choices.values():
        if "delta" in choice:
            choice["message"] = choice.pop("delta")
    return essence({**last, "choices": [choices[index] for index in sorted(choices)]})


def join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a part of a choice to what came before: texts and lists are joined, of the rest the latest counts."""
    for name, value in part.items():
        if isinstance(value, dict) and isinstance(whole.get(name), dict):
            join(whole[name], value)
        elif isinstance(value, str | list) and whole.get(name):
            whole[name] += value
        else:
            whole[name] = value


def test_a_completion_can_be_repeated_by_the_seed_it_reports(client: httpx.Client) -> None:
    first = complete(client, max_tokens=30, temperature=1.5)
    again = complete(client, max_tokens=30, temperature=1.5, seed=first["seed"])
    assert again["choices"] == first["choices"]
    assert complete(client, max_tokens=30, temperature=1.5)["choices"] != first["choices"]


def test_echoed_logprobs_of_a_text_equal_those_of_generating_it(client: httpx.Client) -> None:
    made = complete(client, max_tokens=20, temperature=0, logprobs=1)["choices"][0]
    text = "Once upon a time" + made["text"]
    echoed = complete(client, prompt=text, max_tokens=1, temperature=0, logprobs=1, echo=True)["choices"][0]
    assert echoed["text"].startswith(text)
    assert echoed["logprobs"]["token_logprobs"][-21:-1] == made["logprobs"]["token_logprobs"]
    assert echoed["logprobs"]["token_logprobs"][0] is None
    for token, offset in zip(echoed["logprobs"]["tokens"], echoed["logprobs"]["text_offset"], strict=True):
        assert echoed["text"][offset:].startswith(token) or not token.isascii() or token == "<|endoftext|>"


def test_the_server_process_has_no_torch_and_is_small(client: httpx.Client, process: Process) -> None:
    complete(client, max_tokens=5)
    server = psutil.Process(process.popen.pid)
    assert server.memory_info().rss < RSS_LIMIT_BYTES
    assert not [m.path for m in server.memory_maps() if "torch" in m.path]
    assert [m.path for m in process.engine().memory_maps() if "torch" in m.path]


@pytest.mark.parametrize("num_clients", [80, pytest.param(200, marks=pytest.mark.slow)])
def test_clients_that_hang_up_leave_nothing_behind(
    client: httpx.Client, process: Process, gate: EngineGate, num_clients: int
) -> None:
    complete(client, max_tokens=5)
    url = str(client.base_url)
    before = held_by(client, process)
    num_held = num_clients // 2
    num_aborts = asyncio.run(hang_up_many(url, gate, num_clients, num_held))
    with client.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True}) as last:
        assert last.read()
    deadline = time.monotonic() + LIMIT_S  # the server may still be reading that its clients are gone
    while (after := held_by(client, process)) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert after == before
    assert not any(before[name] for name in GAUGES)
    aborted = re.search(
        r'gptserve_request_success_total\{finished_reason="abort".*\} (\d+)', client.get("/metrics").text
    )
    assert aborted
    assert int(aborted[1]) >= num_aborts > num_held // 2


def held_by(client: httpx.Client, process: Process) -> dict[str, float]:
    """Return what the server and its engine hold, outside and inside."""
    return resources(process) | {name: value for name, value in gauges(client).items() if name in GAUGES}


async def hang_up_many(url: str, gate: EngineGate, num_clients: int, num_held: int) -> int:
    """Start completions of every kind and leave each at a random moment: before, during or right after its events.

    Return how many choices certainly ran then: the first num_held find the engine held, and wait for their stream.
    """
    rng = random.Random(0)
    num_certain = 0

    async def hang_up(n: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        prompt = "Once upon a time" * rng.randint(1, 20)
        body = {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "stream": n % 3 != 0, "n": 1 + n % 2}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}"
        sent = f"{head}\r\n\r\n".encode() + data
        writer.write(sent if n % 10 else sent[: rng.randint(1, len(sent))])
        if n < num_held and n % 10 and body["stream"]:
            nonlocal num_certain
            assert await reader.read(1)
            num_certain += int(str(body["n"]))
        if n % 10:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * rng.random()):
                    for _ in range(rng.choice((0, 0, 1, 5, 20))):
                        await reader.read(2000)
        writer.transport.abort()

    for start in range(0, num_clients, AT_ONCE):
        if start < num_held:
            gate.shut()
        await asyncio.gather(*(hang_up(n) for n in range(start, start + AT_ONCE)))
        gate.open()
    return num_certain


def test_the_openai_client_streams_cancels_and_gets_typed_errors(client: httpx.Client) -> None:
    import openai  # takes as long as all else here

    with openai.OpenAI(base_url=str(client.base_url.join("/v1")), api_key="none", max_retries=0) as api:
        stream = api.completions.create(model="storyteller", prompt="Once", max_tokens=400, stream=True, seed=1)
        next(iter(stream))
        stream.close()
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(model="storyteller", prompt="Once", max_tokens=10**9)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            api.completions.create(model="gpt-5", prompt="Once")


@pytest.mark.slow
def test_the_metrics_under_load_are_those_of_what_was_sent(client: httpx.Client) -> None:
    before = samples(client)
    bodies = [any_body(i) | {"stop": None, "ignore_eos": True} for i in range(NUM_ANSWERS)]
    answers = asyncio.run(answers_and_scrapes(str(client.base_url), bodies))
    assert client.post("/v1/completions", json={"prompt": "x", "temperature": -1}).status_code == 400
    assert client.get("/nowhere").status_code == 404
    grown = {name: value - before[name] for name, value in samples(client).items()}

    num_choices = sum(len(answer["choices"]) for answer in answers)
    num_prompt = sum(answer["usage"]["prompt_tokens"] * len(answer["choices"]) for answer in answers)
    num_generated = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert (grown["prompt_tokens_total"], grown["request_prompt_tokens_sum"]) == (num_prompt, num_prompt)
    assert (grown["generation_tokens_total"], grown["request_generation_tokens_sum"]) == (num_generated, num_generated)
    assert grown["request_success_total|length"] == num_choices
    of_choices = (
        "request_prompt_tokens",
        "request_generation_tokens",
        *(f"request_{part}_time_seconds" for part in PARTS),
    )
    assert {name: grown[f"{name}_count"] for name in of_choices} == dict.fromkeys(of_choices, num_choices)
    assert grown["time_to_first_token_seconds_count"] == grown["e2e_request_latency_seconds_count"] == len(answers)
    assert grown["inter_token_latency_seconds_count"] == num_generated - num_choices
    num_hits = grown["prefix_cache_hits_total"]
    num_computed = num_prompt - num_hits + num_generated - num_choices  # nobody computes the last token
    assert grown["iteration_tokens_total_sum"] == num_computed
    assert 0 < grown["iteration_tokens_total_count"] <= num_computed
    num_chats = sum("messages" in body for body in bodies)
    assert grown["http_requests_total|/v1/chat/completions|POST|200"] == num_chats
    assert grown["http_requests_total|/v1/completions|POST|200"] == NUM_ANSWERS - num_chats
    assert grown["http_requests_total|/v1/completions|POST|400"] == grown["http_requests_total|none|GET|404"] == 1
    took = {part: grown[f"request_{part}_time_seconds_sum"] for part in PARTS}
    assert took["inference"] == pytest.approx(took["prefill"] + took["decode"])
    assert min(took.values()) > 0


async def answers_and_scrapes(url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers to all bodies, asked for at the same time, and scrape the metrics meanwhile."""

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        response = await http.post("/v1/chat/completions" if "messages" in body else "/v1/completions", json=body)
        assert (await http.get("/metrics")).status_code == 200
        answer: dict[str, Any] = response.json()
        return answer

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        return await asyncio.gather(*map(ask, bodies))


def samples(client: httpx.Client) -> collections.defaultdict[str, float]:
    """Return our metrics by their names without the prefix and their labels other than the model's; 0 for others."""
    found: collections.defaultdict[str, float] = collections.defaultdict(float)
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            found["|".join((sample.name.removeprefix("gptserve_"), *labels))] = sample.value
    return found
