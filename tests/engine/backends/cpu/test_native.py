"""The team of threads: every chunk once, whoever calls, whatever else runs; and the library that has it."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import inspect
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gptserve.engine.backends.cpu import attention, draw, native
from gptserve.engine.backends.cpu import program as programs
from gptserve.engine.backends.cpu.linear import NativeLinear

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not native.is_available(),
    reason="reads /proc, or the library is not built",
)

LIMIT_S = 60
SHARED = 38, "b2b6b2bfedba1acd"
"""The library's version, and the digest of what it has in common with Python, as `in_common` gives it."""
SPINNING = "import os\nwhile os.getppid() == {parent}: pass"

Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""A function that native_parallel calls; here it is Python's."""


@pytest.fixture(autouse=True)
def _no_threads_before_or_after() -> Iterator[None]:
    assert all_end()
    yield
    native.set_num_threads(1)
    assert all_end()


@pytest.fixture
def _two_cpus() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")


def all_end() -> bool:
    """Stop the team; return whether its threads are gone. The system shows a thread for a moment after its end."""
    stopped, deadline = native.stop(), time.monotonic() + LIMIT_S
    while team_threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    return stopped and not team_threads()


def team_threads() -> set[int]:
    """Return the threads of the team, by number."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # another thread may end meanwhile
            if (task / "comm").read_text().strip() == "gptserve-team":
                found.add(int(task.name))
    return found


def parallel(function: Callable[[], None], num_threads: int) -> None:
    native.library().native_parallel(Function(lambda _: function()), None, num_threads)


def linear_and_rows(num_out: int = 96) -> tuple[NativeLinear, torch.Tensor, torch.Tensor]:
    """Return a linear of several chunks, an input and its output."""
    linear, x = NativeLinear(torch.randn(num_out, 768).bfloat16(), None), torch.randn(40, 768).bfloat16()
    return linear, x, linear(x)


@pytest.mark.slow
def test_a_product_is_cut_into_no_more_chunks_than_the_team_counts() -> None:
    """Of 512 passes of 24 rows, which would be 65,536 chunks of two panels: one more than the team counts."""
    num_in, num_out, num_rows = 4416, 255 * native.COLUMNS, 512 * 24
    linear, x = NativeLinear(torch.randn(num_out, num_in).bfloat16(), None), torch.randn(num_rows, num_in).bfloat16()
    native.set_num_threads(2)
    y = linear(x)
    for rows in (slice(0, 5), slice(num_rows - 30, num_rows)):
        assert torch.equal(y[rows], linear(x[rows]))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_a_function_is_called_once_for_each_thread_that_was_asked_for(num_threads: int) -> None:
    callers: list[int] = []
    parallel(lambda: callers.append(threading.get_native_id()), num_threads)
    assert len(callers) == num_threads
    assert set(callers) <= {threading.get_native_id(), *team_threads()}


def test_threads_that_are_free_help() -> None:
    everyone_is_here = threading.Barrier(3)
    parallel(everyone_is_here.wait, 3)
    assert len(team_threads()) == 2


def test_the_caller_waits_for_no_thread_without_a_chunk() -> None:
    """The first call takes all work; the others, which come late, find none."""
    work, done = iter(range(1000)), list[int]()
    parallel(lambda: done.extend(work), 8)
    assert done == list(range(1000))


def test_threads_start_when_they_are_needed_and_stay() -> None:
    assert team_threads() == set()
    parallel(lambda: None, 2)
    first = team_threads()
    parallel(lambda: None, 4)
    assert len(first) == 1
    assert len(team_threads()) == 3
    assert first < team_threads()
    parallel(lambda: None, 2)
    assert len(team_threads()) == 3


def test_no_more_threads_help_than_were_asked_for() -> None:
    parallel(lambda: None, 6)
    for _ in range(50):
        helpers: set[int] = set()
        parallel(lambda helpers=helpers: helpers.add(threading.get_native_id()), 2)
        assert len(helpers) <= 2


def test_the_setting_is_the_callers_own() -> None:
    native.set_num_threads(5)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(native.num_threads).result() == 1
    assert native.num_threads() == 5


def test_a_call_within_a_call_computes_alone() -> None:
    inner: list[int] = []
    parallel(lambda: parallel(lambda: inner.append(threading.get_native_id()), 3), 2)
    assert len(inner) == 6


def test_threads_that_call_at_once_get_their_own_results() -> None:
    made = [linear_and_rows(num_out) for num_out in (96, 200, 320, 1000)]

    def compute(i: int) -> bool:
        native.set_num_threads(3)
        linear, x, y = made[i]
        return all(torch.equal(linear(x), y) for _ in range(300))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(compute, range(4), timeout=LIMIT_S))


@pytest.mark.parametrize("num_threads", [2, 3, 16])
def test_many_tiny_jobs_lose_and_repeat_nothing(num_threads: int) -> None:
    linear, x, y = linear_and_rows()
    native.set_num_threads(num_threads)
    for _ in range(3000):
        assert torch.equal(linear(x[:1]), y[:1])
    counts: Counter[int] = Counter()
    for i in range(2000):
        parallel(lambda i=i: counts.update([i]), 4)
    assert set(counts.values()) == {4}


def test_jobs_go_on_after_the_threads_have_slept() -> None:
    linear, x, y = linear_and_rows()
    native.set_num_threads(3)
    for _ in range(20):
        threading.Event().wait(0.002)  # longer than they spin
        assert torch.equal(linear(x), y)


def test_threads_end_and_start_again() -> None:
    linear, x, y = linear_and_rows()
    native.set_num_threads(4)
    for _ in range(100):
        assert torch.equal(linear(x), y)
        assert all_end()


def test_a_team_at_work_is_not_stopped() -> None:
    stopped: list[bool] = []
    parallel(lambda: stopped.append(native.stop()), 2)
    assert stopped == [False, False]


@pytest.mark.usefixtures("_two_cpus")
def test_a_thread_in_a_chunk_gets_the_cpu_of_the_caller_that_waits_for_it() -> None:
    caller, both_are_here, pulled_to = threading.get_native_id(), threading.Barrier(2), set[int]()

    def chunk() -> None:
        both_are_here.wait(LIMIT_S)
        deadline = time.monotonic() + LIMIT_S
        while threading.get_native_id() != caller and len(os.sched_getaffinity(0)) > 1 and time.monotonic() < deadline:
            pass
        if threading.get_native_id() != caller:
            pulled_to.update(os.sched_getaffinity(0))

    before = os.sched_getaffinity(0)
    parallel(chunk, 2)
    assert len(pulled_to) == 1
    (worker,) = team_threads()
    assert os.sched_getaffinity(worker) == before, "afterwards it may run where it might"


@pytest.mark.usefixtures("_two_cpus")
def test_threads_stay_on_the_cpus_that_they_are_kept_to() -> None:
    linear, x, y = linear_and_rows()
    native.set_num_threads(2)
    linear(x)
    (worker,), everywhere, deadline = team_threads(), os.sched_getaffinity(0), time.monotonic() + LIMIT_S
    stat = Path(f"/proc/self/task/{worker}/stat")
    while stat.read_text().rsplit(")", 1)[1].split()[0] != "S":  # it may be on its way back to all CPUs
        assert time.monotonic() < deadline, "a thread without work does not sleep"
    kept_to = {min(everywhere)}
    try:
        os.sched_setaffinity(0, kept_to)  # this thread
        os.sched_setaffinity(worker, kept_to)
        assert all(torch.equal(linear(x), y) for _ in range(300))
        assert os.sched_getaffinity(worker) == kept_to
    finally:
        os.sched_setaffinity(0, everywhere)


@pytest.mark.slow
def test_beside_busy_processes_the_results_are_the_same() -> None:
    linear, x, y = linear_and_rows(1000)
    native.set_num_threads(3)
    command = [sys.executable, "-c", SPINNING.format(parent=os.getpid())]
    busy = [subprocess.Popen(command) for _ in range(3)]
    try:
        for _ in range(300):
            assert torch.equal(linear(x), y)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    everywhere, deadline = os.sched_getaffinity(0), time.monotonic() + LIMIT_S
    while any(os.sched_getaffinity(thread) != everywhere for thread in team_threads()):  # it is about to step back
        assert time.monotonic() < deadline, "a thread is kept from CPUs for good"


@pytest.mark.slow
def test_a_process_that_forks_computes_on_both_sides() -> None:
    code = """
import os, torch
from tests.engine.backends.cpu.test_native import linear_and_rows, native
linear, x, y = linear_and_rows()
native.set_num_threads(3)
assert torch.equal(linear(x), y)
child = os.fork()
assert torch.equal(linear(x), y)
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=Path(__file__).parents[4], timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0


def test_without_the_library_there_is_no_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_spec", lambda module: None)
    assert native._load() is None
    assert native.supported_variants.__wrapped__(16) == ()


def test_the_fastest_variant_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Intel's CPUs AVX512-BF16, which comes after plain AVX-512, is slower than it."""
    library = SimpleNamespace(
        native_has_variant=lambda bits, variant: variant in (1, 2, 3, 4), native_fastest_variant=lambda bits: 3
    )
    monkeypatch.setattr(native, "_load", lambda: library)
    assert native.supported_variants.__wrapped__(16) == ("generic", "avx2", "avx512_bf16", "avx512")
    library.native_fastest_variant = lambda bits: 4
    assert native.supported_variants.__wrapped__(16) == ("generic", "avx2", "avx512", "avx512_bf16")


def test_a_cpu_may_lack_a_variant_before_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As AMD's Zen 4 has AVX512-VNNI but no AVX-VNNI."""
    library = SimpleNamespace(
        native_has_variant=lambda bits, variant: variant in (1, 2, 4), native_fastest_variant=lambda bits: 4
    )
    monkeypatch.setattr(native, "_load", lambda: library)
    assert native.supported_variants.__wrapped__(native.CODED_VARIANTS) == ("generic", "avx2", "avx512_vnni")


def test_the_variants_of_codes_are_those_that_the_cpu_has() -> None:
    """But for AMX, which the system may withhold."""
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    needs: dict[native.Variant, str] = {
        "generic": "",
        "avx2": "avx2 fma",
        "avx_vnni": "avx2 fma avx_vnni",
        "avx512_vnni": "avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni",
    }
    unlisted = {"amx"} if "avx_vnni" in flags else {"amx", "avx_vnni"}  # old kernels do not know that name
    found = [variant for variant in native.supported_variants(native.CODED_VARIANTS) if variant not in unlisted]
    assert found == [variant for variant, needed in needs.items() if flags >= set(needed.split())]


def test_a_library_of_another_version_is_told_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "ABI", native.ABI + 1)
    assert native._load() is None
    assert f"its version is {native.ABI - 1}, not {native.ABI}: install the package again" in caplog.text


def test_a_version_is_of_one_set_of_numbers_functions_and_structures() -> None:
    """Else a library that was built before would take one operation for another, and compute something else."""
    digest = hashlib.sha256("\n".join(in_common()).encode()).hexdigest()[:16]
    assert (native.ABI, digest) == SHARED, "raise native.ABI and native_abi() of linear.cpp, then set both here"


def in_common() -> list[str]:
    """Return lines that say what Python and the library both have: orders, arguments and members."""
    orders = (programs.KINDS, programs.HEAD_GATES, native.ACTIVATIONS, native.CODE_FORMATS, native.BLOCK_TYPES)
    functions = [
        f"{name} {[getattr(its, '__name__', None) for its in types]}" for name, types in native.FUNCTIONS.items()
    ]
    structures = [
        f"{name} {[(member, kind.__name__) for member, kind in its._fields_]}"
        for module in (native, programs, attention, draw)
        for name, its in inspect.getmembers(module, inspect.isclass)
        if issubclass(its, ctypes.Structure) and its.__module__ == module.__name__
    ]
    return [*map(repr, orders), *functions, *structures]
