"""From the prompts of a request to token ids. Long texts are tokenized in a thread.

`plan.py` and `chat.py` call it for completions, `api/tokenize.py` for itself. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.request import too_long
from gptserve.server.completions.service import Service
from gptserve.server.schemas.completions import GenerationRequest
from gptserve.weights.errors import TokenizerError

THREAD_CHARACTERS = 2000  # about 0.5 ms of tokenizing; below that a thread costs more than it saves


async def encode_prompt(
    prompt: str | list[int], body: GenerationRequest, max_tokens: int, service: Service
) -> list[int]:
    """Return the token ids of a prompt, cut as `body` asks for; the text of a special token in it becomes that token.

    Raises InvalidRequestError.
    """
    num_kept = num_kept_tokens(body, max_tokens, service)
    if not isinstance(prompt, str):
        return cut_tokens(prompt, num_kept, body)
    if not num_kept:
        check_length(prompt, service)
    tokenizer = service.model.tokenizer
    encode = partial(tokenizer.encode_with_special, template=body.add_special_tokens is not False)
    with blaming("prompt"):
        if tokenizer.has_workers or len(prompt) > THREAD_CHARACTERS:
            token_ids = await service.in_worker(encode, prompt)
        else:
            token_ids = encode(prompt)
    return cut_tokens(token_ids, num_kept, body)


def cut_tokens(token_ids: list[int], num_kept: int, body: GenerationRequest) -> list[int]:
    """Return so many tokens of a prompt, from the side that `body` names; 0 is all of them."""
    is_right = num_kept and body.truncation_side == "right"
    return token_ids[:num_kept] if is_right else token_ids[-num_kept:]


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Raise InvalidRequestError, which names the field, for a text of it that has no tokens."""
    try:
        yield
    except TokenizerError as error:
        raise InvalidRequestError(f"{param}: {error}", param=param) from error


def num_kept_tokens(body: GenerationRequest, max_tokens: int, service: Service) -> int:
    """Return how many tokens of a prompt to keep; 0 is all of them. Raises InvalidRequestError.

    As many as fit beside max_tokens are the most, but for a server that cuts max_tokens to what the prompt leaves. If
    none fits, `Request.check` says so.
    """
    asked, limit = body.truncate_prompt_tokens, service.model.engine.info.max_model_len
    if asked is None:
        return 0
    left, caps = limit - max_tokens, service.options.settings.overlong_max_tokens == "cap"
    most = limit - 1 if caps or left < 1 else left
    if asked == 0 or not -1 <= asked <= most:
        message = f"truncate_prompt_tokens must be -1 or in [1, {most}], got {asked}"
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    if left < 1:
        left = most if caps else 0
    return left if asked == -1 or not left else asked


def check_length(text: str, service: Service) -> None:
    """Raise InvalidRequestError for a text that is too long for the context, before it is tokenized."""
    limit = service.model.engine.info.max_model_len
    num_bytes, max_bytes = len(text.encode()), limit * service.model.tokenizer.max_token_bytes
    if num_bytes > max_bytes:
        raise InvalidRequestError(
            f"{too_long(limit)}, which no more than {max_bytes} bytes can fit; the prompt has {num_bytes}",
            param="prompt",
            code="context_length_exceeded",
        )
