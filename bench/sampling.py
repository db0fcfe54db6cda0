"""Sampling: compiled code compared with torch, and each kind of sampling with greedy.

    python -m bench.sampling [--rows 1 8 32] [--vocab-size 50257] [--context 256] [--scale 3] [--threads 2]

The kinds take turns, first compiled and then in torch, whose threads would spin in the way. Both sides choose from the
same logits, after the same tokens, and must choose the same tokens but for a draw in some millions that falls between
their roundings. The times are those of the whole `sample`, with what Python does for it. Prints the medians as a table
and one JSON line with the CPU's name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from bench.machine import versions
from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.draw import choose
from gptserve.engine.backends.reference.draw import choose_by_torch
from gptserve.engine.request import SamplingParams
from gptserve.engine.runner.sampler import sample
from gptserve.engine.sampling.choice import SamplingPosition, SamplingState

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "repetition": {"repetition_penalty": 1.1},
    "frequency, presence": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "300 biased tokens": {"logit_bias": dict.fromkeys(range(0, 3000, 10), 1.0)},
    "300 allowed tokens": {"allowed_token_ids": tuple(range(0, 3000, 10))},
    "banned end of text": {"min_tokens": 100},
}
SIDES = {"compiled": choose, "torch": choose_by_torch}


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    native.set_num_threads(args.threads)
    print(f"{'rows':>5} {'kind':<20} {'compiled ms':>12} {'over greedy':>12} {'torch ms':>9} {'ratio':>6} {'equal':>6}")
    rows = [row for num_rows in args.rows for row in measure(num_rows, args)]
    print(json.dumps({"benchmark": "sampling", **vars(args), "results": rows, **versions()}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab-size", type=int, default=50_257)
    parser.add_argument("--context", type=int, default=256, help="tokens before, of which half are the prompt")
    parser.add_argument("--scale", type=float, default=3.0, help="standard deviation of the logits")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


@torch.inference_mode()
def measure(num_rows: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print and return the medians of each kind, without the first turn."""
    generator = torch.Generator().manual_seed(0)
    logits = args.scale * torch.randn(num_rows, args.vocab_size, generator=generator)
    contexts: list[list[int]] = torch.randint(args.vocab_size, (num_rows, args.context), generator=generator).tolist()
    positions = {
        kind: [position_of(i, ids, params) for i, ids in enumerate(contexts)] for kind, params in KINDS.items()
    }
    times: dict[tuple[str, str], list[float]] = {(kind, side): [] for side in SIDES for kind in KINDS}
    for side in SIDES:
        for _ in range(1 + args.repeats):
            for kind in KINDS:
                times[kind, side].append(milliseconds(logits, positions[kind], side))
    medians = {key: statistics.median(its_times[1:]) for key, its_times in times.items()}
    rows = []
    for kind, its_positions in positions.items():
        compiled, by_torch = medians[kind, "compiled"], medians[kind, "torch"]
        over = compiled - medians["greedy", "compiled"]
        tokens = [sample(logits, its_positions, (args.vocab_size - 1,), choose).token_ids for choose in SIDES.values()]
        equal = sum(a == b for a, b in zip(*tokens, strict=True))
        print(
            f"{num_rows:>5} {kind:<20} {compiled:>12.3f} {over:>12.3f} {by_torch:>9.2f} {by_torch / compiled:>6.1f} "
            f"{equal:>3}/{num_rows}"
        )
        rows.append({"rows": num_rows, "kind": kind, "compiled_ms": compiled, "torch_ms": by_torch})
    return rows


def position_of(index: int, token_ids: list[int], params: dict[str, Any]) -> SamplingPosition:
    sampling = SamplingParams(**{"max_tokens": len(token_ids), "temperature": 0.0, **params})
    return SamplingPosition(SamplingState(sampling, index, num_prompt_tokens=len(token_ids) // 2), token_ids)


def milliseconds(logits: Tensor, positions: list[SamplingPosition], side: str) -> float:
    start = time.perf_counter()
    sample(logits, positions, (logits.shape[1] - 1,), SIDES[side])
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
