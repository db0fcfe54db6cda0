"""From a ScheduledBatch to a StepInput: the one place where live sequences become plain values. Torch-free.

overlap.py calls it before each launch.
"""

from __future__ import annotations

from gptserve.engine.model.layout import SpanFields, lay_out
from gptserve.engine.runner.masks import MaskQuery, MaskThread
from gptserve.engine.runner.step_input import PooledPrompt, ScoredPrompt, StepInput
from gptserve.engine.sampling.choice import SamplingPosition
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence


def step_input(batch: ScheduledBatch, block_size: int, mask_thread: MaskThread) -> StepInput:
    """Return what the batch computes, samples, scores and pools; its masks begin to be computed."""
    spans: list[SpanFields] = []
    positions: list[SamplingPosition] = []
    prompts: list[ScoredPrompt] = []
    pooled: list[PooledPrompt] = []
    queries: list[MaskQuery] = []
    num_rows = 0
    for item in batch.items:
        sequence, num_tokens, draft = item.sequence, item.num_tokens, item.draft
        state, known, first, num_sampled = sequence.sampling, sequence.token_ids, sequence.num_computed, 0
        if state.params.prompt_logprobs is not None and not sequence.num_generated:
            prompts.append(_scored_prompt(len(spans), num_rows, item, state.params.prompt_logprobs))
        if sequence.pooled is not None:
            is_last = first + num_tokens == len(known)
            its = sequence.pooled
            rows = num_rows, num_tokens, first, is_last
            pooled.append(PooledPrompt(len(spans), its.pooling, *rows, its.vector))
        if item.needs_sampling:
            if sequence.matcher is not None:
                generated, num_before_end = known[sequence.num_prompt_tokens :], state.params.num_before_end
                queries.append(MaskQuery(len(positions), sequence.matcher, generated, draft, num_before_end))
            num_sampled = 1 + len(draft)
            positions.append(SamplingPosition(state, known))
            if draft:
                positions += [SamplingPosition(state, known, draft[:i]) for i in range(1, num_sampled)]
        token_ids = known[first : first + num_tokens]
        spans.append(([*token_ids, *draft] if draft else token_ids, first, sequence.block_ids, num_sampled, item.state))
        num_rows += num_tokens
    return StepInput(lay_out(spans, block_size), positions, prompts, pooled, mask_thread.begin(queries))


def _scored_prompt(index: int, first_row: int, item: ScheduledSequence, num_top: int) -> ScoredPrompt:
    sequence, first = item.sequence, item.sequence.num_computed
    last = min(first + item.num_tokens, sequence.num_prompt_tokens - 1)
    return ScoredPrompt(index, first_row, first + 1, sequence.token_ids[first + 1 : last + 1], num_top)
