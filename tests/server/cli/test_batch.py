"""`gptserve batch` answers each line of a file once, and goes on where it stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.mortal_engine import POISON
from tests.server.serving import MORTAL

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}


def write_input(path: Path, num_lines: int) -> Path:
    bodies: list[dict[str, object]] = [
        {"prompt": "Once upon a time", "max_tokens": 12},
        {"prompt": "The cat", "max_tokens": 8, "n": 2},
        {"prompt": "x", "max_tokens": 24, "structured_outputs": {"json": SCHEMA}},
        {"prompt": "x", "stream": True},
    ]
    lines = (
        {"custom_id": f"line {i}", "method": "POST", "url": "/v1/completions", "body": bodies[i % len(bodies)]}
        for i in range(num_lines)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results by custom_id, without what depends on when they were computed."""
    read = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {result["custom_id"]: result for result in read}
    assert len(by_id) == len(read)
    for result in read:
        body = result["response"]["body"]
        body.pop("created", None)
        body.get("usage", {}).pop("prompt_tokens_details", None)
    return by_id


@pytest.mark.slow
def test_a_cut_run_goes_on_with_the_same_answers(run: Any, tmp_path: Path) -> None:
    source, whole, cut = write_input(tmp_path / "in.jsonl", 8), tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    flags = ("-i", str(source), "storyteller")
    said = "8 lines have their results, 2 of them failed\n"
    assert run("batch", *flags, "-o", str(whole))[:2] == (0, said)
    text = whole.read_bytes()
    cut.write_bytes(text[: len(text) // 2])
    assert run("batch", *flags, "-o", str(cut))[:2] == (0, said)
    assert results(cut) == results(whole)
    assert [r["response"]["status_code"] for r in results(cut).values()].count(400) == 2
    with source.open("a") as file:
        file.write("{}\n")
    status, _, error = run("batch", *flags, "-o", str(cut))
    assert (status, "another input file or another model" in error) == (1, True)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_answers(run: Any, tmp_path: Path) -> None:
    source, whole, killed = write_input(tmp_path / "in.jsonl", 200), tmp_path / "whole.jsonl", tmp_path / "k.jsonl"
    flags = ("-i", str(source), "storyteller")
    assert run("batch", *flags, "-o", str(whole))[0] == 0
    code = "from gptserve.server.cli.main import main; main()"
    for least in (20, 90):
        with subprocess.Popen([sys.executable, "-c", code, "batch", *flags, "-o", str(killed)]) as process:
            while not killed.exists() or killed.read_bytes().count(b"\n") < least:
                assert process.poll() is None
            process.send_signal(signal.SIGKILL)
    assert run("batch", *flags, "-o", str(killed))[0] == 0
    assert results(killed) == results(whole)


def test_an_absent_input_makes_no_output(run: Any, tmp_path: Path) -> None:
    status, _, error = run("batch", "-i", str(tmp_path / "absent"), "-o", str(tmp_path / "out"))
    assert (status, "No such file" in error) == (1, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_lines_whose_choices_fill_the_queue_wait_for_one_another(run: Any, tmp_path: Path) -> None:
    source, wide, narrow = write_input(tmp_path / "in.jsonl", 24), tmp_path / "wide.jsonl", tmp_path / "narrow.jsonl"
    flags = ("-i", str(source), "storyteller")
    said = "24 lines have their results, 6 of them failed\n"
    assert run("batch", *flags, "-o", str(wide))[:2] == (0, said)
    assert run("batch", *flags, "-o", str(narrow), "--max-num-seqs", "2", "--max-num-queued-reqs", "0")[:2] == (0, said)
    assert results(narrow) == results(wide)


@pytest.mark.slow
def test_a_line_that_kills_engines_fails_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = ({"custom_id": f"line {i}", "method": "POST", "url": "/v1/completions"} for i in range(8))
    prompts = (list(POISON) if i == 3 else "Once" for i in range(8))
    bodies = ({"prompt": prompt, "max_tokens": 50, "ignore_eos": True} for prompt in prompts)
    pairs = zip(lines, bodies, strict=True)
    source.write_text("".join(f"{json.dumps({**line, 'body': body})}\n" for line, body in pairs))
    flags = ("batch", "-i", str(source), "-o", str(target), "storyteller")
    said = subprocess.run([sys.executable, "-c", MORTAL, *flags], capture_output=True, text=True, check=False).stdout
    assert said == "8 lines have their results, 1 of them failed\n"
    error = results(target).pop("line 3")["response"]
    assert (error["status_code"], error["body"]["error"]["code"]) == (500, "generation_failed")
