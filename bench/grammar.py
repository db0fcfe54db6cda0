"""What masks cost: the time of a decode step whose sequences all follow a JSON Schema, compared with one without.

    python -m bench.grammar [--batch 1 32] [--max-tokens 100] [--repeats 5] [--shape gpt2]

Random weights of a real shape in bf16 and a vocabulary of 50,257 tokens. The schema is an array of objects that does
not end within the tokens asked for. The two take turns, run by run. Nothing is drafted, so that a step is a token:
drafts of forced texts would hide the cost of masks. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from bench.machine import versions
from bench.models import SHAPES, write_served_model
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.grammar.grammar import Grammar
from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.scheduling.drafter import PromptLookup

SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "born": {"type": "string", "format": "date"},
            "size": {"type": "number"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "born", "size", "tags"],
        "additionalProperties": False,
    },
}
GRAMMARS = {"free": None, "schema": Grammar("json", json.dumps(SCHEMA))}


class NoDrafts(PromptLookup):
    """Guesses nothing."""

    def draft(self, *_: object) -> tuple[int, ...]:
        return ()


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        write_served_model(Path(folder), args.shape)
        config = EngineConfig(
            Path(folder), device="cpu", dtype="bfloat16", kv_cache_bytes=2**30, enable_prefix_caching=False
        )
        engine = Engine(config, drafter=NoDrafts(2))
        rows = [measure(engine, batch, args.max_tokens, args.repeats) for batch in args.batch]
    print(f"{'batch':>5} {'free ms':>8} {'schema ms':>10} {'added':>7} {'p99 ms':>7}")
    for row in rows:
        print(
            f"{row['batch']:>5} {row['free_ms']:>8.2f} {row['schema_ms']:>10.2f} {row['added']:>7.1%} "
            f"{row['schema_p99_ms']:>7.2f}"
        )
    print(json.dumps({"benchmark": "grammar", "shape": args.shape, **versions(), "rows": rows}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    return parser.parse_args()


def measure(engine: Engine, batch: int, max_tokens: int, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of steps with and without masks, and the slowest hundredth of those with."""
    steps: dict[str, list[float]] = {kind: [] for kind in GRAMMARS}
    for repeat in range(repeats + 1):
        for kind, grammar in GRAMMARS.items():
            taken = run(engine, batch, SamplingParams(max_tokens=max_tokens, temperature=1.0, grammar=grammar), repeat)
            steps[kind] += taken if repeat else []  # the first run warms up
    free_ms, schema_ms = (statistics.median(steps[kind]) for kind in GRAMMARS)
    return {
        "batch": batch,
        "free_ms": free_ms,
        "schema_ms": schema_ms,
        "schema_p99_ms": statistics.quantiles(steps["schema"], n=100)[-1],
        "added": schema_ms / free_ms - 1,
    }


def run(engine: Engine, batch: int, params: SamplingParams, repeat: int) -> list[float]:
    """Decode `batch` sequences to their end; return the milliseconds of each step in which all of them got a token."""
    for i in range(batch):
        engine.add(Request(f"{repeat}.{i}", (i, repeat, 7), params, seed=i))
    taken = []
    while engine.has_work:
        start = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == batch:
            taken.append(1e3 * (time.perf_counter() - start))
    return taken


if __name__ == "__main__":
    main()
