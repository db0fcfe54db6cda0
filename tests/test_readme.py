"""The README is short, and its examples and those for clients do what they say."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.serving import LIMIT_S, Process

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))
MAX_BYTES = 6 * 1024
URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    process = Process()
    with process.wait_until_ready() as client:
        yield str(client.base_url).rstrip("/")
    os.killpg(process.popen.pid, signal.SIGTERM)
    assert process.wait()[0] == 0


def example(page: Path, start: str) -> str:
    """Return the one code block of a page that begins with `start`."""
    blocks = re.findall(r"^```\w+\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    [block] = [block for block in blocks if block.startswith(start)]
    return str(block)


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shape(events: str) -> str:
    """Return a stream's text with what differs from run to run cut out."""
    return re.sub(r'"(id|created|system_fingerprint|seed)":("[^"]*"|\d+)', r'"\1":…', events)


def test_the_readme_is_a_front_page() -> None:
    size = README.stat().st_size
    assert size <= MAX_BYTES, f"README.md has {size} bytes, {MAX_BYTES} are allowed: the rest belongs in docs/"


@pytest.mark.parametrize("command", ["make serve", "make test"])
def test_the_readme_names_the_commands(command: str) -> None:
    assert command in [line.partition("#")[0].strip() for line in example(README, "make serve").splitlines()]


@pytest.mark.slow
def test_no_line_with_curl_needs_a_new_version() -> None:
    commands = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines() if "curl " in line]

    assert len(commands) > 5
    assert [line for line in commands if "--json" in line] == [], "curl knows it since 7.82"


def test_the_example_with_curl(url: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command, _, shown = example(README, "$ curl").removeprefix("$ ").partition("\n")
    silent = command.replace("curl ", "curl -sS ", 1).replace(URL, url)

    assert shape(output_of(["sh", "-c", silent])).strip() == shape(shown).strip()


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, QUICKSTART], ids=["readme", "quickstart"])
def test_the_example_with_openai(page: Path, url: str) -> None:
    assert output_of([sys.executable, "-c", example(page, "from openai").replace(URL, url)]).strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [README, pytest.param(QUICKSTART, marks=pytest.mark.slow)], ids=["readme", "quickstart"]
)
def test_the_example_without_a_server(page: Path) -> None:
    assert output_of([sys.executable, "-c", example(page, "from gptserve import LLM")]).strip()
