"""What a restart needs to resume a job: its plan from the journal's record, and the requests for the rest of it.

`store.py` calls it. Knows no HTTP.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from pydantic import ValidationError

from gptserve.engine.request import Request
from gptserve.server.background.job import model_changed
from gptserve.server.background.journal import CompletionRecord, OutputBatch
from gptserve.server.completions.plan import CompletionPlan, Identity
from gptserve.server.completions.run import CompletionOutput

Restore = Callable[[dict[str, object], tuple[tuple[int, ...], ...], int, Identity], CompletionPlan]


def restore_plan(restore: Mapping[str, Restore], record: CompletionRecord, *, is_foreign: bool) -> CompletionPlan:
    """Rebuild the plan of a completion, without prompts if another model made it. Raises ServiceError."""
    identity = Identity(**{name: getattr(record, name) for name in Identity.__slots__})
    prompts = () if is_foreign else record.prompts
    try:
        return restore[record.kind](json.loads(record.body), prompts, record.max_tokens, identity)
    except ValidationError as error:
        if is_foreign:  # another version of this server may have accepted other bodies
            raise model_changed() from error
        raise


def replay(batches: Iterable[OutputBatch], plan: CompletionPlan, output: CompletionOutput) -> tuple[Request, ...]:
    """Apply journaled outputs to `output`; return the requests for the choices that have not ended."""
    generated: dict[str, list[int]] = {request.request_id: [] for request in plan.requests}
    num_scored: Counter[str] = Counter()
    for made in itertools.chain.from_iterable(batches):
        output.add(made)
        generated[made.request_id] += made.token_ids
        num_scored[made.request_id] += len(made.prompt_logprobs or ())
    return tuple(
        replace(
            request,
            generated_token_ids=tuple(generated[request.request_id]),
            num_scored_tokens=num_scored[request.request_id],
        )
        for request, choice in zip(plan.requests, output.choices, strict=True)
        if choice.finish_reason is None
    )
