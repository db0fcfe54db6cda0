"""`gptserve bench` as a whole: loads one after the other, a table or JSON, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

import gptserve
from gptserve.server.cli.bench.report import HEADING
from tests.server.cli.bench.stand_in import DONE, token, usage
from tests.server.cli.conftest import StandIn


@pytest.fixture(autouse=True)
def answers(server: StandIn) -> None:
    server.answer = (200, token() + token() + usage(128, 2) + DONE)


def test_a_row_for_each_load_below_a_heading(run: Any, server: StandIn) -> None:
    loads = ("--concurrency", "2,1", "--rate", "1e6", "--num-requests", "3", "--max-tokens", "2")
    status, out, err = run("bench", "--url", server.url, *loads)
    title, _, heading, *rows = out.splitlines()

    assert (status, err) == (0, "")
    assert title == f"teller at {server.url}"
    assert heading == HEADING
    assert [row.split("  ")[0] for row in rows] == ["2 at a time", "1 at a time", "1e+06 a second"]
    assert [row[15:30].split() for row in rows] == [["3", "0"]] * 3


def test_loads_are_measured_without_the_requests_that_warm_the_server_up(run: Any, server: StandIn) -> None:
    flags = ("--concurrency", "3", "--num-requests", "5", "--max-tokens", "20", "--prompt-tokens", "30")
    out = run("bench", "--url", server.url, *flags, "--json")[1]

    assert [body["max_tokens"] for body in server.asked] == [8] * 3 + [20] * 5
    assert {len(body["prompt"]) for body in server.asked} == {30}
    assert len({str(body["prompt"]) for body in server.asked}) == 8
    assert {(body["model"], body["temperature"], body["ignore_eos"]) for body in server.asked} == {("teller", 0, True)}
    [load] = json.loads(out)["loads"]
    assert (load["num_requests"], load["num_output_tokens"], load["num_short"]) == (5, 10, 5)


def test_json_says_what_was_asked_of_which_server_by_which_client(run: Any, server: StandIn) -> None:
    server.models = '{"data": [{"id": "teller"}], "version": "1.2"}'  # of all paths
    flags = (
        "--rate",
        "1e6",
        "--num-requests",
        "2",
        "--slo-itl-ms",
        "9000",
        "--seed",
        "7",
        "--api-key",
        "secret",
        "--prompts",
        "words",
    )
    status, out, err = run("bench", "--url", server.url + "/v1", *flags, "--json")
    report = json.loads(out)

    assert (status, err, out.count("\n")) == (0, "", 1)
    assert report["server"] == {"url": server.url, "model": "teller", "version": "1.2"}
    assert report["client"]["gptserve"] == gptserve.__version__
    workload = report["asked"].pop("workload")
    assert (workload["seed"], workload["prompts"], workload["prompt_tokens"]) == (7, "words", 128)
    slo = {"ttft_ms": None, "itl_ms": 9000.0}
    assert report["asked"] == {"concurrency": [], "rate": [1e6], "num_requests": 2, "slo": slo}
    assert list(report["loads"][0]["ttft_ms"]) == ["p50", "p90", "p99"]
    assert server.authorization == "Bearer secret"
    assert "secret" not in out


def test_a_server_without_a_version_has_none(run: Any, server: StandIn) -> None:
    out = run("bench", "--url", server.url, "--concurrency", "1", "--json")[1]

    assert json.loads(out)["server"]["version"] is None


def test_a_server_that_completes_nothing_is_one_sentence_and_status_1(run: Any, server: StandIn) -> None:
    server.answer = (400, '{"error": {"message": "no such field", "type": "invalid_request_error"}}')
    status, _, err = run("bench", "--url", server.url, "--concurrency", "1")

    expected = "the server completes no prompt: status 400, invalid_request_error: no such field"
    assert (status, err) == (1, f"gptserve: {expected}\n")


def test_a_warm_up_without_a_message_says_only_what_failed(run: Any, server: StandIn) -> None:
    server.answer = (200, token())

    assert run("bench", "--url", server.url)[2] == "gptserve: the server completes no prompt: cut short\n"


def test_each_client_sends_four_requests_unless_told(run: Any, server: StandIn) -> None:
    run("bench", "--url", server.url, "--concurrency", "2", "--max-tokens", "9")

    assert [body["max_tokens"] for body in server.asked] == [8] * 2 + [9] * 8


def test_a_server_that_is_not_there_is_one_sentence_and_status_1(run: Any, server: StandIn) -> None:
    server.shutdown()
    server.server_close()
    status, out, err = run("bench", "--url", server.url)

    assert (status, out) == (1, "")
    assert err.startswith(f"gptserve: no answer from {server.url}: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("m", "--url", "u"), "--url is for a server that runs, and MODEL starts one"),
        (
            ("--shared-prefix", "8", "--prompt-tokens", "8"),
            "--shared-prefix must be below --prompt-tokens 8, got 8",
        ),
        (("--concurrency", "1,x"), "argument --concurrency: must be whole numbers of at least 1, as 1,8, got '1,x'"),
        (("--concurrency", "4,0"), "argument --concurrency: must be whole numbers of at least 1, as 1,8, got '4,0'"),
        (("--rate", "1,0"), "argument --rate: must be finite numbers over 0, as 0.5,2, got '1,0'"),
        (("--rate", "nan,1"), "argument --rate: must be finite numbers over 0, as 0.5,2, got 'nan,1'"),
        (("--rate", ""), "argument --rate: must be finite numbers over 0, as 0.5,2, got ''"),
        (("--num-requests", "0"), "argument --num-requests: must be a whole number of at least 1, got '0'"),
        (("--prompt-tokens", "x"), "argument --prompt-tokens: must be a whole number of at least 1, got 'x'"),
        (("--shared-prefix", "-1"), "argument --shared-prefix: must be a whole number of at least 0, got '-1'"),
        (("--spread", "1"), "argument --spread: must be a number of at least 0 and below 1, got '1'"),
        (("--spread", "nan"), "argument --spread: must be a number of at least 0 and below 1, got 'nan'"),
        (("--slo-ttft-ms", "0"), "argument --slo-ttft-ms: must be a finite number over 0, got '0'"),
        (("--temperature", "hot"), "argument --temperature: must be a finite number, got 'hot'"),
        (("--prompts", "texts"), "argument --prompts: invalid choice: 'texts'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_status_2(arguments: tuple[str, ...], expected: str, run: Any) -> None:
    status, out, err = run("bench", *arguments)

    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"gptserve bench: {expected}")
