"""Run every benchmark for GPUs, one after the other, each with a file of results.

    python -m bench.gpu [NAME ...] [--kv-cache-bytes 34359738368] [--results bench/results]

Without names all of BENCHMARKS run. Those of a shape share its model, which is written once, to a temporary folder. One
that fails is named at the end; the others still run, and then the status is 1. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.machine import ROOT

# A prompt of the largest batch takes few of these steps, so most steps only decode.
DECODE = ("bench.decode", "--device", "cuda", "--alone", "--max-tokens", "256", "--max-num-batched-tokens", "8192")
BATCHES = ("--batch", "1", "8", "32", "128", "256")
PREFILL = ("--prefill", "1000")
BENCHMARKS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "gpt2": (*DECODE, *BATCHES, *PREFILL),
        "gpt2-batch-invariant": (*DECODE, "--batch", "1", "32", "256", *PREFILL, "--batch-invariant"),
        "gpt2-enforce-eager": (*DECODE, "--batch", "1", "32", "--enforce-eager"),
        "gpt2-idle": ("bench.idle",),
        "gpt2-http": ("bench.serving", "--streams", "64"),
    },
    "llama-8b": {"llama-8b": (*DECODE, *BATCHES, *PREFILL), "llama-8b-idle": ("bench.idle",)},
    "gpt2-xl": {"gpt2-xl": (*DECODE, *BATCHES, *PREFILL)},
}
"""The module and the arguments of each benchmark, by the shape of its model and its name."""
KV_CACHE_BYTES = 2**35
"""256 sequences of 384 tokens of GPT-2 1.5B take 28 GiB."""
NUM_ENGINES = {"bench.serving": 2}
"""How many engines of a benchmark share the bytes, if several."""


def main() -> int:
    args = parse_arguments()
    failed = []
    for shape, benchmarks in BENCHMARKS.items():
        with tempfile.TemporaryDirectory() as models:
            for name, (module, *arguments) in benchmarks.items():
                if name not in args.names:
                    continue
                cache = ("--kv-cache-bytes", str(args.kv_cache_bytes // NUM_ENGINES.get(module, 1)))
                files = ("--models", models, "--output", str(args.results / f"gpu-{name}.json"))
                print(f"{name}:", *arguments, flush=True)
                start = time.monotonic()
                command = [sys.executable, "-m", module, "--shape", shape, *arguments, *cache, *files]
                if subprocess.run(command, cwd=ROOT).returncode:
                    failed.append(name)
                print(f"{name} took {time.monotonic() - start:.0f} s\n", flush=True)
    if failed:
        print("failed:", *failed, file=sys.stderr)
    return int(bool(failed))


def parse_arguments() -> argparse.Namespace:
    names = [name for benchmarks in BENCHMARKS.values() for name in benchmarks]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="one of: " + ", ".join(names))
    parser.add_argument("--kv-cache-bytes", type=int, default=KV_CACHE_BYTES, help="of all engines at a time")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    if unknown := {*args.names} - {*names}:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    args.names = args.names or names
    return args


if __name__ == "__main__":
    sys.exit(main())
