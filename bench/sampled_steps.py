"""The time of a decode step with each kind of sampling, compared with a greedy one.

    python -m bench.sampled_steps [--batch 1 8 32] [--prompt-len 128] [--max-tokens 256] [--shape gpt2]

The weights are random, of the real shape, in bf16. Each kind has an engine of its own, and the engines take turns step
by step, so other work on the machine disturbs all alike. Prints the median steps and the speed as a share of that of
greedy as a table, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.machine import versions
from bench.models import SHAPES, write_model
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.request import Request, SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "5 logprobs": {"temperature": 0.0, "logprobs": 5},
}
NUM_WARM_UP = 5  # steps of each engine


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.shape)
        options = {"device": "cpu", "dtype": "bfloat16", "kv_cache_bytes": 2**29, "enable_prefix_caching": False}
        engines = {kind: Engine(EngineConfig(model_dir=Path(folder), **options)) for kind in KINDS}
    print(f"{'batch':>5} {'kind':<16} {'step ms':>8} {'of greedy':>10}")
    rows = [row for batch in args.batch for row in measure(engines, batch, args)]
    print(json.dumps({"benchmark": "sampled_steps", **vars(args), **versions(), "rows": rows}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    return parser.parse_args()


def measure(engines: dict[str, Engine], batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Let the engines take turns, and print and return a row of each."""
    for kind, engine in engines.items():
        sampling = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True, **KINDS[kind])
        for i in range(batch):
            generator = torch.Generator().manual_seed(i)
            prompt = torch.randint(engine.info.vocab_size, (args.prompt_len,), generator=generator)
            engine.add(Request(str(i), tuple(prompt.tolist()), sampling, seed=i))
    seconds: dict[str, list[float]] = {kind: [] for kind in engines}
    while any(engine.has_work for engine in engines.values()):
        for kind, engine in engines.items():
            start = time.perf_counter()
            num_outputs = len(engine.step()) if engine.has_work else 0
            if num_outputs == batch:  # the prompts may take several steps
                seconds[kind].append(time.perf_counter() - start)
    step_ms = {kind: 1e3 * statistics.median(times[NUM_WARM_UP:]) for kind, times in seconds.items()}
    rows = []
    for kind, ms in step_ms.items():
        rows.append({"batch": batch, "kind": kind, "step_ms": ms, "of_greedy": step_ms["greedy"] / ms})
        print(f"{batch:>5} {kind:<16} {ms:>8.2f} {rows[-1]['of_greedy']:>10.3f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
