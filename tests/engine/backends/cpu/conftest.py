"""CpuAttention with each kind of instructions that this CPU has, and the number of threads of its products."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.attention import INSTRUCTIONS, CpuAttention, Instructions


@pytest.fixture(params=INSTRUCTIONS)
def backend(request: pytest.FixtureRequest) -> CpuAttention:
    instructions: Instructions = request.param
    if instructions not in CpuAttention.supported_instructions():
        pytest.skip(f"this CPU has no {instructions}")
    return CpuAttention(instructions)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """One thread unless a test sets more: on a busy machine each tiny parallel call waits for the scheduler."""
    before = torch.get_num_threads()

    def set_both(num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        native.set_num_threads(num_threads)

    set_both(1)
    yield set_both
    torch.set_num_threads(before)
    native.set_num_threads(1)
