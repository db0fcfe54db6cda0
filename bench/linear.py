"""The products of a step: those of engine/backends/cpu compared with oneDNN's, over all weights of a model's shape.

    python -m bench.linear [--shape gpt2] [--dtype bfloat16] [--rows 1 8 32 128 512] [--threads 2]
        [--repeats 7]

Each side has weights of its own, which together exceed the CPU's caches, and multiplies with all of them once a run, as
a step does: the blocks, then the head with at most 32 rows. oneDNN gets two rows for one, and with AMX at most 32 a
call, as without that its bits would depend on the batch. The sides take turns. Prints the medians as a table and one
JSON line with the CPU's name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from bench.machine import versions
from bench.models import GPT2_SHAPES
from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.linear import NativeLinear, PackedLinear
from gptserve.engine.model.linear import Linear

HEAD_ROWS = 32
PAUSE_S = 0.05  # torch's threads spin for a while after their work, in the way of the other side


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    native.set_num_threads(args.threads)
    sides: dict[str, Callable[..., Linear]] = {"onednn": PackedLinear}
    dtype: torch.dtype = getattr(torch, args.dtype)
    for variant in native.supported_variants(8 * dtype.itemsize):
        sides[variant] = lambda weight, bias, variant=variant: NativeLinear(weight, bias, variant=variant)
    shapes, head = weight_shapes(args.shape)
    made = {side: [make(shape, dtype, make_linear) for shape in shapes] for side, make_linear in sides.items()}
    heads = {side: make(head, dtype, make_linear) for side, make_linear in sides.items()}
    rows = []
    with torch.inference_mode():
        for num_rows in args.rows:
            times: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(1 + args.repeats):
                for side in sides:
                    times[side].append(seconds(made[side], shapes, heads[side], head, num_rows, dtype))
            ms = {side: statistics.median(its[1:]) * 1e3 for side, its in times.items()}
            rows.append({"rows": num_rows, "ms": ms, "ratio": {side: ms["onednn"] / ms[side] for side in sides}})
    print(f"{'rows':>5} " + " ".join(f"{side + ' ms':>16} {'ratio':>6}" for side in sides))
    for row in rows:
        print(f"{row['rows']:>5} " + " ".join(f"{row['ms'][s]:>16.1f} {row['ratio'][s]:>6.2f}" for s in sides))
    print(json.dumps({"benchmark": "linear", **vars(args), "rows": rows, **versions()}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=GPT2_SHAPES, default="gpt2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


def weight_shapes(name: str) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Return (in, out) of each weight of the blocks, in order, and of the head."""
    from transformers import GPT2Config

    config = GPT2Config(**GPT2_SHAPES[name])
    hidden = config.n_embd
    block = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    return block * config.n_layer, (hidden, config.vocab_size)


def make(shape: tuple[int, int], dtype: torch.dtype, make_linear: Callable[..., Linear]) -> Linear:
    num_in, num_out = shape
    return make_linear(torch.randn(num_out, num_in).to(dtype), torch.randn(num_out).to(dtype))


def seconds(
    linears: list[Linear],
    shapes: list[tuple[int, int]],
    head: Linear,
    head_shape: tuple[int, int],
    num_rows: int,
    dtype: torch.dtype,
) -> float:
    """Return the time of one pass over all weights."""
    x = {num_in: torch.randn(num_rows, num_in).to(dtype) for num_in, _ in [*shapes, head_shape]}
    time.sleep(PAUSE_S)
    start = time.perf_counter()
    for linear, (num_in, _) in zip(linears, shapes, strict=True):
        linear(x[num_in])
    head(x[head_shape[0]][:HEAD_ROWS])
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
