"""From bad words to the tokens that an answer must not have. `plan.py` and `chat.py` call it. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.completions.prompt import blaming
from gptserve.server.completions.service import Service
from gptserve.server.core.tokenizer import Tokenizer
from gptserve.server.schemas.completions import GenerationRequest


async def bad_word_ids(body: GenerationRequest, service: Service) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the bad words, encoded in a thread. Raises InvalidRequestError."""
    return await service.in_worker(encode_bad_words, body.bad_words, service.model.tokenizer) if body.bad_words else ()


def encode_bad_words(words: Sequence[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, and those with a space before it where they begin another token.

    As vLLM: the words may begin a text or stand in it, and the text of a special token is that token.
    """
    encoded: list[tuple[int, ...]] = []
    for word in words or ():
        with blaming("bad_words"):
            bare, spaced = (tuple(tokenizer.encode_with_special(space + word.lstrip())) for space in ("", " "))
        if not bare:
            raise InvalidRequestError(f"bad_words must each have a token, got {word!r}", param="bad_words")
        encoded.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            encoded.append(spaced)
    return tuple(encoded)
