"""A StepEngine without a model, for tests of the loop and its clients; a spawned child imports it by name.

Token i of a request is (seed + i) % 90; a request whose prompt begins with one of the ids below makes it misbehave, at
once or, if the second id is not 0, when it has that many tokens. As Scheduler does, it computes the first suspect
alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import time
from collections.abc import Container
from typing import Any, Literal

from gptserve.engine.blame import CLEARING_STEPS
from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.info import EngineInfo
from gptserve.engine.process.loop import Report
from gptserve.engine.request import FinishReason, Request, TokenOutput
from gptserve.engine.scheduling.block_map import BlockMap
from gptserve.engine.stats import EngineStats
from gptserve.weights.errors import InvalidConfigError

REFUSE, FAIL, RAISE, WAIT, HANG, EXIT, KILL, KILL_DECODING = range(90, 98)

INFO = EngineInfo(
    vocab_size=100,
    max_model_len=100_000,
    eos_token_ids=(),
    device="none",
    dtype="none",
    attention_backend="none",
    product="torch",
    block_size=16,
    num_blocks=100,
    kv_cache_bytes=2**20,
    max_num_seqs=2_000,
    max_num_queued_reqs=0,
    fingerprint="fake",
    batch_invariant=True,
)


class FakeStepEngine:
    """gate is a FIFO: a step over WAIT, like a load that waits, reads one byte of it before it goes on.

    tally, if there is one, is the file whose neighbour counts the steps that hang (see `count_hang`).
    """

    def __init__(self, info: EngineInfo, gate: str, step_s: float, tally: str = "") -> None:
        self.info = info
        self._gate = gate
        self._step_s = step_s
        self._tally = tally
        self._requests: dict[str, Request] = {}
        self._num_done: dict[str, int] = {}
        self._num_steps = 0

    @property
    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._requests), num_steps=self._num_steps)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        if request.prompt_token_ids[0] == REFUSE:
            raise InvalidRequestError("prompt begins with the refused id", param="prompt")
        assert request.request_id not in self._requests
        self._requests[request.request_id] = request
        self._num_done[request.request_id] = len(request.generated_token_ids)

    def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._num_done.pop(request_id, None)

    def draw_blocks(self) -> BlockMap:
        return BlockMap(1, str(len(self._requests)))

    def step(self) -> list[TokenOutput]:
        time.sleep(self._step_s)  # the time a model would take
        self._num_steps += 1
        requests = list(self._requests.values())
        suspects = sorted(filter(self._is_suspect, requests), key=lambda request: request.priority)
        return [self._advance(request) for request in suspects[:1] or requests]

    def _is_suspect(self, request: Request) -> bool:
        num_outputs = self._num_done[request.request_id] - len(request.generated_token_ids)
        return num_outputs < CLEARING_STEPS and request.blame.is_suspect

    def _advance(self, request: Request) -> TokenOutput:
        what, when, *_ = (*request.prompt_token_ids, 0)
        if what == KILL_DECODING:
            when, what = len(request.generated_token_ids) + 1, KILL
        if self._num_done[request.request_id] >= when and self._misbehave(what):
            self.abort(request.request_id)
            return TokenOutput(request.request_id, (), finish_reason=FinishReason.ERROR, error="told to fail")
        num_done = self._num_done[request.request_id]
        token_ids = (token(request, num_done),)
        if num_done + 1 == request.params.max_tokens:
            self.abort(request.request_id)
            return TokenOutput(request.request_id, token_ids, finish_reason=FinishReason.LENGTH)
        self._num_done[request.request_id] += 1
        return TokenOutput(request.request_id, token_ids)

    def _misbehave(self, what: int) -> bool:
        if what == RAISE:
            raise ValueError("told to raise\nand to say so in two lines")
        if what == WAIT:
            wait(self._gate)
        if what == HANG:
            os.write(1, b"hangs\n")
            count_hang(self._tally)
            ctypes.PyDLL(None).pause()  # PyDLL keeps the interpreter locked, as a stuck extension would
        if what == EXIT:
            os._exit(7)
        if what == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        return what == FAIL


def token(request: Request, index: int) -> int:
    return (request.seed + index) % 90


def wait(gate: str) -> None:
    with open(gate, "rb") as fifo:
        fifo.read(1)


def count(tally: str) -> int:
    with open(tally, "ab") as file:
        file.write(b".")
    return os.path.getsize(tally)


def count_hang(tally: str) -> None:
    if tally:
        count(f"{tally}.hangs")


def num_hangs(tally: str) -> int:
    """Return how many steps hung in the engines that share this tally."""
    path = f"{tally}.hangs"
    return os.path.getsize(path) if os.path.exists(path) else 0


class UnpickledSlowly:
    """A factory whose imports take until the gate opens; it says when they begin."""

    def __init__(self, gate: str) -> None:
        self._gate = gate

    def __call__(self, *, report: Report) -> FakeStepEngine:
        return load(report=report)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_slowly, (self._gate,)


def _unpickle_slowly(gate: str) -> UnpickledSlowly:
    os.write(1, b"imports\n")
    wait(gate)
    return UnpickledSlowly(gate)


Loading = Literal["succeeds", "reports", "waits", "waits after the first", "refuses", "raises", "is killed"]


def load(
    gate: str = "",
    loading: Loading = "succeeds",
    step_s: float = 0.0005,
    tally: str = "",
    failing_loads: Container[int] = (),
    changed_loads: Container[int] = (),
    cramped_loads: Container[int] = (),
    roomy_loads: Container[int] = (),
    report: Report | None = None,
    **info: int,
) -> FakeStepEngine:
    """Load an engine; `tally` is a file that counts the loads, so that those of some numbers, from 1, can be chosen."""
    number = count(tally) if tally else 0
    if number in failing_loads:
        raise InvalidConfigError(f"load {number} was told to fail")
    if number in changed_loads:
        return FakeStepEngine(dataclasses.replace(INFO, fingerprint="changed"), gate, step_s, tally)
    if number in cramped_loads:
        return FakeStepEngine(dataclasses.replace(INFO, max_model_len=INFO.max_model_len - 1), gate, step_s, tally)
    if number in roomy_loads:
        more = {"max_model_len": 2 * INFO.max_model_len, "num_blocks": 2 * INFO.num_blocks}
        return FakeStepEngine(dataclasses.replace(INFO, **more), gate, step_s, tally)  # type: ignore[arg-type]
    if report is not None and loading == "reports":
        report(1, 4)
    if loading == "waits" or (loading == "waits after the first" and number > 1):
        wait(gate)
    if loading == "refuses":
        raise InvalidConfigError("config.json: n_layer must be at least 1, got 0")
    if loading == "raises":
        raise ZeroDivisionError("told to raise")
    if loading == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return FakeStepEngine(dataclasses.replace(INFO, **info), gate, step_s, tally)
