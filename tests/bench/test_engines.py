from __future__ import annotations

from pathlib import Path

from bench.engines import timing
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine


def test_full_steps_are_a_part_of_the_whole_time(tiny_gpt2: Path) -> None:
    engine = Engine(EngineConfig(tiny_gpt2, device="cpu", num_threads=1, kv_cache_bytes=2**24))
    found = timing(engine, [[1, 2], [3], [4, 5, 6]], 4, temperature=0.0)

    assert found.step_seconds is not None
    assert found.num_preemptions == 0
    assert 0 < 3 * found.step_seconds < found.seconds  # the first of the four steps reads the prompts


def test_without_full_steps_there_is_no_time_of_one(tiny_gpt2: Path) -> None:
    engine = Engine(EngineConfig(tiny_gpt2, device="cpu", num_threads=1, kv_cache_bytes=2**24))

    assert timing(engine, [[1, 2]], 1, temperature=0.0).step_seconds is None


def test_steps_beside_a_sequence_that_is_computed_anew_have_no_time(tiny_gpt2: Path) -> None:
    engine = Engine(EngineConfig(tiny_gpt2, device="cpu", num_threads=1, num_blocks=8))
    for _ in range(2):  # the second run counts its own preemptions alone
        found = timing(engine, [[1] * 30, [2] * 30, [3] * 30], 20, temperature=0.0)

        assert found.num_preemptions > 0
        assert found.step_seconds is None
    assert timing(engine, [[4]], 20, temperature=0.0).num_preemptions == 0
