"""The work that benchmarks give to an engine: some prompts at once, to the last token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gptserve.engine.engine import Engine
from gptserve.engine.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Timing:
    """How long some prompts took."""

    seconds: float
    """Prefill and decode together."""
    step_seconds: float | None
    """The mean time of the steps in which all decode: none still reads its prompt, none has ended.

    None without any, or if the cache was too small, as steps then compute sequences anew.
    """
    num_preemptions: int


def seconds(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, **params: float) -> float:
    """Compute max_tokens tokens for each prompt, prefill and decode together, and return how long it took."""
    return timing(engine, prompts, max_tokens, **params).seconds


def timing(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, **params: float) -> Timing:
    """Compute max_tokens tokens for each prompt."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
    preempted_before, start = engine.stats.num_preemptions, time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), tuple(prompt), sampling, seed=i))
    num_tokens, begun, has_ended, full = 0, set(), False, []
    while engine.has_work:
        outputs = engine.step()
        num_tokens += sum(len(output.token_ids) for output in outputs)
        begun |= {output.request_id for output in outputs}
        if len(begun) == len(prompts) and not has_ended:
            full.append(time.perf_counter())
        has_ended |= any(output.finish_reason is not None for output in outputs)
    assert num_tokens == len(prompts) * max_tokens
    elapsed, num_steps = time.perf_counter() - start, len(full) - 1
    num_preemptions = engine.stats.num_preemptions - preempted_before
    is_known = num_steps > 0 and not num_preemptions
    return Timing(elapsed, (full[-1] - full[0]) / num_steps if is_known else None, num_preemptions)
