"""What a job store keeps of a completion: how it began, its outputs, how it ended; the outputs as JSON.

Jobs hand records to a store (`store.py`) and get them back. Knows neither a store nor HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from gptserve.engine.request import FinishReason, TokenLogprobs, TokenOutput

EndStatus = Literal["completed", "failed", "cancelled"]
OutputBatch = tuple[TokenOutput, ...]


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """Everything that is known of a completion when it begins, enough to compute it again.

    kind is the `object` of its answer; owner is the name of the API key; tokenizer is the fingerprint of the one that
    its token ids belong to; body is the client's JSON object without the prompt; prompts are token ids; deadline is
    seconds since the epoch; digest is of the request, to compare with others of the same idempotency key.
    """

    completion_id: str
    kind: str
    created: int
    model: str
    fingerprint: str
    batch_invariant: bool
    seed: int
    owner: str | None
    tokenizer: str
    body: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    deadline: float | None
    key: str | None
    digest: str


@dataclass(frozen=True, slots=True)
class EndRecord:
    """How a completion ended; error is a JSON object. finished_at is seconds since the epoch.

    position is the id of its last event, and None if no outputs were read; num_tokens is the number of its tokens.
    """

    status: EndStatus
    error: str | None
    finished_at: float
    num_batches: int
    num_tokens: int
    position: str | None


class StoredJob(NamedTuple):
    """The part of a kept completion that the server holds in memory. Without an end it has not ended.

    record is without body and prompts; num_bytes is what the store has of it. attempts has for each start that resumed
    it the number of batches of outputs that it had then.
    """

    record: CompletionRecord
    num_prompt_tokens: int
    num_bytes: int
    num_batches: int = 0
    attempts: tuple[int, ...] = ()
    end: EndRecord | None = None

    @property
    def num_failed_resumes(self) -> int:
        """How many starts resumed it without producing output."""
        return self.attempts.count(self.num_batches)


def encode_outputs(outputs: Iterable[TokenOutput]) -> str:
    """Return a JSON array with an object for each output, of the fields that differ from their defaults.

    Fields that are not compared are left out: they are of a run, not of the answer. TokenLogprobs become arrays of
    their fields.
    """
    encode = json.JSONEncoder(separators=(",", ":"), default=attrgetter(*TokenLogprobs.__slots__)).encode
    # One call for each output: a single call for all could hold the interpreter for long.
    return f"[{','.join(encode(_changed_fields(output)) for output in outputs)}]"


def decode_outputs(text: str) -> OutputBatch:
    """Invert `encode_outputs`. Raises ValueError."""
    try:
        return tuple(_decode_output(value) for value in json.loads(text))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not the outputs of a completion: {error}") from error


def _changed_fields(output: TokenOutput) -> dict[str, object]:
    answer = [f for f in fields(output) if f.compare]
    return {f.name: getattr(output, f.name) for f in answer if getattr(output, f.name) != f.default}


def _decode_output(values: dict[str, Any]) -> TokenOutput:
    values["token_ids"] = tuple(values["token_ids"])
    for name in values.keys() & {"logprobs", "prompt_logprobs"}:
        values[name] = tuple(entry and _decode_logprobs(*entry) for entry in values[name])
    if "finish_reason" in values:
        values["finish_reason"] = FinishReason(values["finish_reason"])
    return TokenOutput(**values)


def _decode_logprobs(token_id: int, logprob: float, rank: int, top: list[tuple[int, float]]) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, rank, tuple((i, value) for i, value in top))
