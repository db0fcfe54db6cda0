"""Foreign code cannot last, grow or crash to anybody's harm but its own, and no worker is left behind.

The foreign code is Python here: `eval` opens it, and what it opens evaluates the texts that tests call it with.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from socket import SO_RCVTIMEO, SO_SNDTIMEO, SOL_SOCKET, socket
from typing import Any

import psutil
import pytest

from gptserve.weights.confinement import available
from gptserve.weights.workers import (
    ENVIRONMENT,
    NUM_WORKERS,
    CannotOpenError,
    ForeignCodeError,
    Limits,
    WorkerDiedError,
    Workers,
    _timeval,
)

EVALUATE = "lambda code: str(eval(code))"
PID = "__import__('os').getpid()"
ENDLESS = "[0 for _ in iter(int, 1) if False]"
MakeWorkers = Callable[..., Workers]


@pytest.fixture
def make() -> Iterator[MakeWorkers]:
    made = []

    def make(source: str = EVALUATE, readable: tuple[Path, ...] = (), **limits: float) -> Workers:
        made.append(Workers("builtins:eval", source, Limits(**limits), readable))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for workers in made:
        workers.close()


def pid_of(workers: Workers) -> int:
    return int(str(workers.call(code=PID)))


def wait_until_gone(pid: int) -> None:
    if psutil.pid_exists(pid):
        psutil.Process(pid).wait(60)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("source", "request_", "reply"),
    [
        ("lambda text: text[::-1]", {"text": "é\ud800\n"}, "\n\ud800é"),
        ("lambda n: [n, 2**32 - 1]", {"n": 3}, [3, 2**32 - 1]),
        ("lambda: []", {}, []),
        ("lambda: ''", {}, ""),
        ("lambda value: str(value)", {"value": {"a": [1.5, None, True]}}, "{'a': [1.5, None, True]}"),
    ],
)
def test_a_reply_is_text_or_token_ids(
    make: MakeWorkers, source: str, request_: dict[str, object], reply: object
) -> None:
    assert make(source).call(**request_) == reply


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (ENDLESS, "it took more than 1 s of CPU time"),
        pytest.param("sum(range(10**13))", "it took more than 1 s of CPU time", marks=pytest.mark.slow),
        ("'a' * 2**31", "it needed more than 512 MiB of memory"),
        pytest.param("'a'.ljust(2000000000)", "it needed more than 512 MiB of memory", marks=pytest.mark.slow),
        ("__import__('os').abort()", "it needed more than 512 MiB of memory"),  # as Rust does without memory
    ],
)
def test_a_call_that_passes_a_limit_ends_with_its_worker(make: MakeWorkers, code: str, cause: str) -> None:
    workers = make(cpu_s=1)
    before = pid_of(workers)
    with pytest.raises(ForeignCodeError) as caught:
        workers.call(code=code)
    assert str(caught.value) == cause
    assert pid_of(workers) != before
    assert not psutil.pid_exists(before)


@pytest.mark.slow
def test_each_call_has_its_own_time(make: MakeWorkers) -> None:
    clock = "__import__('time').process_time()"
    workers = make(
        f"lambda: str(next({PID} for start in [{clock}] for _ in iter(int, 1) if {clock} > start + 0.7))", cpu_s=1
    )
    assert len({workers.call() for _ in range(4)}) == 1


def test_a_reply_is_bounded(make: MakeWorkers) -> None:
    workers = make(reply_bytes=2**20)
    before = pid_of(workers)
    assert len(str(workers.call(code="'a' * 2**20"))) == 2**20
    with pytest.raises(ForeignCodeError, match=r"^it made more than 1 MiB$"):
        workers.call(code="'a' * (2**20 + 1)")
    assert pid_of(workers) == before


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("exec('raise SystemExit(3)')", "SystemExit: 3"),
        ("exec('raise BaseException(\"panicked\")')", "BaseException: panicked"),
        ("(_ for _ in ()).throw(KeyboardInterrupt())", "KeyboardInterrupt: "),
    ],
)
def test_an_exception_of_any_kind_is_told_and_the_worker_lives(make: MakeWorkers, code: str, cause: str) -> None:
    workers = make()
    before = pid_of(workers)
    with pytest.raises(ForeignCodeError) as caught:
        workers.call(code=code)
    assert str(caught.value) == cause
    assert pid_of(workers) == before


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("__import__('os')._exit(7)", "its process ended with status 7"),
        ("__import__('ctypes').string_at(0)", "its process ended by signal 11 (Segmentation fault)"),
    ],
)
def test_a_worker_that_dies_is_replaced(make: MakeWorkers, code: str, cause: str) -> None:
    workers = make()
    with pytest.raises(WorkerDiedError) as caught:
        workers.call(code=code)
    assert str(caught.value) == cause
    assert workers.call(code="6 * 7") == "42"


def test_a_worker_that_died_while_idle_is_noticed(make: MakeWorkers) -> None:
    workers = make()
    before = pid_of(workers)
    os.kill(before, signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    assert pid_of(workers) != before


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        pytest.param(ENDLESS, "it took more than 1 s of CPU time", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_opened_is_tried_once(
    make: MakeWorkers, monkeypatch: pytest.MonkeyPatch, source: str, cause: str
) -> None:
    started, start = list[Any](), subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: started.append(1) or start(*args, **options))
    workers = make(source, open_cpu_s=1)
    for attempt in (workers.open, workers.call, workers.call):
        with pytest.raises(CannotOpenError) as caught:
            attempt()
        assert str(caught.value) == cause
    assert len(started) == 1


def test_slow_calls_hold_up_no_other_until_all_workers_are_busy(make: MakeWorkers, tmp_path: Path) -> None:
    workers, gates = make(readable=(tmp_path,)), [tmp_path / str(number) for number in range(NUM_WORKERS)]
    for gate in gates:
        os.mkfifo(gate)
    with ThreadPoolExecutor(NUM_WORKERS + 1) as pool:
        slow = [pool.submit(workers.call, code=f"open({str(gate)!r}).read()") for gate in gates[1:]]
        assert workers.call(code="6 * 7") == "42"
        slow.append(pool.submit(workers.call, code=f"open({str(gates[0])!r}).read()"))
        writers = [gate.open("w") for gate in gates]  # which waits for all of them to read
        waiting = pool.submit(workers.call, code="6 * 7")
        assert len(psutil.Process().children()) >= NUM_WORKERS
        assert not waiting.done()
        writers[0].close()
        assert waiting.result(60) == "42"
        for writer in writers:
            writer.close()
        assert [call.result(60) for call in slow] == [""] * NUM_WORKERS


def test_few_calls_need_few_workers(make: MakeWorkers) -> None:
    workers = make()
    assert len({pid_of(workers) for _ in range(20)}) == 1


def test_closing_ends_busy_and_idle_workers_and_refuses_calls(make: MakeWorkers, tmp_path: Path) -> None:
    others = set(psutil.Process().children())
    workers, gate = make(readable=(tmp_path,)), tmp_path / "gate"
    os.mkfifo(gate)
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(workers.call, code=f"str({PID}) + open({str(gate)!r}).read()")
        with gate.open("w"):
            idle = pid_of(workers)
            pids = {child.pid for child in set(psutil.Process().children()) - others}
            workers.close()
            with pytest.raises(WorkerDiedError, match=r"signal 9"):
                busy.result(60)
    assert {idle} < pids
    assert not any(map(psutil.pid_exists, pids))
    with pytest.raises(ForeignCodeError, match="the server is shutting down"):
        workers.call(code="1")


def test_workers_end_with_their_last_user() -> None:
    workers = Workers("builtins:eval", EVALUATE, Limits())
    pid = pid_of(workers)
    del workers
    assert not psutil.pid_exists(pid)


def test_workers_end_with_their_caller() -> None:
    code = (
        "import sys; from gptserve.weights.workers import Limits, Workers\n"
        f"workers = Workers('builtins:eval', {EVALUATE!r}, Limits())\n"
        f"print(workers.call(code={PID!r}), flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stderr == ""
    wait_until_gone(int(done.stdout))


def test_a_worker_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    for name in ("json", "subprocess", "socket", "jinja2"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)")
    code = (
        "from gptserve.weights.chat.template import ChatTemplate\n"
        "print(ChatTemplate('{{ messages[0].content }}', {}).render([{'content': 'Hi'}], {}))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("Hi\n", "")


def test_signals_of_a_terminal_and_a_service_manager_are_for_the_server(make: MakeWorkers) -> None:
    workers = make()
    pid = pid_of(workers)
    assert os.getpgid(pid) != os.getpgrp()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert pid_of(workers) == pid


@pytest.mark.parametrize("is_busy", [True, False])
def test_workers_end_with_a_killed_caller(is_busy: bool, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    busy = f"open({str(gate)!r}).close() or sum(range(10**13))"
    code = (
        "import sys; from gptserve.weights.workers import Limits, Workers\n"
        f"workers = Workers('builtins:eval', {EVALUATE!r}, Limits(cpu_s=10**6), [{str(tmp_path)!r}])\n"
        f"print(workers.call(code={PID!r}), flush=True)\n"
        + (f"workers.call(code={busy!r})" if is_busy else "sys.stdin.read()")
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        if is_busy:
            gate.open("w").close()
        caller.kill()
    wait_until_gone(pid)


def test_a_worker_outlives_the_thread_that_started_it(make: MakeWorkers) -> None:
    workers = make()
    with ThreadPoolExecutor(1) as pool:
        pid = pool.submit(pid_of, workers).result(60)
    assert pid_of(workers) == pid


@pytest.mark.slow
def test_a_worker_has_its_limits_whatever_signals_its_caller_ignores_or_blocks(make: MakeWorkers) -> None:
    workers, ignored = make(cpu_s=1), signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXCPU})
    try:
        workers.open()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGXCPU, ignored)
    with pytest.raises(ForeignCodeError, match="CPU time"):
        workers.call(code=ENDLESS)


def test_a_worker_sees_no_keys_and_the_time_zone_of_its_caller(
    make: MakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GPTSERVE_API_KEY", "HF_TOKEN", "TZ"):
        monkeypatch.setenv(name, "Asia/Kathmandu")
    workers = make()
    entries = str(workers.call(code="open('/proc/self/environ').read()")).split("\0")
    assert "TZ=Asia/Kathmandu" in entries
    assert {entry.partition("=")[0] for entry in entries if entry} <= set(ENVIRONMENT)
    assert workers.call(code="__import__('time').strftime('%z')") == "+0545"


def test_a_worker_writes_no_files_and_opens_few(make: MakeWorkers, tmp_path: Path) -> None:
    workers, path = make(readable=(tmp_path,)), tmp_path / "file"
    with pytest.raises(ForeignCodeError, match=r"File too large|Operation not permitted|Permission denied"):
        workers.call(code=f"open({str(path)!r}, 'w', buffering=1).write('a\\n')")
    assert not path.exists() or path.read_bytes() == b""
    with pytest.raises(ForeignCodeError, match="Too many open files"):
        workers.call(code="[open('/dev/null') for _ in range(64)]")


def test_a_worker_is_confined_unless_it_starts_processes(
    make: MakeWorkers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("secret")
    code = f"open({str(tmp_path / 'file')!r}).read()"
    assert make(starts_threads=True).call(code=code) == make(readable=(tmp_path,)).call(code=code) == "secret"
    if available().landlock:
        with pytest.raises(ForeignCodeError, match=r"^PermissionError: \[Errno 13\] Permission denied"):
            make().call(code=code)
    with caplog.at_level(logging.DEBUG):
        make().open()
    assert f"workers: {available()}" in caplog.messages


@pytest.mark.parametrize("code", ["os.fork() or os._exit(0)", "threading.Thread(target=print).start()"])
def test_a_worker_starts_no_processes_or_threads_unless_it_is_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (tmp_path / "nobody.py").write_text(
        "import os, threading\nif os.geteuid() == 0:\n    os.setuid(65534)\n"
        "def open_it(code):\n    return lambda: str(eval(code))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)  # type: ignore[no-untyped-call]
    with (
        closing(Workers("nobody:open_it", code, Limits())) as workers,
        pytest.raises(ForeignCodeError, match=r"temporarily unavailable|Operation not permitted|can't start new"),
    ):
        workers.call()
    with closing(Workers("nobody:open_it", code, Limits(starts_threads=True))) as workers:
        workers.call()


def test_a_call_for_which_the_system_has_no_process_leaves_nothing_behind(make: MakeWorkers) -> None:
    workers, limit = make(), resource.getrlimit(resource.RLIMIT_NOFILE)
    before, num_failures = os.listdir("/proc/self/fd"), 0
    least = os.dup(0)  # the first free descriptor: others above it may be taken
    os.close(least)
    for most in range(least, max(map(int, before)) + 20):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limit[1]))
        try:
            workers.open()
            break
        except OSError:
            num_failures += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert os.listdir("/proc/self/fd") == before
    assert num_failures > NUM_WORKERS
    assert workers.call(code="6 * 7") == "42"


FILES = """{
    os.readlink(link).partition(':')[0]: int(number) for os in [__import__('os')]
    for number in os.listdir('/proc/self/fd') for link in [f'/proc/self/fd/{number}'] if os.path.exists(link)
}"""
SLEEP = "__import__('time').sleep(3600)"
STOP = "__import__('os').kill(__import__('os').getpid(), __import__('signal').SIGSTOP)"


def hurry(workers: Workers) -> None:
    """Let an open worker take no longer than a moment for the next call, whatever the limit was when it was opened."""
    (worker,) = workers._all
    with socket(fileno=os.dup(worker._socket.fileno())) as ours:
        for option in (SO_SNDTIMEO, SO_RCVTIMEO):
            ours.setsockopt(SOL_SOCKET, option, _timeval(0.1))


@pytest.mark.parametrize(
    "code",
    [pytest.param(SLEEP, marks=pytest.mark.slow), STOP, f"__import__('os').write({{}}, b'ab') and {STOP}"],
)
def test_a_worker_that_stands_still_in_a_call_or_a_reply_is_ended(make: MakeWorkers, code: str) -> None:
    workers = make()
    files = literal_eval(str(workers.call(code=FILES)))
    hurry(workers)
    with pytest.raises(WorkerDiedError, match=r"^it took longer than 120 s$"):
        workers.call(code=code.format(files["socket"]))
    assert workers.call(code="6 * 7") == "42"


def test_a_worker_that_reads_no_request_is_ended(make: MakeWorkers) -> None:
    workers = make()
    os.kill(pid_of(workers), signal.SIGSTOP)
    hurry(workers)
    with pytest.raises(WorkerDiedError, match=r"^it took longer than 120 s$"):
        workers.call(code=" " * 2**22)
    assert workers.call(code="6 * 7") == "42"


def test_a_worker_that_stands_still_while_it_opens_is_tried_again(make: MakeWorkers) -> None:
    workers = make(SLEEP, wait_s=0.1)
    for _ in range(2):
        with pytest.raises(WorkerDiedError, match=r"^it took longer than 0\.1 s$"):
            workers.open()


def test_a_worker_is_small_and_holds_nothing_of_its_caller(make: MakeWorkers, tmp_path: Path) -> None:
    heavy = "[name for name in ('torch', 'numpy', 'jinja2', 'tokenizers') if name in __import__('sys').modules]"
    first, second = make(), make()
    with (tmp_path / "open").open("w"):
        for workers in (first, second):
            assert literal_eval(str(workers.call(code=FILES))).keys() == {"pipe", "/dev/null", "socket"}
            assert workers.call(code=heavy) == "[]"
