from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from bench.step_parts import split, timed_steps
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine


@pytest.fixture(scope="module")
def engine(tiny_gpt2: Path) -> Engine:
    engine = Engine(EngineConfig(tiny_gpt2, device="cpu", dtype="bfloat16", num_threads=1, kv_cache_bytes=2**24))
    if engine._runner._decoder._native is None:
        pytest.skip("this CPU runs no programs")
    return engine


def test_each_operation_is_in_one_part(engine: Engine) -> None:
    native = engine._runner._decoder._native
    assert native is not None
    for program in (native._layers, native._head):
        parts = split(program)
        assert sum(len(part._operations) for part in parts.values()) == len(program._operations)
        assert all(part._operations for part in parts.values())


def test_the_times_of_a_step_without_those_of_its_parts_alone_are_the_step(engine: Engine) -> None:
    steps = timed_steps(engine, 2, Namespace(prompt_len=3, max_tokens=4, temperature=0.8))
    assert len(steps) >= 2
    for step in steps:
        assert {"layers: products", "layers: attention", "head: products", "draw"} <= set(step)
        assert step["layers"] + step["head"] + step["draw"] + step["rest"] == pytest.approx(step["step"])
        assert 0 < step["rest"] < step["step"]
