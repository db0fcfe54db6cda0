"""The two JSON shapes of a completion: OpenAI's text_completion and its chat.completion.

A Shape is a table of what differs; plan.py and sse.py write what both have. Long lists of scores are iterators, which
encoding.py renders piece by piece. Knows nothing of tokens' origin or of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gptserve.server.text.calls import call_json
from gptserve.server.text.output import Delta, RankedToken, TokenScore, token_name

Json = dict[str, object]
_REASONING = ("reasoning", "reasoning_content")
_OF_PROMPT = ("prompt_logprobs", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class Shape:
    """How to render the parts of an answer, in the shapes that schemas/ describes.

    `choice` renders a whole choice and `part` a chunk's addition to one; both put the index first. `after_choices`
    takes the first choice and renders the fields that follow the choices; those of `nulls` that it leaves out are null
    in a whole answer. `opening` renders the chunk before the first one of a choice, in shapes that have one.
    """

    id_prefix: str
    object: str
    chunk_object: str
    choice: Callable[[int, Delta], Json]
    part: Callable[[int, Delta], Json]
    after_choices: Callable[[Delta], Json]
    opening: Callable[[int], Json] | None = None
    nulls: tuple[str, ...] = ()


def _whole_text_choice(index: int, delta: Delta) -> Json:
    return _with_nulls(_text_choice(index, delta), "token_ids", *_OF_PROMPT)


def _with_nulls(given: Json, *names: str) -> Json:
    """Add null for names that are left out: vLLM's clients read its fields without asking whether they are there."""
    return {**given, **{name: None for name in names if name not in given}}


def _text_choice(index: int, delta: Delta) -> Json:
    logprobs = None if delta.logprobs is None else _parallel_lists(delta.logprobs)
    return {"index": index, "text": delta.text, "logprobs": logprobs, **_end(delta), **_of_prompt(delta)}


def _nothing(_first: Delta) -> Json:
    return {}


def _of_prompt(delta: Delta) -> Json:
    """Return vLLM's lists of the prompt's tokens that the request asked for."""
    lists: Json = {}
    if delta.prompt_logprobs is not None:
        ranked = delta.prompt_logprobs.ranked()
        lists["prompt_logprobs"] = (None if tokens is None else _by_id(tokens) for tokens in ranked)
    if delta.prompt_token_ids is not None:
        lists["prompt_token_ids"] = iter(delta.prompt_token_ids)
    return lists


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
    """Return the logprobs of the likeliest tokens and of the token itself, by name."""
    if score.logprob is None:
        return None
    top: dict[str, float] = {}
    for data, logprob in (*score.top, (score.data, score.logprob)):
        top.setdefault(token_name(data), logprob)  # of two tokens with the same name, keep the likelier
    return top


def _message_choice(index: int, delta: Delta) -> Json:
    calls: Json = {"tool_calls": list(map(call_json, delta.tool_calls))} if delta.tool_calls else {}
    content = delta.text or (None if calls else "")
    message = {"role": "assistant", "content": content, "refusal": None, **_reasoning(delta), **calls}
    choice = {"index": index, "message": _with_nulls(message, *_REASONING), "logprobs": _token_list(delta)}
    return _with_nulls({**choice, **_end(delta)}, "token_ids")


def _delta_choice(index: int, delta: Delta) -> Json:
    content: Json = {"content": delta.text} if delta.text else {}
    calls = [{"index": call.index, **call_json(call)} for call in delta.tool_calls]
    added = {**_reasoning(delta), **content, **({"tool_calls": calls} if calls else {})}
    return {"index": index, "delta": added, "logprobs": _token_list(delta), **_end(delta)}


def _opening_choice(index: int) -> Json:
    return {**_delta_choice(index, Delta("")), "delta": {"role": "assistant", "content": "", "refusal": None}}


def _reasoning(delta: Delta) -> Mapping[str, str]:
    # vLLM has renamed the field; clients read one or the other.
    return dict.fromkeys(_REASONING, delta.reasoning) if delta.reasoning else {}


def _token_list(delta: Delta) -> Json | None:
    if delta.logprobs is None:
        return None
    return {"content": map(token_with_top, delta.logprobs), "refusal": None}


def token_with_top(score: TokenScore) -> Json:
    assert score.logprob is not None  # a conversation is not echoed
    top = [_token(data, logprob) for data, logprob in score.top]
    return {**_token(score.data, score.logprob), "top_logprobs": top}


def _token(data: bytes, logprob: float) -> Json:
    return {"token": token_name(data), "logprob": logprob, "bytes": list(data)}


def _end(delta: Delta) -> Json:
    token_ids = {} if delta.token_ids is None else {"token_ids": iter(delta.token_ids)}
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason, **token_ids}


TEXT_SHAPE = Shape("cmpl-", "text_completion", "text_completion", _whole_text_choice, _text_choice, _nothing)
CHAT_SHAPE = Shape(
    id_prefix="chatcmpl-",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    choice=_message_choice,
    part=_delta_choice,
    after_choices=_of_prompt,
    opening=_opening_choice,
    nulls=_OF_PROMPT,
)
