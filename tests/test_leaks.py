"""The check that ends every run of the suite sees what is left, and names it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.leaks import freeze, holdings, wait_until_gone

ROOT = Path(__file__).parents[1]
LIMIT_S = 60
LEAKY = """
import threading

def test_that_passes_and_leaves_a_thread():
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()
"""


SHORT = "import tests.leaks, pytest, sys; tests.leaks.LIMIT_S = 0.1; sys.exit(pytest.main(sys.argv[1:]))"
MARKED = """
import pytest

@pytest.mark.{mark}
def test_that_passes():
    pass
"""
OPENING = """
import os, pytest, sys, tests.leaks

tests.leaks.open_gpu, tests.leaks.LIMIT_S = lambda: print("opened", os.pipe()), 0.1
sys.exit(pytest.main(sys.argv[1:]))
"""


@contextmanager
def thread() -> Iterator[None]:
    end = threading.Event()
    held = threading.Thread(target=end.wait, name="kind-thread")
    held.start()
    yield
    end.set()
    held.join()


@contextmanager
def process() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input('kind-process')"], stdin=subprocess.PIPE, stdout=-3) as held:
        yield
        held.kill()


@contextmanager
def descriptor() -> Iterator[None]:
    with Path(__file__).open() as held:
        yield
        assert held.fileno()


@contextmanager
def task() -> Iterator[None]:
    async def kind_task() -> None:
        await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    held = loop.create_task(kind_task())
    yield
    held.cancel()
    loop.run_until_complete(asyncio.wait([held]))
    loop.close()


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("hold", "name"),
    [(thread, "kind-thread"), (process, "kind-process"), (descriptor, "test_leaks.py"), (task, "kind_task")],
)
def test_what_is_held_is_named_until_it_is_gone(hold: Callable[[], AbstractContextManager[None]], name: str) -> None:
    before = holdings()
    with hold():
        assert [held for held in holdings() - before if name in held]

    assert wait_until_gone(before) == []


@pytest.mark.slow
def test_a_task_that_is_there_when_modules_are_passed_by_is_found() -> None:
    before = holdings()
    with task():
        freeze()
        assert [held for held in holdings() - before if "kind_task" in held]


def run_tests(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder by a script that may change this check."""
    plugins = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-s")
    command = [sys.executable, "-c", script, *plugins, *arguments, "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)


def test_a_run_that_leaves_a_thread_behind_fails(tmp_path: Path) -> None:
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    done = run_tests(tmp_path, SHORT)

    assert done.returncode == 1
    assert "1 passed, 1 error" in done.stdout
    assert "leave behind: ['thread " in done.stdout
    assert "forgotten" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("mark", "times"), [("gpu", 1), ("triton", 1), ("slow", 0)])
def test_what_cuda_keeps_open_is_no_leak_of_tests_that_use_it(mark: str, times: int, tmp_path: Path) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED.format(mark=mark))
    done = run_tests(tmp_path, OPENING, "-m", mark)

    assert done.returncode == 0, done.stdout
    assert done.stdout.count("opened") == times
