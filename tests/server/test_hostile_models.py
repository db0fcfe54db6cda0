"""A server whose model means harm: what its template and its regex do is told to who asked, and harms nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.serving import MAIN, ROOT, Process

TEMPLATE = """\
{% set asked = messages[0].content %}
{% if asked == 'slow' %}{{ messages | map(attribute='content') | list }}{{ (messages | length + 8) ** 99999999 }}
{% elif asked == 'large' %}{{ asked.ljust(2000000000) }}
{% else %}{{ asked }}{% endif %}"""
REGEX = {"type": "Split", "pattern": {"Regex": "(a+)+$| ?[^ ]+"}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """The embedded model with a template and a tokenizer of its own, and modules named as Python's."""
    for path in (ROOT / "weights" / "storyteller").iterdir():
        if path.is_file():
            (tmp_path / path.name).symlink_to(path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [REGEX, BYTES]}
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("json", "multiprocessing", "socket", "subprocess"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)")
    return tmp_path


@pytest.fixture
def process(hostile: Path) -> Iterator[Process]:
    within = f"import os, sys; sys.path[0] = {str(ROOT)!r}; os.chdir({str(hostile)!r}); "
    process = Process(str(hostile), main=within + MAIN)
    yield process
    process.kill()


@pytest.mark.slow
def test_what_a_model_does_is_told_and_harms_nobody_else(process: Process) -> None:
    with process.wait_until_ready() as client, ThreadPoolExecutor(8) as pool:

        def chat(content: str) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            return client.post("/v1/chat/completions", json=body)

        def complete(prompt: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
            return client.post(path, json={"prompt": prompt, **fields})

        slow, large = pool.submit(chat, "slow"), pool.submit(chat, "large")
        fine = [pool.submit(chat, "Once"), pool.submit(complete, "Once upon a time", max_tokens=2)]
        fine.append(pool.submit(complete, "Once upon", "/tokenize"))
        text = "a" * 60 + "!"
        endless = {
            "prompt": pool.submit(complete, text),
            "prompt ": pool.submit(complete, text, "/tokenize"),
            "messages": pool.submit(chat, text),
            "bad_words": pool.submit(complete, "Once", bad_words=[text]),
        }

        for answer in fine:
            assert answer.result().status_code == 200, answer.result().text
        told = "the chat template refuses this conversation: it "
        check(slow.result(), "invalid_chat_template_input", told + "took more than 5 s of CPU time")
        check(large.result(), "invalid_chat_template_input", told + "needed more than 512 MiB of memory")
        for name, answer in endless.items():
            field = name.strip()
            check(answer.result(), "invalid_value", f"{field}: text cannot be encoded: text has no tokens: ", field)
        assert chat("Once").status_code == 200
        assert "gptserve.weights.workers" in str(
            [child.cmdline() for child in psutil.Process(process.popen.pid).children()]
        )
    process.popen.terminate()
    status, log = process.wait()  # which sees that no worker is left
    assert (status, "Traceback" in log, "panicked" in log) == (0, False, False)
    for answer in endless.values():
        assert answer.result().headers["x-request-id"] in log


def check(response: httpx.Response, code: str, message: str, param: str = "messages") -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert error["message"].startswith(message)
