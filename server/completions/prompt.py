"""From the texts of a request to token ids: prompts, bad words. Long texts are tokenized in a thread.

`plan.py` and `chat.py` call it for completions, `api/tokenize.py` for itself. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.request import too_long
from gptserve.server.api.schemas import GenerationRequest
from gptserve.server.completions.service import Service, Tokenizer

THREAD_CHARACTERS = 2000  # about 0.5 ms of tokenizing; below that a thread costs more than it saves


async def encode_prompt(
    prompt: str | list[int], body: GenerationRequest, max_tokens: int, service: Service
) -> list[int]:
    """Return the token ids of a prompt, cut as `body` asks for. Raises InvalidRequestError."""
    num_kept = num_kept_tokens(body, max_tokens, service)
    if not isinstance(prompt, str):
        return prompt[-num_kept:]
    if not num_kept:
        check_length(prompt, service)
    tokenizer = service.tokenizer
    encode = tokenizer.encode if body.add_special_tokens is False else tokenizer.encode_prompt
    if tokenizer.has_workers:
        token_ids = await service.in_worker(encode, prompt)
    else:
        token_ids = encode(prompt) if len(prompt) <= THREAD_CHARACTERS else await asyncio.to_thread(encode, prompt)
    return token_ids[-num_kept:]


def num_kept_tokens(body: GenerationRequest, max_tokens: int, service: Service) -> int:
    """Return how many tokens of a prompt to keep, the last ones; 0 is all of them. Raises InvalidRequestError.

    As many as fit beside max_tokens are the most. If none fits, `Request.check` says so.
    """
    asked, most = body.truncate_prompt_tokens, service.engine.info.max_model_len - max_tokens
    if asked is None or most < 1:
        return 0
    if asked == 0 or not -1 <= asked <= most:
        message = f"truncate_prompt_tokens must be -1 or in [1, {most}], got {asked}"
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    return most if asked == -1 else asked


def check_length(text: str, service: Service) -> None:
    """Raise InvalidRequestError for a text that is too long for the context, before it is tokenized."""
    limit = service.engine.info.max_model_len
    num_bytes, max_bytes = len(text.encode()), limit * service.tokenizer.max_token_bytes
    if num_bytes > max_bytes:
        raise InvalidRequestError(
            f"{too_long(limit)}, which no more than {max_bytes} bytes can fit; the prompt has {num_bytes}",
            param="prompt",
            code="context_length_exceeded",
        )


async def bad_word_ids(body: GenerationRequest, service: Service) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the bad words, encoded in a thread. Raises InvalidRequestError."""
    return await service.in_worker(encode_bad_words, body.bad_words, service.tokenizer) if body.bad_words else ()


def encode_bad_words(words: Sequence[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, and those with a space before it where they begin another token.

    As vLLM: the words may begin a text or stand in it, and the text of a special token is that token.
    """
    encoded: list[tuple[int, ...]] = []
    for word in words or ():
        bare, spaced = (tuple(tokenizer.encode_with_special(space + word.lstrip())) for space in ("", " "))
        if not bare:
            raise InvalidRequestError(f"bad_words must each have a token, got {word!r}", param="bad_words")
        encoded.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            encoded.append(spaced)
    return tuple(encoded)
