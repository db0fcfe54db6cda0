"""From a job's records in the journal back to its plan and to the requests that are left of it.

`background.py` calls it at the start and for readers of results, `recorder.py` runs what is left. Knows no HTTP.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from gptserve.engine.request import Request
from gptserve.server.completions.identity import Identity
from gptserve.server.completions.model import Model
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.run import CompletionOutput
from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.job import DIALECT
from gptserve.server.jobs.records import CompletionRecord, OutputBatch, StoredJob

SUSPECT_AFTER = 2  # starts that resumed a completion without producing output
MAX_ATTEMPTS = 4

Restore = Callable[
    [dict[str, object], tuple[tuple[int, ...], ...], int, Identity, Mapping[str, object] | None, Model], CompletionPlan
]


@dataclass(frozen=True, slots=True)
class Resumption:
    """What is left of a job that an earlier server began: the requests for choices that have not ended."""

    stored: StoredJob
    requests: tuple[Request, ...]

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what crashed the servers that resumed it."""
        return self.stored.num_failed_resumes >= SUSPECT_AFTER


@dataclass(slots=True)
class Replay:
    """Applies journaled outputs to `output`, page by page; then `requests` are those that are left of a plan."""

    plan: CompletionPlan
    output: CompletionOutput
    _generated: dict[str, list[int]] = field(init=False)
    _num_scored: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._generated = {request.request_id: [*request.generated_token_ids] for request in self.plan.requests}
        self._num_scored = dict.fromkeys(self._generated, 0)

    def add(self, batches: Iterable[OutputBatch]) -> None:
        """Apply the next outputs."""
        for made in itertools.chain.from_iterable(batches):
            self.output.add(made)
            self._generated[made.request_id] += made.token_ids
            self._num_scored[made.request_id] += len(made.prompt_logprobs or ())

    def requests(self) -> tuple[Request, ...]:
        """Return the requests for the choices that have not ended."""
        return tuple(
            replace(
                request,
                generated_token_ids=tuple(self._generated[request.request_id]),
                num_scored_tokens=self._num_scored[request.request_id],
            )
            for request in self.output.unfinished()
        )


def rebuild_plan(
    restore: Mapping[str, Restore], record: CompletionRecord, model: Model, *, is_unreadable: bool
) -> CompletionPlan:
    """Rebuild the plan of a completion, without prompts if it is unreadable.

    Raises ServiceError.
    """
    identity = Identity(**{name: getattr(record, name) for name in Identity.__slots__})
    prompts = () if is_unreadable else record.prompts
    body = json.loads(record.body)
    dialect = body.pop(DIALECT, None)
    try:
        return restore[record.kind](body, prompts, record.max_tokens, identity, dialect, model)
    except (ValidationError, LookupError) as error:
        if (
            record.fingerprint != model.engine.info.fingerprint
        ):  # another version of this server may have accepted other bodies
            raise model_changed() from error
        raise


def model_changed() -> ServiceError:
    """Return the error of a completion that another model began."""
    return ServiceError("model_changed", "the server now has another model or computes otherwise")


def too_many_attempts() -> ServiceError:
    """Return the error of a completion that no start could continue."""
    message = f"{MAX_ATTEMPTS} servers in a row ended while they computed this completion, without a token of it"
    return ServiceError("generation_failed", message)
