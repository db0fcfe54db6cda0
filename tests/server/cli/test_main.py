"""The command line: what it prints where, and the status it exits with."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gptserve.weights.source import resolve_model
from tests.conftest import MakeGPT2
from tests.server.cli.conftest import StandIn
from tests.server.cli.events import events, text_event
from tests.server.serving import Process

COMMANDS = ("serve", "health", "doctor", "config", "complete", "chat", "inspect", "convert")


def test_the_command_alone_prints_its_help(run: Any) -> None:
    status, out, err = run()

    assert (status, err) == (0, "")
    assert out == run("--help")[1]
    assert all(f"\n    {command} " in out for command in COMMANDS)


def test_version(run: Any) -> None:
    status, out, _ = run("--version")

    assert (status, out.split()[0]) == (0, "gptserve")


@pytest.mark.some(7)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serve", "--max-num-seq", "3"), "unknown argument --max-num-seq; did you mean --max-num-seqs?"),
        (("serve", "--prot=3"), "unknown argument --prot; did you mean --port?"),
        (("serve", "a", "b"), "unknown argument b"),
        (("serve", "a", "--model", "b"), "the model must be given once, got both MODEL and --model"),
        (
            ("serve", "--served-model-name", "mine", "./my-model"),
            "--served-model-name takes 'mine' and './my-model' as names of the model: put MODEL before it, use "
            "--model, or repeat the flag for each name",
        ),
        (("serve", "--served-model-name"), "argument --served-model-name: expected at least one argument"),
        (("serve", "--in-process=false"), "--no-in-process: takes no value, got 'false'"),
        (("serve", "--port", "x"), "--port must be a whole number, got 'x'"),
        (("complete",), "the following arguments are required: TEXT"),
        (("chat", "--temperature", "hot"), "argument --temperature: must be a finite number, got 'hot'"),
        (("chat", "--system", "\udcff"), r"argument --system: must be UTF-8, got '\udcff'"),
        (("complete", "x", "--max-tokens", "many"), "argument --max-tokens: must be a whole number, got 'many'"),
        (("complete", "x", "--temperature", "nan"), "argument --temperature: must be a finite number, got 'nan'"),
        (("complete", "x", "--top-p=-inf"), "argument --top-p: must be a finite number, got '-inf'"),
        (("complete", "x", "--top-p", "much"), "argument --top-p: must be a finite number, got 'much'"),
        (("complete", "\udcff"), r"argument TEXT: must be UTF-8, got '\udcff'"),
        (("complete", "x", "--stop", "\udcff"), r"argument --stop: must be UTF-8, got '\udcff'"),
        (("complete", "x", "--url", "http://h/\udcff"), r"argument --url: must be UTF-8, got 'http://h/\udcff'"),
        (
            ("complete", "x", "--url", "localhost:9000"),
            "the URL of the server must begin with http:// or https:// and a host, got 'localhost:9000'",
        ),
        (("chat", "--url", "http://"), "must begin with http:// or https:// and a host, got 'http://'"),
        (("complete", "x", "--local", "--url", "u"), "--url and --api-key are for a server, and --local asks none"),
        (("complete", "x", "--local", "m", "--api-key", "k"), "--url and --api-key are for a server"),
        (("inspect", "--block-size", "0"), "argument --block-size: must be a whole number of at least 1, got '0'"),
        (("inspect", "--block-size", "-3"), "argument --block-size: must be a whole number of at least 1, got '-3'"),
        (("inspect", "--block-size", "x"), "argument --block-size: must be a whole number of at least 1, got 'x'"),
        (("inspect", "--memory", "much"), "argument --memory: must be a number of bytes such as 8GiB, got 'much'"),
        (("sevre",), "'sevre'"),
        (("--prot",), "gptserve: unknown argument --prot"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_status_2(arguments: tuple[str, ...], expected: str, run: Any) -> None:
    status, out, err = run(*arguments)

    assert (status, out, err.count("\n")) == (2, "", 1)
    assert expected in err


def test_a_mistyped_flag_does_not_show_its_value(run: Any) -> None:
    status, out, err = run("serve", "--api-ky=open-sesame")

    assert (status, out, err) == (2, "", "gptserve serve: unknown argument --api-ky; did you mean --api-key?\n")


def test_a_wrong_variable_is_status_2(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTSERVE_PROT", "1")

    assert run("serve")[::2] == (2, "gptserve serve: unknown variable GPTSERVE_PROT; did you mean GPTSERVE_PORT?\n")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (("--host", "0.0.0.0"), True),
        (("--host", "0.0.0.0", "--api-key", "k"), False),
        (("--host", "127.0.0.1"), False),
    ],
)
def test_a_server_that_others_can_reach_without_a_key_warns(flags: tuple[str, ...], warned: bool) -> None:
    process = Process("/no/such/model", *flags)  # it ends before it listens
    status, log = process.wait()

    warnings = [line for line in log.splitlines() if " WARNING " in line]
    assert status == 1
    assert len(warnings) == warned
    assert all(
        line.endswith("no API key is set: whoever can reach 0.0.0.0 can use this server; see --api-key")
        for line in warnings
    )


@pytest.mark.slow
def test_the_variables_of_a_kubernetes_service_are_counted() -> None:
    injected = {"GPTSERVE_CPU_SERVICE_HOST": "10.0.0.1", "GPTSERVE_PORT": "tcp://10.0.0.1:8000"}
    _, log = Process("/no/such/model", **injected).wait()
    _, without = Process("/no/such/model").wait()

    [line] = [line for line in log.splitlines() if "Kubernetes" in line]
    assert " INFO " in line
    assert "ignoring 2 variables that Kubernetes made for a Service: " in line
    assert all(variable in line for variable in injected)
    assert "Kubernetes" not in without


def test_complete_prints_the_text_as_it_streams(run: Any, server: StandIn) -> None:
    server.answer = (200, events(text_event("there"), text_event(" was\u2028a"), {"choices": []}, "[DONE]"))

    status, out, err = run("complete", "Once", "--url", server.url, "--seed", "7", "--stop", "a", "--stop", "b")

    assert (status, out, err) == (0, "there was\u2028a\n", "")
    assert server.asked == [{"prompt": "Once", "stream": True, "max_tokens": 200, "seed": 7, "stop": ["a", "b"]}]
    assert server.authorization is None


def test_complete_reads_the_text_from_stdin(run: Any, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = (200, events("[DONE]"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("from a pipé\r\n".encode()), encoding="latin-1"))

    run("complete", "-", "--url", server.url)

    assert server.asked[0]["prompt"] == "from a pipé\r\n"


def test_a_text_on_stdin_that_is_not_utf_8_is_one_sentence_and_status_1(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))

    assert run("complete", "-") == (1, "", "gptserve: the text on stdin must be UTF-8, got something else at byte 2\n")


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_url_may_end_in_v1_or_a_slash(end: str, run: Any, server: StandIn) -> None:
    server.answer = (200, events("[DONE]"))

    run("complete", "x", "--url", server.url + "/behind/a/proxy" + end)

    assert server.path == "/behind/a/proxy/v1/completions"


@pytest.mark.parametrize("variable", ["GPTSERVE_URL", "GPTSERVE_PORT"])
def test_the_server_is_where_the_environment_says(
    variable: str, run: Any, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = (200, events(text_event("there"), "[DONE]"))
    monkeypatch.setenv(variable, server.url if variable == "GPTSERVE_URL" else str(server.server_port))

    assert run("complete", "x") == (0, "there\n", "")


def test_a_wrong_port_of_the_environment_is_status_2(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTSERVE_PORT", "x")

    assert run("complete", "x") == (2, "", "gptserve complete: GPTSERVE_PORT must be a whole number, got 'x'\n")


def test_complete_bears_the_key_given_or_that_of_the_environment(
    run: Any, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = (200, events("[DONE]"))
    monkeypatch.setenv("GPTSERVE_API_KEY", "first,key")

    run("complete", "x", "--url", server.url)
    assert server.authorization == "Bearer first,key"

    run("complete", "x", "--url", server.url, "--api-key", "third")
    assert server.authorization == "Bearer third"

    monkeypatch.setenv("GPTSERVE_API_KEY", "")
    run("complete", "x", "--url", server.url)
    assert server.authorization is None


@pytest.mark.parametrize("key", ["", "s3 cret", "s3crét", "s3cret\n"])
def test_complete_sends_no_wrong_key_and_does_not_show_it(run: Any, server: StandIn, key: str) -> None:
    server.answer = (200, events("[DONE]"))

    expected = (
        "gptserve complete: the API key must be one or more printable ASCII characters without a space, got ***\n"
    )
    assert run("complete", "x", "--url", server.url, "--api-key", key) == (2, "", expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((400, '{"error": {"message": "max_tokens must be at least 1"}}'), "gptserve: max_tokens must be at least 1\n"),
        ((502, "<html>"), "gptserve: the server answered with status 502 and no message\n"),
        (
            (200, events(text_event("a"), {"error": {"message": "the engine has died"}})),
            "gptserve: the engine has died\n",
        ),
        ((200, events(text_event("a"))), "gptserve: the stream ended in the middle of the answer\n"),
    ],
)
def test_a_completion_that_fails_is_one_sentence_and_status_1(
    answer: tuple[int, str], expected: str, run: Any, server: StandIn
) -> None:
    server.answer = answer

    assert run("complete", "x", "--url", server.url)[::2] == (1, expected)


def test_a_connection_that_is_lost_is_one_sentence_and_status_1(run: Any, server: StandIn) -> None:
    server.answer, server.headers["content-length"] = (200, events(text_event("there"))), "1000"

    status, out, err = run("complete", "x", "--url", server.url)

    assert (status, out, err.count("\n")) == (1, "there\n", 1)
    assert err.startswith(f"gptserve: the connection to {server.url} was lost: ")


def test_a_server_that_is_not_there_is_one_sentence_and_status_1(run: Any, server: StandIn) -> None:
    address = server.url
    server.shutdown()
    server.server_close()

    status, _, err = run("complete", "x", "--url", address)

    assert status == 1
    assert err.startswith(f"gptserve: no answer from {address}: ")
    assert err.endswith("is `gptserve serve` running there?\n")


def test_a_local_completion_depends_on_the_seed_alone(run: Any) -> None:
    ask = ("complete", "Once upon a time", "--local", "--max-tokens", "12")

    status, first, _ = run(*ask, "--seed", "1")
    again = run(*ask, "--seed", "1")[1]
    other = run(*ask, "--seed", "2")[1]

    assert status == 0
    assert first.strip()
    assert first == again != other


@pytest.mark.slow
def test_a_local_completion_has_the_sampling_defaults_of_the_model(run: Any) -> None:
    ask = ("complete", "Once upon a time", "--local", "--max-tokens", "30", "--seed", "3")
    by_default, as_said, otherwise = (
        run(*ask, *more)[1] for more in ((), ("--temperature", "0.8"), ("--temperature", "1.3"))
    )

    assert by_default == as_said != otherwise


def test_a_local_completion_ends_before_a_stop_string(run: Any) -> None:
    ask = ("complete", "Once upon a time", "--local", "--max-tokens", "12", "--temperature", "0")
    whole = run(*ask)[1].rstrip("\n")
    stop = whole[len(whole) // 2 :][:3]

    assert run(*ask, "--stop", stop)[1] == whole[: whole.index(stop)] + "\n"


def test_a_local_model_that_is_not_there_is_one_sentence_and_status_1(run: Any) -> None:
    status, out, err = run("complete", "x", "--local", "/no/such/model")

    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "/no/such/model" in err


@pytest.mark.slow
def test_score_prints_how_well_the_model_predicts_a_text(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Once upon a time there was a little fox. She lived in a wood."
    (tmp_path / "text").write_text(text)
    status, out, _ = run("score", str(tmp_path / "text"), "--json", "--num-threads", "1")
    report = json.loads(out)
    assert (status, set(report)) == (0, {"num_tokens", "num_bytes", "logprob", "perplexity", "bits_per_byte"})
    assert 0.1 < report["bits_per_byte"] < 2
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    lines = f"{report['num_tokens']} tokens, {report['num_bytes']} bytes\n"
    lines += f"perplexity {report['perplexity']:.4f}\nbits per byte {report['bits_per_byte']:.4f}\n"
    assert run("score", "-", "--num-threads", "1")[:2] == (0, lines)
    cut = json.loads(run("score", str(tmp_path / "text"), "--json", "--window", "4", "--stride", "1")[1])
    assert cut["num_tokens"] == report["num_tokens"]
    assert cut["logprob"] < report["logprob"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("no-such-file",), (1, "", "gptserve: cannot read no-such-file: No such file or directory\n")),
        (
            ("x", "--stride", "0"),
            (2, "", "gptserve score: argument --stride: must be a whole number of at least 1, got '0'\n"),
        ),
    ],
)
def test_score_without_a_text_or_with_a_wrong_window_is_one_sentence(
    run: Any, arguments: tuple[str, ...], expected: tuple[int, str, str]
) -> None:
    assert run("score", *arguments) == expected


def test_inspect_prints_tables_or_json(run: Any) -> None:
    status, table, _ = run("inspect", "--memory", "1GiB")
    report = json.loads(run("inspect", "--memory", "1GiB", "--json")[1])

    assert status == 0
    assert report["model"] == "storyteller"
    assert report["memory_bytes"] == 2**30
    assert f"{report['num_parameters']:,}" in table
    assert [entry["type_bytes"].keys() for entry in report["stored"]] == [{"BF16"}] * 6
    assert "  attention out                    16.00       289.5 KiB  BF16\n" in table


def test_inspect_needs_no_weights(run: Any, tmp_path: Path) -> None:
    shutil.copy(resolve_model(None) / "config.json", tmp_path)
    status, table, _ = run("inspect", str(tmp_path), "--memory", "1GiB")

    assert status == 0
    assert "in the files" not in table


def test_inspect_knows_the_embedded_model_by_its_name(run: Any) -> None:
    assert run("inspect", "storyteller", "--memory", "1GiB") == run("inspect", "--memory", "1GiB")


def test_inspect_refuses_a_doubtful_key_if_strict(run: Any, tmp_path: Path) -> None:
    raw = {"model_type": "nanogpt", "n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 4, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"residual_multiplier": 1}))

    assert run("inspect", str(tmp_path), "--memory", "1GiB")[0] == 0
    status, _, errors = run("inspect", str(tmp_path), "--memory", "1GiB", "--strict-config")
    assert status == 1
    assert "sets `residual_multiplier` to 1, which gptserve does not know" in errors


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": '{"model_type": "bert"}', "model.safetensors": ""}, "bert is an encoder"),
        ({"tiny.gguf": ""}, "tiny.gguf could not be read: it is empty"),
        ({"config.json": '{"model_type": "gpt2"}', "pytorch_model.bin": ""}, "run: gptserve convert FOLDER TARGET"),
    ],
)
def test_serve_says_why_a_model_cannot_be_served_and_asks_for_no_tokenizer(
    files: dict[str, str], expected: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    command = [
        sys.executable,
        "-c",
        "from gptserve.server.cli.main import main; main()",
        "serve",
        str(tmp_path),
        "--port",
        "0",
    ]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 1
    assert expected in done.stderr.splitlines()[-1]
    assert "tokenizer" not in done.stderr


def pickle_weights(model: Path, folder: Path) -> Path:
    """Make a folder with config.json and pytorch_model.bin, and no tokenizer."""
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    torch.save(load_file(model / "model.safetensors"), folder / "pytorch_model.bin")
    return folder


@pytest.mark.slow
def test_convert_says_that_a_model_can_be_served_only_where_it_can(
    run: Any, make_gpt2: MakeGPT2, storyteller: Path, tmp_path: Path
) -> None:
    small, fitting = (
        pickle_weights(make_gpt2(vocab_size=size), tmp_path / str(size))
        for size in (96, json.loads((storyteller / "config.json").read_text())["vocab_size"])
    )

    def convert(source: Path, name: str, *options: str) -> tuple[object, str, str]:
        outcome: tuple[object, str, str] = run("convert", str(source), str(tmp_path / name), *options)
        return outcome

    status, out, err = convert(small, "bare")
    assert (status, out) == (1, "")
    assert f"{tmp_path / 'bare'} is written, but cannot be served: {tmp_path / 'bare'} must hold tokenizer.json" in err

    words = shutil.copytree(storyteller, tmp_path / "words", ignore=shutil.ignore_patterns("generation_config.json"))
    status, out, err = convert(small, "foreign", "--tokenizer", str(words))
    assert (status, out) == (1, "")
    assert "the tokenizer's ids must be below config.json's vocab_size 96" in err

    target = tmp_path / "whole"
    served = f"{target} can be served: gptserve serve {target}\n"
    assert convert(fitting, "whole", "--tokenizer", str(storyteller)) == (0, served, "")
    assert run("complete", "Once", "--local", str(target), "--max-tokens", "2")[0] == 0
