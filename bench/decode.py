"""Decode throughput of the engine compared with transformers' generate, in one run on one machine.

    python -m bench.decode [--batch 1 8 32] [--prompt-len 128] [--max-tokens 128] [--shape gpt2] [--repeats 3]

The weights are random, of the real shape. Each request has its own random prompt, so that no prefix is shared. Both
sides produce exactly max_tokens greedy tokens per sequence in the same dtype. A run is prefill and decode together. The
two take turns, and the medians are compared. Prints a table and one JSON line.
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

from bench.engines import seconds
from bench.machine import cpu_name, versions
from bench.models import SHAPES, write_model
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine


def main() -> None:
    args = parse_arguments()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, args.dtype)
    with tempfile.TemporaryDirectory() as folder:
        reference = write_model(Path(folder), args.shape).to(device, dtype)
        engine = Engine(
            EngineConfig(model_dir=Path(folder), device=device.type, dtype=args.dtype, enable_prefix_caching=False)
        )
    rows = [measure(engine, reference, batch, args) for batch in args.batch]
    print(f"{'batch':>5} {'gptserve tok/s':>15} {'transformers tok/s':>19} {'ratio':>6}")
    for row in rows:
        print(f"{row['batch']:>5} {row['gptserve']:>15.1f} {row['transformers']:>19.1f} {row['ratio']:>6.2f}")
    print(json.dumps({"benchmark": "decode", **describe(engine, device, args), "rows": rows}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def measure(engine: Engine, reference: Any, batch: int, args: argparse.Namespace) -> dict[str, float]:
    """Let both sides take turns and return the median tokens per second of each."""
    ours, theirs = [], []
    for repeat in range(args.repeats + 1):
        generator = torch.Generator().manual_seed(repeat)
        prompts = torch.randint(engine.info.vocab_size, (batch, args.prompt_len), generator=generator)
        ours_s = seconds(engine, prompts.tolist(), args.max_tokens, temperature=0.0)
        theirs_s = time_transformers(reference, prompts, args.max_tokens)
        if repeat:  # the first round warms up both
            ours.append(batch * args.max_tokens / ours_s)
            theirs.append(batch * args.max_tokens / theirs_s)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return {
        "batch": batch,
        "gptserve": statistics.median(ours),
        "transformers": statistics.median(theirs),
        "ratio": ratio,
    }


def time_transformers(model: Any, prompts: torch.Tensor, max_tokens: int) -> float:
    prompts = prompts.to(model.device)
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    assert output.cpu().shape[1] == prompts.shape[1] + max_tokens
    return time.perf_counter() - start


def describe(engine: Engine, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    import transformers

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {
        "shape": args.shape,
        "prompt_len": args.prompt_len,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "dtype": engine.info.dtype,
        "attention_backend": engine.info.attention_backend,
        "transformers": transformers.__version__,
        **versions(),
        "device": name,
    }


if __name__ == "__main__":
    main()
