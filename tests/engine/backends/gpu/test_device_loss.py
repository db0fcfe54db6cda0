"""After an error of a GPU something slower takes its place, or the load ends: a lost context is stood in for by calls
that raise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gptserve.engine.backends.gpu import attention as triton_paged
from gptserve.engine.backends.gpu.recorded_steps import failure
from gptserve.engine.backends.gpu.sampler import TritonSampler
from gptserve.engine.backends.gpu.selfcheck import operations as operations_choice
from gptserve.engine.backends.gpu.selfcheck.operations import agreeing_kernels
from gptserve.engine.backends.gpu.selfcheck.sampler import agreeing_sampler
from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import EngineStartError
from gptserve.engine.model.attention import AttentionSpec
from gptserve.engine.model.operations import TORCH
from gptserve.engine.runner.attention_choice import choose_backend
from gptserve.weights.families import load_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ERROR = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with more to know more.")
FAILED = "failed with AcceleratorError: CUDA error: an illegal memory access was encountered"


def fail(*arguments: object) -> TritonSampler:
    raise ERROR


class FakeTriton:
    """Stands in for TritonAttention and TritonOperations."""

    is_available = staticmethod(lambda: True)

    def __init__(self, **options: object) -> None:
        fail()


WITHOUT_TRITON = "device 'cpu', or an environment without Triton,"
CHECKS: dict[str, tuple[Callable[[Path], object], object, str]] = {
    "attention's Triton kernel": (
        lambda folder: (
            choose_backend(EngineConfig(folder), CUDA, torch.float32, [AttentionSpec(4, 2, 16, 0.25)], 64).name
        ),
        *("reference", "attention_backend 'reference'"),
    ),
    "the Triton kernel 'normalize'": (
        lambda folder: agreeing_kernels(load_config(folder), CPU, torch.float32),
        *(TORCH, WITHOUT_TRITON),
    ),
    "a Triton kernel of sampling": (lambda folder: agreeing_sampler(fail, 300, CPU), None, WITHOUT_TRITON),
    "a CUDA graph": (lambda folder: failure(ERROR), f"they failed with AcceleratorError: {ERROR}", "enforce_eager"),
}
"""By what failed: a check in which it does, what that returns if the GPU computes on, and what avoids it if not."""


@pytest.fixture
def synchronize(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Stand in for a GPU: each wait for it raises the next of these errors, if one is left."""
    monkeypatch.setattr(triton_paged, "TritonAttention", FakeTriton)
    monkeypatch.setattr(operations_choice, "TritonOperations", FakeTriton)
    errors: list[Exception] = []

    def wait() -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    return errors


@pytest.mark.parametrize("failed", CHECKS)
def test_where_the_gpu_computes_on_something_slower_takes_the_place(
    failed: str, synchronize: list[Exception], tiny_gpt2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check, instead, _ = CHECKS[failed]
    assert check(tiny_gpt2) == instead
    assert {record.levelname for record in caplog.records} == ({"WARNING"} if failed != "a CUDA graph" else set())
    assert all(FAILED in message for message in caplog.messages)


@pytest.mark.parametrize("failed", CHECKS)
def test_a_lost_gpu_ends_the_load_with_what_avoids_it(
    failed: str, synchronize: list[Exception], tiny_gpt2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check, _, remedy = CHECKS[failed]
    synchronize += 10 * [ERROR]
    with pytest.raises(EngineStartError) as ended:
        check(tiny_gpt2)
    assert str(ended.value) == f"the GPU cannot go on since {failed} {FAILED}; {remedy} avoids that"
    assert ended.value.__cause__ is ERROR
    assert not caplog.messages


def test_an_error_that_comes_once_more_loses_nothing(synchronize: list[Exception]) -> None:
    synchronize.append(ERROR)
    assert failure(ERROR) == f"they failed with AcceleratorError: {ERROR}"


def test_without_a_gpu_there_is_none_to_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert failure(ERROR).startswith("they failed")
