"""From a parsed request for embeddings to a plan: checks, token ids, the engine's requests. Knows no HTTP."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from functools import partial

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.pooling import PoolingRequest
from gptserve.engine.request import too_long
from gptserve.server.completions.admission import WORKER_BYTES, take_inputs
from gptserve.server.completions.prompt import blaming
from gptserve.server.completions.service import Service
from gptserve.server.embeddings.answer import embedding_answer
from gptserve.server.embeddings.run import PooledPlan, check_requests
from gptserve.server.schemas.embeddings import EmbeddingRequest
from gptserve.weights.pooling import Pooling

MAX_NUMBERS = 2**21
"""Of an answer: 42 MB of JSON, and 2,048 vectors of 1,024 numbers."""


async def plan_embeddings(body: EmbeddingRequest, service: Service, owner: str | None) -> PooledPlan:
    """Check and tokenize. Raises ServiceError, QueueFullError or InvalidRequestError."""
    service = service.naming(body.model)
    model, inputs = service.model, inputs_of(body.input)
    width = model.engine.info.vector_size
    if body.dimensions is not None and body.dimensions > width:
        message = f"dimensions must be at most {width}, the width of this model, got {body.dimensions}"
        raise InvalidRequestError(message, param="dimensions")
    num_numbers = len(inputs) * (body.dimensions or width)
    if num_numbers > MAX_NUMBERS:
        rule = f"the number of inputs times that of dimensions may be at most {MAX_NUMBERS}"
        raise InvalidRequestError(f"{rule}, got {len(inputs)} times {body.dimensions or width}", param="input")
    num_at_once = take_inputs(service, owner, len(inputs))
    prompts = await encode_inputs(inputs, service, special=body.add_special_tokens is not False)
    requests = pooling_requests("embd", prompts, model.text_vector.pooling, owner)
    check_requests(requests, model)
    return PooledPlan(model, owner, requests, num_at_once, body, partial(embedding_answer, body))


def inputs_of(given: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    """Return the inputs of a request. Raises InvalidRequestError if there is none."""
    if not given:
        raise InvalidRequestError("input must hold a text or a token, got an empty one", param="input")
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return given


def pooling_requests(
    kind: str, prompts: Sequence[tuple[int, ...]], pooling: Pooling, owner: str | None
) -> tuple[PoolingRequest, ...]:
    """Return a request for each prompt, of one answer."""
    answer_id, cache_salt = uuid.uuid4().hex, "" if owner is None else json.dumps([owner, ""])  # as of completions
    return tuple(
        PoolingRequest(f"{kind}-{answer_id}-{i}", ids, pooling, cache_salt=cache_salt) for i, ids in enumerate(prompts)
    )


async def encode_inputs(
    inputs: Sequence[str | list[int]], service: Service, *, special: bool, most: int | None = None
) -> list[tuple[int, ...]]:
    """Return the token ids of each input, the first `most` if given; those of many bytes are tokenized in a thread."""
    tokenizer, limit = service.model.tokenizer, service.model.engine.info.max_model_len
    encode, max_bytes = tokenizer.encode_prompt if special else tokenizer.encode, limit * tokenizer.max_token_bytes
    for text in inputs:
        if most is None and isinstance(text, str) and (num_bytes := len(text.encode())) > max_bytes:
            beyond = f"which no more than {max_bytes} bytes can fit; an input has {num_bytes}"
            message = f"{too_long(limit, 'The input')}, {beyond}"
            raise InvalidRequestError(message, param="input", code="context_length_exceeded")

    def encode_all() -> list[tuple[int, ...]]:
        with blaming("input"):
            return [tuple(encode(text) if isinstance(text, str) else text)[:most] for text in inputs]

    if isinstance(inputs[0], str) and (tokenizer.has_workers or service.place.num_bytes > WORKER_BYTES):
        return await service.in_worker(encode_all)
    return encode_all()
