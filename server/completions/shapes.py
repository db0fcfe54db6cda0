"""How a completion is written: as OpenAI's text_completion or as its chat.completion.

Each is a table of the few things that differ; what they have in common is in completion.py and sse.py. The scores of
many tokens are given as iterators, for encoding.py to render piece by piece. Knows nothing of how the text came to be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gptserve.server.completions.output import Delta, RankedToken, TokenScore, token_name

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Shape:
    """`choice` renders a whole choice as schemas.py has it, `part` what a chunk adds to one; both put the index first.

    `beside` renders what an answer has beside its choices, of which it is given the first; `opening` what comes before
    the first chunk of a choice, for the shapes that have such a thing.
    """

    id_prefix: str
    object: str
    chunk_object: str
    choice: Callable[[int, Delta], Json]
    part: Callable[[int, Delta], Json]
    beside: Callable[[Delta], Json]
    opening: Callable[[int], Json] | None = None


def _text_choice(index: int, delta: Delta) -> Json:
    logprobs = None if delta.logprobs is None else _parallel_lists(delta.logprobs)
    return {"index": index, "text": delta.text, "logprobs": logprobs, **_end(delta), **_prompt_logprobs(delta)}


def _nothing(_first: Delta) -> Json:
    return {}


def _prompt_logprobs(delta: Delta) -> Json:
    """Return vLLM's list of the prompt's tokens, where it was asked for."""
    if delta.prompt_logprobs is None:
        return {}
    ranked = delta.prompt_logprobs.ranked()
    return {"prompt_logprobs": (None if tokens is None else _by_id(tokens) for tokens in ranked)}


def _by_id(ranked: Sequence[RankedToken]) -> Json:
    return {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": token_name(data)}
        for token_id, data, logprob, rank in ranked
    }


def _parallel_lists(scores: Sequence[TokenScore]) -> Json:
    return {
        "tokens": (token_name(score.data) for score in scores),
        "token_logprobs": (score.logprob for score in scores),
        "top_logprobs": (_top_by_name(score) for score in scores),
        "text_offset": (score.offset for score in scores),
    }


def _top_by_name(score: TokenScore) -> dict[str, float] | None:
    """Return the likeliest tokens and the token itself."""
    if score.logprob is None:
        return None
    top: dict[str, float] = {}
    for data, logprob in (*score.top, (score.data, score.logprob)):
        top.setdefault(token_name(data), logprob)  # of two tokens of one name the likelier: the maximum is never lost
    return top


def _message_choice(index: int, delta: Delta) -> Json:
    message = {"role": "assistant", "content": delta.text, **_reasoning(delta)}
    return {"index": index, "message": message, "logprobs": _token_list(delta), **_end(delta)}


def _delta_choice(index: int, delta: Delta) -> Json:
    content = {"content": delta.text} if delta.text else {}
    return {"index": index, "delta": {**_reasoning(delta), **content}, "logprobs": _token_list(delta), **_end(delta)}


def _opening_choice(index: int) -> Json:
    return {**_delta_choice(index, Delta("")), "delta": {"role": "assistant", "content": ""}}


def _reasoning(delta: Delta) -> Mapping[str, str]:
    return {"reasoning_content": delta.reasoning} if delta.reasoning else {}


def _token_list(delta: Delta) -> Json | None:
    if delta.logprobs is None:
        return None
    return {"content": map(_token_with_top, delta.logprobs)}


def _token_with_top(score: TokenScore) -> Json:
    assert score.logprob is not None  # a conversation is not echoed
    top = [_token(data, logprob) for data, logprob in score.top]
    return {**_token(score.data, score.logprob), "top_logprobs": top}


def _token(data: bytes, logprob: float) -> Json:
    return {"token": token_name(data), "logprob": logprob, "bytes": list(data)}


def _end(delta: Delta) -> Json:
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}


TEXT_SHAPE = Shape("cmpl", "text_completion", "text_completion", _text_choice, _text_choice, _nothing)
CHAT_SHAPE = Shape(
    id_prefix="chatcmpl",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    choice=_message_choice,
    part=_delta_choice,
    beside=_prompt_logprobs,
    opening=_opening_choice,
)
