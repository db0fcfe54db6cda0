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
from gptserve.server.completions.model import Model
from gptserve.server.completions.prompt import blaming
from gptserve.server.completions.service import Service
from gptserve.server.core.tokenizer import Tokenizer
from gptserve.server.embeddings.answer import embedding_answer
from gptserve.server.embeddings.run import PooledPlan, check_requests
from gptserve.server.schemas.embeddings import EmbeddingRequest
from gptserve.weights.pooling import Pooling

MAX_NUMBERS = {"float": 2**21, "base64": 2**23}
"""Of an answer, by its encoding: 42 MB of JSON, and 2,048 vectors of 1,024 or of 4,096 numbers."""


async def plan_embeddings(body: EmbeddingRequest, service: Service, owner: str | None) -> PooledPlan:
    """Check and tokenize. Raises ServiceError, QueueFullError or InvalidRequestError."""
    service = service.naming(body.model)
    model, inputs = service.model, inputs_of(body.input)
    width = model.engine.info.vector_size
    if body.dimensions is not None and body.dimensions > width:
        message = f"dimensions must be at most {width}, the width of this model, got {body.dimensions}"
        raise InvalidRequestError(message, param="dimensions")
    _check_answer(len(inputs), body.dimensions or width, body.encoding_format or "float")
    most = num_kept(body.truncate_prompt_tokens, model)
    num_at_once = take_inputs(service, owner, len(inputs))
    prompts = await encode_inputs(inputs, service, special=body.add_special_tokens is not False, most=most)
    requests = pooling_requests("embd", prompts, model.text_vector.pooling, owner)
    check_requests(requests, model)
    return PooledPlan(model, owner, requests, num_at_once, body, partial(embedding_answer, body))


def _check_answer(num_inputs: int, width: int, encoding: str) -> None:
    """Raise InvalidRequestError if the vectors are too many numbers for one answer."""
    limit = MAX_NUMBERS[encoding]
    if num_inputs * width > limit:
        rule = f"the number of inputs times that of dimensions may be at most {limit} in {encoding}"
        raise InvalidRequestError(f"{rule}, got {num_inputs} times {width}", param="input")


def num_kept(asked: int | None, model: Model) -> int | None:
    """Return how many tokens of a prompt to keep, None for all. Raises InvalidRequestError."""
    limit = model.engine.info.max_model_len
    if asked is None:
        return None
    if asked == 0 or asked > limit:
        message = f"truncate_prompt_tokens must be -1 or in [1, {limit}], got {asked}"
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    return limit if asked == -1 else asked


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
    """Return the token ids of each input, `most` at most if given; those of many bytes are tokenized in a thread.

    Raises InvalidRequestError.
    """
    tokenizer, limit = service.model.tokenizer, service.model.engine.info.max_model_len
    max_bytes = limit * tokenizer.max_token_bytes
    for text in inputs:
        if most is None and isinstance(text, str) and (num_bytes := len(text.encode())) > max_bytes:
            beyond = f"which no more than {max_bytes} bytes can fit; an input has {num_bytes}"
            message = f"{too_long(limit, 'The input')}, {beyond}"
            raise InvalidRequestError(message, param="input", code="context_length_exceeded")

    def encode_all() -> list[tuple[int, ...]]:
        with blaming("input"):
            return [
                tuple(_encoded(its, tokenizer, most, special=special) if isinstance(its, str) else its[:most])
                for its in inputs
            ]

    if isinstance(inputs[0], str) and (tokenizer.has_workers or service.place.num_bytes > WORKER_BYTES):
        return await service.in_worker(encode_all)
    return encode_all()


def _encoded(text: str, tokenizer: Tokenizer, most: int | None, *, special: bool) -> list[int]:
    """Return the tokens of a text, `most` at most: its end is cut, and the special tokens around it stay.

    Raises InvalidRequestError if there is no room for the text between them.
    """
    token_ids = tokenizer.encode_prompt(text) if special else tokenizer.encode(text)
    if most is None or len(token_ids) <= most:
        return token_ids
    bare = tokenizer.encode(text)
    num_around = len(token_ids) - len(bare)
    if most <= num_around:
        rule = f"truncate_prompt_tokens must be above {num_around}, the tokens around the text"
        raise InvalidRequestError(f"{rule}, got {most}", param="truncate_prompt_tokens")
    starts = (start for start in range(num_around + 1) if token_ids[start : start + len(bare)] == bare)
    kept = next(starts, num_around) + most - num_around
    return token_ids[:kept] + token_ids[len(token_ids) - (most - kept) :]
