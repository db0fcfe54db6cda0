from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from bench.step_parts import PARTS, split, timed_steps
from gptserve.engine.backends.cpu.program import KINDS
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine


@pytest.fixture(scope="module")
def engine(tiny_gpt2: Path) -> Engine:
    engine = Engine(EngineConfig(tiny_gpt2, device="cpu", dtype="bfloat16", num_threads=1, kv_cache_bytes=2**24))
    if engine._runner._decoder.program is None:
        pytest.skip("this CPU runs no programs")
    return engine


def test_each_operation_is_in_one_part(engine: Engine) -> None:
    native = engine._runner._decoder.program
    assert native is not None
    parts = split(native._step)
    assert sum(len(part._operations) for part in parts.values()) == len(native._step._operations)
    assert all(part._operations for part in parts.values())
    assert [KINDS[operation.kind] for operation in parts["head"]._operations] == ["take", "linear"]


def test_the_times_of_a_step_without_those_of_its_parts_alone_are_the_step(engine: Engine) -> None:
    steps = timed_steps(engine, 2, Namespace(prompt_len=3, max_tokens=4, temperature=0.8))
    assert len(steps) >= 2
    for step in steps:
        assert {*PARTS, "program", "draw"} <= set(step)
        assert step["program"] + step["draw"] + step["rest"] == pytest.approx(step["step"])
        assert 0 < step["rest"] < step["step"]
