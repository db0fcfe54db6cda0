"""How much code one streamed completion runs: README.md and docs/dev/architecture.md state what is counted here.

The application and the engine run in this process, so that their threads can be traced. Counted are the lines of
gptserve that a completion runs after another one has run before it. What runs in C++, in libraries and in the HTTP
server's own protocol is not among them.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from gptserve.engine.process.factory import load_engine
from gptserve.engine.process.thread_client import ThreadClient
from tests.engine.client_harness import LIMIT_S, started
from tests.engine.runs import make_config
from tests.server.app_options import make_app
from tests.server.fake_engine import ByteTokenizer

ROOT = Path(__file__).parents[2]
PACKAGES = ("server", "engine", "weights")
BODY = {"prompt": "Once", "max_tokens": 3, "temperature": 0.8, "seed": 1, "stream": True}


class Trace:
    """Notes each line of the three packages that runs while `is_on`, in any thread begun within it."""

    def __init__(self) -> None:
        self.is_on = False
        self.lines: set[tuple[str, int]] = set()

    def __enter__(self) -> Trace:
        self._before = sys.gettrace(), threading.gettrace()
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before[0])
        threading.settrace(self._before[1])  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        file = frame.f_code.co_filename.removeprefix(f"{ROOT}/").removeprefix("gptserve/")
        return partial(self._line, file) if file.startswith(tuple(f"{name}/" for name in PACKAGES)) else None

    def _line(self, file: str, frame: FrameType, event: str, argument: object) -> Any:
        if self.is_on and event == "line":
            self.lines.add((file, frame.f_lineno))
        return partial(self._line, file)


def trace_a_completion(folder: Path) -> set[tuple[str, int]]:
    """Return file and number of every line that the second of two streamed completions runs."""

    async def converse(trace: Trace) -> None:
        async with started(ThreadClient(partial(load_engine, make_config(folder)))) as engine:
            app = make_app(engine, ByteTokenizer(), "model")
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                assert "[DONE]" in (await client.post("/v1/completions", json=BODY)).text
                trace.is_on = True
                assert "[DONE]" in (await client.post("/v1/completions", json=BODY)).text
                trace.is_on = False

    with Trace() as trace:
        asyncio.run(asyncio.wait_for(converse(trace), LIMIT_S))
    return trace.lines


def stated(page: str, pattern: str) -> list[int]:
    """Return the numbers that a page states in the one sentence of this pattern."""
    [numbers] = re.findall(pattern, " ".join((ROOT / page).read_text(encoding="utf-8").split()))
    return [int(number.replace(",", "")) for number in numbers]


def test_the_pages_state_how_much_a_streamed_completion_runs(make_gpt2: Any) -> None:
    lines = trace_a_completion(make_gpt2(vocab_size=256))
    files = {file for file, _ in lines}

    assert {"server/api/completions.py", "server/completions/sse.py", "engine/scheduling/scheduler.py"} <= files
    assert "server/tools/grammar.py" not in files, "negative control: a completion without tools"
    pattern = r"runs under ([\d,]+) lines of Python in under ([\d,]+) files"
    for page in ("README.md", "docs/dev/architecture.md"):
        max_lines, max_files = stated(page, pattern)
        assert 0.8 * max_lines < len(lines) < max_lines, len(lines)
        assert 0.8 * max_files < len(files) < max_files, len(files)
