"""The share of the time of decoding in which the GPU computes nothing, and that in which it waits for the host.

    python -m bench.idle [--shape gpt2] [--batch 1 32 128] [--steps 200] [--no-overlap]

torch's profiler records when each kernel and each copy began and ended. What lies between the first begin and the last
end and is covered by none is idle. A pause of more than GRAPH_PAUSE_US is one for the host, as the kernels of a CUDA
graph follow each other sooner. Profiling takes time of the host, so without it the shares are hardly larger. Needs a
CUDA device. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.machine import tell, versions
from bench.models import SHAPES, served_model
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.request import Request, SamplingParams
from gptserve.weights.families import load_config

GRAPH_PAUSE_US = 5.0
"""Kernels of a graph follow each other after some 1 us."""
PROMPT_LEN = 128
FIRST_STEPS = 20  # after the prompts: what is made at the first steps of a batch size is made then
MAX_TOKENS = 850  # none ends, and the longest fits into GPT-2's context


def main() -> None:
    args = parse_arguments()
    rows = []
    with served_model(args.shape, args.models) as folder:
        vocab_size = load_config(folder).vocab_size
        config = EngineConfig(
            model_dir=folder,
            device="cuda",
            dtype="bfloat16",
            kv_cache_bytes=args.kv_cache_bytes,
            max_num_seqs=max(args.batch),
            overlap=not args.no_overlap,
        )
        engine = Engine(config)
        print(f"{'batch':>5} {'step ms':>8} {'idle':>6} {'waiting':>8}")
        for batch in args.batch:
            intervals = profiled(engine, batch, args.steps, vocab_size)
            span = max(end for _, end in intervals) - min(begin for begin, _ in intervals)
            found = pauses(intervals)
            idle, waiting = sum(found), sum(pause for pause in found if pause > GRAPH_PAUSE_US)
            row = {"batch": batch, "step_ms": span / 1e3 / args.steps, "idle": idle / span, "waiting": waiting / span}
            rows.append(row)
            print(f"{batch:>5} {row['step_ms']:>8.3f} {row['idle']:>6.3f} {row['waiting']:>8.3f}", flush=True)
    options = {name: value for name, value in vars(args).items() if name not in ("models", "output")}
    tell({"benchmark": "idle", **options, **versions("cuda"), "rows": rows}, args.output)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--kv-cache-bytes", type=int, default=2**34)
    parser.add_argument("--no-overlap", action="store_true", help="plan no step while the GPU computes another")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models written")
    parser.add_argument("--output", type=Path, help="a file for the line of JSON")
    return parser.parse_args()


def profiled(engine: Engine, batch: int, num_steps: int, vocab_size: int) -> list[tuple[float, float]]:
    """Return when each kernel began and ended, in us, in so many steps of so many sequences that all decode."""
    params = SamplingParams(temperature=0.8, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = torch.randint(vocab_size, (batch, PROMPT_LEN)).tolist()
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), tuple(prompt), params, seed=i))
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {output.request_id for output in engine.step()}
    for _ in range(FIRST_STEPS):
        engine.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            assert all(output.finish_reason is None for output in engine.step()), "too many steps for the context"
    for i in range(batch):
        engine.abort(str(i))
    events = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    assert events, "torch's profiler has recorded nothing of the GPU"
    return [(event.time_range.start, event.time_range.end) for event in events]


def pauses(intervals: Iterable[tuple[float, float]]) -> list[float]:
    """Return how long each pause lasts that none of these intervals covers, between the first and the last."""
    found, until = list[float](), float("inf")
    for begin, end in sorted(intervals):
        if begin > until:
            found.append(begin - until)
        until = end if until == float("inf") else max(until, end)
    return found


if __name__ == "__main__":
    main()
