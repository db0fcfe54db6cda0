"""The gain of drafts by prompt lookup: one sequence at a time, with and without drafts, in turns in one process.

    python -m bench.speculation [--cases loop wrong] [--ngram 3] [--step-tokens 12] [--max-tokens 96] [--repeats 3]

Cases:
- story: the embedded storyteller continues the first words of a story at temperature 0.8. Hardly anything recurs.
- retelling: it continues a whole story followed by its first sentences again, greedy. The model has not learned to copy
  and tells another story, in which only names and phrases recur.
- loop: GPT-2 124M's shape with random weights, greedy. Such a model soon repeats itself for ever, and then every draft
  is accepted. This is the maximum gain, as when a text is copied from the prompt.
- wrong: the same prompts with a drafter that never guesses right. This is the maximum cost.

--step-tokens replaces MAX_DRAFTING_STEP_TOKENS, to see how many tokens pay. Both sides must give the same tokens, which
is checked. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.machine import versions
from bench.models import write_model
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.scheduling.drafter import MAX_DRAFTING_STEP_TOKENS, Drafter, PromptLookup
from gptserve.engine.scheduling.sequence import SequenceState
from gptserve.weights.source import resolve_model
from gptserve.weights.storyteller.recipe.generator import stories
from gptserve.weights.tokenizers.tokenizer import Tokenizer

CASES = ("story", "retelling", "loop", "wrong")
NUM_PROMPTS = 4


class WrongDrafter(PromptLookup):
    """Guesses max_tokens times the id after the last one, which the model of the `wrong` case never gives."""

    def draft(self, sequence: SequenceState, max_tokens: int) -> tuple[int, ...]:
        return ((sequence.token_ids[-1] + 1) % 1000,) * max_tokens


def main() -> None:
    args = parse_arguments()
    storyteller = resolve_model(None, None)
    tokenizer = Tokenizer.of_model(storyteller)
    texts = [story.text for story in stories("held_out", NUM_PROMPTS)]
    starts = [tokenizer.encode(text[:40]) for text in texts]
    retellings = [tokenizer.encode(f"{text}\n\n{text[:120]}") for text in texts]
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(50257, (NUM_PROMPTS, 64), generator=generator).tolist()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "gpt2")
        cases: list[tuple[str, Path, Sequence[Sequence[int]], float, type[PromptLookup]]] = [
            ("story", storyteller, starts, 0.8, PromptLookup),
            ("retelling", storyteller, retellings, 0.0, PromptLookup),
            ("loop", Path(folder), anything, 0.0, PromptLookup),
            ("wrong", Path(folder), anything, 0.0, WrongDrafter),
        ]
        for name, model, prompts, temperature, make_drafter in cases:
            if name not in args.cases:
                continue
            plain = load(model, args.dtype, None)
            for step_tokens in args.step_tokens:
                drafting = load(model, args.dtype, make_drafter(args.ngram, step_tokens))
                rows.append(measure(name, plain, drafting, prompts, temperature, step_tokens, args))
    print(f"{'case':>10} {'step tokens':>12} {'accepted':>9} {'tok/step':>9} {'plain':>7} {'drafts':>7} {'ratio':>6}")
    for row in rows:
        print(
            f"{row['case']:>10} {row['step_tokens']:>12} {row['accepted']:>9.0%} {row['tokens_per_step']:>9.2f} "
            f"{row['plain']:>7.1f} {row['drafts']:>7.1f} {row['ratio']:>6.2f}"
        )
    settings = {name: getattr(args, name) for name in ("ngram", "max_tokens", "repeats", "dtype")}
    print(json.dumps({"benchmark": "speculation", **settings, **versions(), "rows": rows}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--ngram", type=int, default=3)
    parser.add_argument("--step-tokens", type=int, nargs="+", default=[MAX_DRAFTING_STEP_TOKENS])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def load(model: Path, dtype: Any, drafter: Drafter | None) -> Engine:
    config = EngineConfig(model_dir=model, dtype=dtype, enable_prefix_caching=False, kv_cache_bytes=2**28)
    return Engine(config, drafter=drafter)


def measure(
    name: str,
    plain: Engine,
    drafting: Engine,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    step_tokens: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Let both sides take turns and return the median tokens per second of each and of their ratios."""
    params = SamplingParams(max_tokens=args.max_tokens, temperature=temperature, ignore_eos=True)
    speeds: list[tuple[float, float]] = []
    before = drafting.stats
    for repeat in range(args.repeats + 1):
        for i, prompt in enumerate(prompts):
            request = Request("r", tuple(prompt), params, seed=i)
            (expected, plain_s), (found, drafts_s) = complete(plain, request), complete(drafting, request)
            assert found == expected, "drafts have changed a token"
            if repeat:  # the first round warms up both
                speeds.append((args.max_tokens / plain_s, args.max_tokens / drafts_s))
    after = drafting.stats
    num_drafted = after.num_draft_tokens - before.num_draft_tokens
    return {
        "case": name,
        "step_tokens": step_tokens,
        "accepted": (after.num_accepted_tokens - before.num_accepted_tokens) / num_drafted,
        "tokens_per_step": (after.num_generated_tokens - before.num_generated_tokens)
        / (after.num_steps - before.num_steps),
        "plain": statistics.median(plain for plain, _ in speeds),
        "drafts": statistics.median(drafts for _, drafts in speeds),
        "ratio": statistics.median(drafts / plain for plain, drafts in speeds),
    }


def complete(side: Engine, request: Request) -> tuple[list[int], float]:
    """Return the tokens of a request and the seconds they took."""
    start, token_ids = time.perf_counter(), list[int]()
    side.add(request)
    while side.has_work:
        token_ids += (token for output in side.step() for token in output.token_ids)
    return token_ids, time.perf_counter() - start


if __name__ == "__main__":
    main()
