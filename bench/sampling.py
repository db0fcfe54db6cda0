"""Choosing tokens: compiled code compared with torch for each kind of sampling.

    python -m bench.sampling [--rows 1 8 32] [--vocab-size 50257] [--threads 2] [--repeats 15]

Both choose from the same logits, in turns, and must choose the same tokens but for a draw in some millions that falls
between their roundings. Prints the medians as a table and one JSON line with the CPU's name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bench.machine import versions
from gptserve.engine import native
from gptserve.engine.sampling.native_draw import Choice, choose
from gptserve.engine.sampling.sampler import choose_by_torch

KINDS = {
    "greedy": Choice(),
    "temperature 0.8": Choice(temperature=0.8),
    "top_p 0.9": Choice(temperature=0.8, top_p=0.9),
    "top_k 50": Choice(temperature=0.8, top_k=50),
}


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    native.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    rows = []
    print(f"{'rows':>5} {'kind':<16} {'compiled ms':>12} {'torch ms':>9} {'ratio':>6} {'equal':>6}")
    with torch.inference_mode():
        for num_rows in args.rows:
            logits = 3 * torch.randn(num_rows, args.vocab_size, generator=generator)
            for kind, choice in KINDS.items():
                noise = torch.rand(num_rows, generator=generator).tolist()
                choices = [choice if choice == Choice() else choice._replace(noise=u) for u in noise]
                compiled, chosen = median_ms(choose, logits, choices, args.repeats)
                by_torch, expected = median_ms(choose_by_torch, logits, choices, args.repeats)
                equal = int((chosen == expected).sum())
                print(
                    f"{num_rows:>5} {kind:<16} {compiled:>12.2f} {by_torch:>9.2f} {by_torch / compiled:>6.1f} "
                    f"{equal:>3}/{num_rows}"
                )
                rows.append({"rows": num_rows, "kind": kind, "compiled_ms": compiled, "torch_ms": by_torch})
    print(json.dumps({"benchmark": "sampling", **vars(args), "results": rows, **versions()}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab-size", type=int, default=50_257)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


def median_ms(
    side: Callable[[Tensor, list[Choice]], Tensor], logits: Tensor, choices: list[Choice], repeats: int
) -> tuple[float, Tensor]:
    """Return the median time of a call, without the first, and its tokens."""
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        token_ids = side(logits, choices)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:]), token_ids


if __name__ == "__main__":
    main()
