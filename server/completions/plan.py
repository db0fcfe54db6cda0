"""From a parsed request to a plan: checks, token ids, the engine's requests, the fields that the answer begins with.

`chat.py` turns a conversation into a prompt and calls `make_plan`, too. `run.py` carries the plan out. Knows no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.request import Request, SamplingParams
from gptserve.server.completions.bad_words import bad_word_ids, encode_bad_words
from gptserve.server.completions.checks import check_request, check_size
from gptserve.server.completions.continuation import continue_requests
from gptserve.server.completions.grammar import check_grammar
from gptserve.server.completions.identity import Identity, new_identity
from gptserve.server.completions.lengths import asked_max_tokens, fit_max_tokens
from gptserve.server.completions.model import Model
from gptserve.server.completions.prompt import encode_prompt
from gptserve.server.completions.service import Service
from gptserve.server.completions.shapes import TEXT_SHAPE, Shape
from gptserve.server.schemas.completions import ChatRequest, CompletionRequest, GenerationRequest
from gptserve.server.schemas.grammar import asked_grammar
from gptserve.server.schemas.seed import engine_seed
from gptserve.server.text.output import Delta, join_deltas
from gptserve.server.text.stop import StopAutomaton
from gptserve.server.tools.dialect import Dialect, Reading


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A checked request: the engine's requests to submit and the way to answer.

    `requests` are in the order of the choices: all n of the first prompt, then all n of the second. `reading` splits
    the answers to a chat into text, reasoning and calls of tools; it is of the `dialect`.
    """

    shape: Shape
    model: Model
    identity: Identity
    requests: tuple[Request, ...]
    num_prompt_tokens: int
    stop: StopAutomaton
    body: GenerationRequest
    reading: Reading | None
    dialect: Dialect | None

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return isinstance(self.body, CompletionRequest) and bool(self.body.echo)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with an event that has the usage."""
        return self.body.stream_options is not None and bool(self.body.stream_options.include_usage)

    @property
    def counts_usage(self) -> bool:
        """Whether all events of a stream have the usage so far."""
        return self.includes_usage and bool(getattr(self.body.stream_options, "continuous_usage_stats", False))

    @property
    def num_given_tokens(self) -> int:
        """How many tokens the client has of all choices."""
        return sum(len(request.generated_token_ids) for request in self.requests)

    @property
    def answer_id(self) -> str:
        """The id of the answer. A client that chooses it may choose the same again, so it is nothing's key."""
        chosen = self.body.request_id
        return self.identity.completion_id if chosen is None else f"{self.shape.id_prefix}{chosen}"

    def head(self, *, of_chunk: bool = False) -> dict[str, object]:
        """Return the first fields of the answer or, of_chunk, of each of its chunks."""
        return {
            "id": self.answer_id,
            "object": self.shape.chunk_object if of_chunk else self.shape.object,
            "created": self.identity.created,
            "model": self.identity.model,
            "system_fingerprint": self.identity.fingerprint,
            "batch_invariant": self.identity.batch_invariant,
            "seed": self.identity.seed,
        }

    def remaining_s(self, elapsed_s: float) -> float | None:
        """Return the seconds left of the time limit; None without a limit."""
        return None if self.body.timeout_ms is None else self.body.timeout_ms / 1000 - elapsed_s

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Mapping[str, object]) -> dict[str, object]:
        """Return the answer in one piece from the deltas of each choice, which may be empty."""
        joined = [join_deltas(deltas or [Delta("")]) for deltas in choices]
        rendered = [self.shape.choice(index, delta) for index, delta in enumerate(joined)]
        after_choices = {**dict.fromkeys(self.shape.nulls), **(self.shape.after_choices(joined[0]) if joined else {})}
        return {**self.head(), "choices": rendered, **after_choices, "usage": usage}


async def plan_completion(body: CompletionRequest, service: Service, owner: str | None) -> CompletionPlan:
    """Check the rules that types cannot express, then tokenize. Raises ServiceError or InvalidRequestError."""
    service, prompts = service.naming(body.model), _split_prompt(body.prompt)
    check_request(body, service, owner, len(prompts))
    if body.thinking_limit is not None:
        raise InvalidRequestError("thinking_token_budget may be given in a chat only", param="thinking_token_budget")
    if body.best_of not in (None, body.n or 1):
        message = f"best_of must be null or equal to n, which is {body.n or 1}, got {body.best_of}"
        raise InvalidRequestError(message, param="best_of")
    grammar, defaults = await check_grammar(body, service), service.model.sampling_defaults
    asked, bad_words = asked_max_tokens(body), await bad_word_ids(body, service)
    max_tokens = service.model.engine.info.max_model_len if asked is None else asked or 1  # 0 is for echo alone
    params = body.sampling_params(defaults, bad_words=bad_words, max_tokens=max_tokens, grammar=grammar)
    token_ids = [tuple(await encode_prompt(prompt, body, asked or 1, service)) for prompt in prompts]
    params = fit_max_tokens(params, asked, max(map(len, token_ids)), service)
    check_size(body, params, token_ids, service)
    identity = new_identity(TEXT_SHAPE, body, service, owner)
    return make_plan(body, TEXT_SHAPE, service.model, token_ids, params, identity)


def restore_plan(
    fields: dict[str, object],
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    identity: Identity,
    kept: Mapping[str, object] | None,
    model: Model,
    *,
    schema: type[GenerationRequest],
    shape: Shape,
) -> CompletionPlan:
    """Rebuild the plan of a completion from its body, a `schema`, and its prompts; `kept` is the record of its dialect.

    A chat is not rendered again, as the result could differ: templates know the date.
    """
    dialect = model.dialect.of_record(kept) if issubclass(schema, ChatRequest) else None
    body = schema.model_validate(fields)
    bad_words = encode_bad_words(body.bad_words, model.tokenizer)
    grammar = asked_grammar(body, (dialect or model.dialect).unnamed_properties)[1]
    params = body.sampling_params({}, bad_words=bad_words, max_tokens=max_tokens, grammar=grammar)
    reading = None if dialect is None else dialect.reading(body, prompts[0] if prompts else ())
    if reading is not None and reading.grammar is not None:
        params = replace(params, grammar=reading.grammar)
    return make_plan(body, shape, model, prompts, params, identity, reading=reading, dialect=dialect)


def make_plan(
    body: GenerationRequest,
    shape: Shape,
    model: Model,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    identity: Identity,
    *,
    reading: Reading | None = None,
    dialect: Dialect | None = None,
) -> CompletionPlan:
    """Return the plan for prompts of token ids. Raises InvalidRequestError."""
    num_choices = body.n or 1
    cache_salt = body.cache_salt or ""
    if identity.owner is not None:  # the time to the first token would tell one owner what others have sent
        cache_salt = json.dumps([identity.owner, cache_salt])
    requests = tuple(
        Request(
            request_id=f"{identity.completion_id}-{prompt_index * num_choices + choice_index}",
            prompt_token_ids=prompt_ids,
            params=params,
            seed=engine_seed(identity.seed),
            choice_index=choice_index,
            priority=body.priority or 0,
            cache_salt=cache_salt,
        )
        for prompt_index, prompt_ids in enumerate(prompts)
        for choice_index in range(num_choices)
    )
    info = model.engine.info
    requests = continue_requests(body, requests, info, batch_invariant=identity.batch_invariant)
    stop = StopAutomaton([body.stop] if isinstance(body.stop, str) else body.stop or ())
    num_prompt_tokens = sum(map(len, prompts))
    return CompletionPlan(shape, model, identity, requests, num_prompt_tokens, stop, body, reading, dialect)


def _split_prompt(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    """Return the prompts of a request; an empty list is one empty prompt."""
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return prompt
