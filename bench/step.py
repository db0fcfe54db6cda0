"""The time of a decode step by programs of engine/backends/cpu, compared with torch running its operations one by one.

    python -m bench.step [--batch 1 8 32] [--prompt-len 128] [--max-tokens 200] [--shape gpt2]

The weights are random, of the real shape, in bf16. The two take turns step by step in one engine, as they compute the
same numbers up to rounding, so other work on the machine disturbs both alike. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bench.machine import versions
from bench.models import SHAPES, write_model
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.request import Request, SamplingParams


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.shape)
        options = {"device": "cpu", "dtype": "bfloat16", "kv_cache_bytes": 2**30}
        engine = Engine(EngineConfig(model_dir=Path(folder), enable_prefix_caching=False, **options))
    rows = [measure(engine, batch, args.prompt_len, args.max_tokens) for batch in args.batch]
    print(f"{'batch':>5} {'program ms':>11} {'torch ms':>9} {'ratio':>6}")
    for row in rows:
        print(f"{row['batch']:>5} {row['program_ms']:>11.2f} {row['torch_ms']:>9.2f} {row['ratio']:>6.2f}")
    print(json.dumps({"benchmark": "step", "shape": args.shape, **versions(), "rows": rows}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    return parser.parse_args()


def measure(engine: Engine, batch: int, prompt_len: int, max_tokens: int) -> dict[str, float]:
    """Let programs and torch take turns, and return the median milliseconds of a step of each."""
    runner, programs = engine._runner, engine._runner._programs
    assert programs is not None, "no program computes this model here"
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    for i in range(batch):
        prompt = torch.randint(engine.info.vocab_size, (prompt_len,), generator=torch.Generator().manual_seed(i))
        engine.add(Request(str(i), tuple(prompt.tolist()), sampling, seed=0))
    by_program, by_torch = list[float](), list[float]()
    while engine.has_work:
        is_program = len(by_program) <= len(by_torch)
        runner._programs = programs if is_program else None
        start = time.perf_counter()
        num_outputs = len(engine.step())
        if num_outputs == batch:  # the prompts may take several steps
            (by_program if is_program else by_torch).append(1e3 * (time.perf_counter() - start))
    runner._programs = programs
    program_ms, torch_ms = statistics.median(by_program[5:]), statistics.median(by_torch[5:])  # the first ones warm up
    return {"batch": batch, "program_ms": program_ms, "torch_ms": torch_ms, "ratio": torch_ms / program_ms}


if __name__ == "__main__":
    main()
