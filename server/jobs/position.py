"""How far a reader of a background completion has come. Its text is the id of an event.

An id says how many tokens its reader has of each choice: `17`, or `17.16.18` for three choices. It depends on the
completion alone, not on the steps of the engine or the order of the choices, so any server that computes the same
completion can go on from it. Knows no HTTP; `api/background.py` parses ids and `response.py` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from gptserve.engine.request import TokenOutput
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.run import CompletionOutput
from gptserve.server.completions.sse import END_SUFFIX
from gptserve.server.core.errors import ServiceError, show
from gptserve.server.text.output import ChoiceOutput, Delta

PATTERN = rf"[0-9]{{1,9}}(\.[0-9]{{1,9}})*({re.escape(END_SUFFIX)})?"
RULE = "the id of an event, the number of tokens of each choice, such as 17 or 17.16.18"


@dataclass(frozen=True, slots=True)
class Position:
    """How many tokens of each choice a reader has; an end that comes without a token counts as one.

    With `has_usage` the reader also has the event after all choices, the one with the usage.
    """

    counts: tuple[int, ...]
    has_usage: bool = False

    @classmethod
    def parse(cls, text: str) -> Position:
        """Return the position of an id. Raises ValueError."""
        if re.fullmatch(PATTERN, text) is None:
            raise ValueError(text)
        counts = text.removesuffix(END_SUFFIX).split(".")
        return cls(tuple(map(int, counts)), text.endswith(END_SUFFIX))

    @classmethod
    def of(cls, output: CompletionOutput) -> Position:
        """Return the position of a reader that has all of `output`."""
        return cls(tuple(choice.num_steps for choice in output.choices))

    def __str__(self) -> str:
        return ".".join(map(str, self.counts)) + (END_SUFFIX if self.has_usage else "")

    def is_within(self, limit: Position) -> bool:
        """Return whether a reader at `limit` has all that a reader at this position has. Both have the same choices."""
        return all(count <= most for count, most in zip(self.counts, limit.counts, strict=True))


@dataclass(frozen=True, slots=True)
class LastEvent:
    """The position that a client named, and the name of the parameter in which it did."""

    name: str
    position: Position

    @classmethod
    def parse(cls, name: str, text: str) -> LastEvent:
        """Return the position in the parameter `name`. Raises ServiceError."""
        try:
            return cls(name, Position.parse(text))
        except ValueError:
            raise ServiceError("invalid_value", f"{name} must be {RULE}, got {show(text)}", param=name) from None

    def check(self, plan: CompletionPlan, whole: Position | None = None, so_far: Position | None = None) -> None:
        """Raise ServiceError unless the completion can have this position; `whole` is that of its end, if known.

        `so_far` is that of one that runs and would not compute again what the client has beyond it.
        """
        num_choices, shown = len(plan.requests), show(str(self.position))
        if len(self.position.counts) != num_choices:
            rule = "one number" if num_choices == 1 else f"{num_choices} numbers, one for each choice"
            raise self.error(f"must have {rule}, got {shown}")
        limit = whole or Position(tuple(request.params.max_tokens for request in plan.requests))
        if not self.position.is_within(limit):
            raise self.error(f"may be at most {limit}, as the completion has no more tokens, got {shown}")
        given = Position(tuple(len(request.generated_token_ids) for request in plan.requests))
        if not given.is_within(self.position):
            raise self.error(f"must be at least {given}, as the stream begins after generated_token_ids, got {shown}")
        if so_far is not None and not self.position.is_within(so_far):
            why = "as the completion has no more tokens so far and batch_invariant is false"
            raise self.error(f"may be at most {so_far}, {why}, got {shown}")
        if self.position.has_usage and not plan.includes_usage:
            raise self.error(f"may not have {END_SUFFIX}, as the stream has no event with the usage, got {shown}")
        if self.position.has_usage and whole is not None and self.position.counts != whole.counts:
            raise self.error(f"may have {END_SUFFIX} only after all tokens, {whole}, got {shown}")

    def check_new(self, plan: CompletionPlan, fingerprints: Collection[str]) -> None:
        """Raise ServiceError unless a completion that begins now has the same tokens as the one this client knows.

        `fingerprints` are those of the models of earlier completions with the same key, as far as they are known.
        """
        self.check(plan)
        if not any(self.position.counts):
            return
        code = "completion_not_found"
        if any(fingerprint != plan.identity.fingerprint for fingerprint in fingerprints):
            code, why = "model_changed", "was computed by another model"
        elif plan.body.seed in (None, -1):
            why = "is unknown, and without a seed a new one has other tokens"
        elif not plan.identity.batch_invariant:
            why = "is unknown, and a new one may have other tokens, as batch_invariant is false"
        else:
            return
        message = f"the completion of {self.name} {self.position} {why}; leave {self.name} out to begin a new one"
        raise ServiceError(code, message, param=self.name)

    def error(self, rule: str) -> ServiceError:
        """Return the error for a parameter that breaks a rule."""
        return ServiceError("invalid_value", f"{self.name} {rule}", param=self.name)


class ResumedOutput(CompletionOutput):
    """The output of a completion for one reader: token by token, without those that the reader has."""

    def __init__(self, plan: CompletionPlan, after: LastEvent | None) -> None:
        super().__init__(plan)
        self._last_event = after
        self._after = (0,) * len(plan.requests) if after is None else after.position.counts

    @property
    def event_id(self) -> str:
        """The id of an event that is sent now."""
        return str(Position(tuple(max(choice.num_steps, had) for choice, had in self._choices())))

    @property
    def num_tokens(self) -> int:
        """How many tokens the reader has."""
        return sum(choice.num_tokens if choice.num_steps >= had else had for choice, had in self._choices())

    def add(self, output: TokenOutput) -> tuple[int, Delta] | None:
        """Add an output of at most one token; return None also for one that the reader has. Raises ServiceError."""
        added = super().add(output)
        if added is None or self.choices[added[0]].num_steps <= self._after[added[0]]:
            return None
        return added

    def check_end(self) -> None:
        """Raise ServiceError if the reader has tokens that the completion, which has ended, has not."""
        if self._last_event is not None:
            self._last_event.check(self._plan, Position.of(self))

    def _choices(self) -> Iterable[tuple[ChoiceOutput, int]]:
        return zip(self.choices, self._after, strict=True)


def single_tokens(output: TokenOutput) -> Iterator[TokenOutput]:
    """Yield an output for each token of `output`; the first has the scores of the prompt, the last has the end."""
    if len(output.token_ids) < 2:
        yield output
        return
    last = len(output.token_ids) - 1
    for i, token_id in enumerate(output.token_ids):
        token = replace(output, token_ids=(token_id,), logprobs=output.logprobs[i : i + 1])
        if i > 0:
            token = replace(token, prompt_logprobs=None)
        if i < last:
            token = replace(token, finish_reason=None, stop_token_id=None)
        yield token
