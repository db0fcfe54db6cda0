"""Where the time of a decode step goes, part by part, beside the time that memory takes to read what the part reads.

    python -m bench.step_parts [--batch 1 32] [--prompt-len 128] [--max-tokens 256] [--quantization int8]

The weights are random, of the real shape, in bf16, and the engine runs programs (backends/cpu/program.py). Before each
step, the operations of each part run alone, on the buffers that the step then computes anew; the program as a whole and
the draw are timed within the step. What remains of the step is what runs between these two: Python, and scheduling.
Medians over all steps in which all sequences decode. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.floor import Reader
from bench.machine import versions
from bench.models import SHAPES, write_model
from gptserve.engine.backends.cpu.program import KINDS, Program
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.runner import program_steps
from gptserve.engine.runner.memory import kv_bytes_per_token, weight_bytes
from gptserve.weights.config import ModelConfig

PARTS = ("products", "attention", "norms", "other rows", "head")
NUM_WARM_UP = 5  # steps

Times = dict[str, float]
"""Seconds of one step by part."""


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), args.shape)
        options = {"device": "cpu", "dtype": "bfloat16", "kv_cache_bytes": 2**29, "enable_prefix_caching": False}
        engine = Engine(EngineConfig(model_dir=Path(name), quantization=args.quantization, **options))
    rows = [row for batch in args.batch for row in measure(engine, batch, args)]
    print(json.dumps({"benchmark": "step_parts", **vars(args), **versions(), "rows": rows}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    return parser.parse_args()


def measure(engine: Engine, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print and return a row of each part at this number of sequences."""
    if not (steps := timed_steps(engine, batch, args)[NUM_WARM_UP:]):
        raise SystemExit("too few steps had all sequences decoding: raise --max-tokens")
    model = engine._runner._model
    floors = floor_bytes(model, args.quantization, batch, args.prompt_len + args.max_tokens // 2)
    bandwidth = Reader(sum(floors.values()), torch.device("cpu")).bytes_per_second()
    rows = []
    print(f"{'batch':>5} {'part':<20} {'ms':>8} {'floor ms':>9}")
    for part in steps[0]:
        ms = 1e3 * statistics.median(step[part] for step in steps)
        floor_ms = 1e3 * floors[part] / bandwidth if part in floors else None
        rows.append({"batch": batch, "part": part, "ms": ms, "floor_ms": floor_ms})
        print(f"{batch:>5} {part:<20} {ms:>8.2f} {'' if floor_ms is None else format(floor_ms, '.2f'):>9}")
    return rows


def timed_steps(engine: Engine, batch: int, args: argparse.Namespace) -> list[Times]:
    """Return the times of each step in which so many sequences all decode, the whole last."""
    sampling = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True, temperature=args.temperature)
    for i in range(batch):
        prompt = torch.randint(engine.info.vocab_size, (args.prompt_len,), generator=torch.Generator().manual_seed(i))
        engine.add(Request(str(i), tuple(prompt.tolist()), sampling, seed=i))
    decoder = engine._runner._decoder.program
    assert decoder is not None, "no program computes this model here"
    steps = []
    times: Times = defaultdict(float)

    def timed(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed_run(*args: Any) -> Any:
            start = time.perf_counter()
            result = run(*args)
            times[name] += time.perf_counter() - start
            return result

        return timed_run

    runs = [timed(part, only.run) for part, only in split(decoder._step).items()]
    runs.append(timed("program", decoder._step.run))

    def run(*args: Any) -> None:
        for run_part in runs:
            run_part(*args)

    with (
        patch.object(decoder._step, "run", run),
        patch.object(program_steps, "draw", timed("draw", program_steps.draw)),
    ):
        while engine.has_work:
            times.clear()
            start = time.perf_counter()
            num_outputs = len(engine.step())
            seconds = time.perf_counter() - start
            if num_outputs == batch:  # the prompts may take several steps
                steps.append(with_the_rest(times, seconds))
    return steps


def split(program: Program) -> dict[str, Program]:
    """Return the parts of a program that have operations, as programs over the same buffers."""
    # The head has fewer rows than the rest in a step with prompts: those that are taken.
    names = {"linear": "products", "attend": "attention", "norm": "norms", "take": "head"}
    logits = program.number("logits")
    of_operations = [
        "head" if operation.target == logits else names.get(KINDS[operation.kind], "other rows")
        for operation in program._operations
    ]
    found = {}
    for part in PARTS:
        only = copy.copy(program)
        only.__dict__.pop("_program", None)
        only._operations = [
            operation for operation, its in zip(program._operations, of_operations, strict=True) if its == part
        ]
        if only._operations:
            found[part] = only
    return found


def with_the_rest(times: Times, seconds: float) -> Times:
    """Return the times of a step that took `seconds` with its parts alone: what remains, and the whole without them."""
    whole = seconds - sum(time for name, time in times.items() if name in PARTS)
    return {**times, "rest": whole - times["program"] - times["draw"], "step": whole}


def floor_bytes(model: ModelConfig, quantization: str | None, batch: int, context: int) -> dict[str, int]:
    """Return how many bytes the parts must read that read weights, or keys and values."""
    dtype = torch.bfloat16
    sizes = weight_bytes(model, dtype.itemsize, quantization)
    head = sizes["head"] or sizes["embedding"]
    layers = sum(sizes.values()) - sizes["head"] - sizes["embedding"] - sizes["position"]
    return {
        "products": layers,
        "attention": batch * context * kv_bytes_per_token(model, dtype.itemsize),
        "head": head,
    }


if __name__ == "__main__":
    main()
