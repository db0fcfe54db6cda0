"""The work that benchmarks give to an engine: some prompts at once, to the last token."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gptserve.engine.engine import Engine
from gptserve.engine.request import Request, SamplingParams


def seconds(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, **params: float) -> float:
    """Compute max_tokens tokens for each prompt, prefill and decode together, and return how long it took."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
    start, num_tokens = time.perf_counter(), 0
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), tuple(prompt), sampling, seed=i))
    while engine.has_work:
        num_tokens += sum(len(output.token_ids) for output in engine.step())
    assert num_tokens == len(prompts) * max_tokens
    return time.perf_counter() - start
