"""The cost of exactness: decode throughput with all rules and with one of them turned off.

    python -m bench.exactness [--shape gpt2] [--prompt-len 128] [--max-tokens 128] [--repeats 5]

- Where oneDNN multiplies, a single row is padded to two, because it sums a single row in another order (batch 1).
  Elsewhere the two sides are the same.
- The random number of a token is a hash of seed, choice and position, and the token is drawn through a cumulative sum.
  Without the rule torch.multinomial draws it, from a generator's state (batch 1 and 32).

The two sides take turns in one process. Prints the medians and the ratio as a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.engines import seconds
from bench.machine import versions
from bench.models import SHAPES, write_model
from gptserve.engine.backends.reference.draw import Choose
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.model import linear
from gptserve.engine.runner.runner import ModelRunner
from gptserve.engine.sampling.choice import Choice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), args.shape)
        config = EngineConfig(Path(name), enable_prefix_caching=False)
        runner = ModelRunner(config)
        engine = Engine(config, runner=runner)
    rows = []
    padded = linear._MIN_ROWS
    for rule, batch, temperature, min_rows, choose in (
        ("a single row is padded", 1, 0.0, 1, None),
        ("noise belongs to the position", 1, 0.8, padded, drawn_by_torch()),
        ("noise belongs to the position", 32, 0.8, padded, drawn_by_torch()),
    ):
        exact, loose = [], []
        for _ in range(args.repeats + 1):  # the first round warms up
            prompts = torch.randint(engine.info.vocab_size, (batch, args.prompt_len)).tolist()
            num_tokens = batch * args.max_tokens
            linear._MIN_ROWS, runner.choose = padded, None
            exact.append(num_tokens / seconds(engine, prompts, args.max_tokens, temperature=temperature))
            linear._MIN_ROWS, runner.choose = min_rows, choose
            loose.append(num_tokens / seconds(engine, prompts, args.max_tokens, temperature=temperature))
        ratio = statistics.median(a / b for a, b in zip(exact[1:], loose[1:], strict=True))
        rows.append({"rule": rule, "batch": batch, "exact": statistics.median(exact[1:]), "ratio": ratio})
        rows[-1]["without"] = statistics.median(loose[1:])
    print(f"{'rule':32} {'batch':>5} {'with, tok/s':>12} {'without':>10} {'ratio':>6}")
    for row in rows:
        print(f"{row['rule']:32} {row['batch']:>5} {row['exact']:>12.1f} {row['without']:>10.1f} {row['ratio']:>6.3f}")
    print(json.dumps({"benchmark": "exactness", **vars(args), "dtype": engine.info.dtype, "rows": rows, **versions()}))


def drawn_by_torch() -> Choose:
    """Return what draws tokens as torch does, from the state of a generator."""
    generator = torch.Generator().manual_seed(0)

    def draw(scores: Tensor, choices: Sequence[Choice]) -> Tensor:
        temperature = torch.tensor([choice.temperature for choice in choices])[:, None]
        return torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator)[:, 0]

    return draw


if __name__ == "__main__":
    main()
