"""Plans a chat: the model's template turns the conversation into a prompt; the rest is a completion like any other.

Knows no HTTP; `api/completions.py` calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.request import SamplingParams
from gptserve.server.api.schemas import ChatRequest
from gptserve.server.completions import plan
from gptserve.server.completions.harmony import HarmonyChannels, Mark
from gptserve.server.completions.service import Service, Tokenizer
from gptserve.server.completions.shapes import CHAT_SHAPE
from gptserve.server.errors import ServiceError
from gptserve.weights.chat.template import ChatTemplate

NO_TEMPLATE = (
    "this model has no chat template: it continues text, for which there is /v1/completions; to chat with it all the "
    "same, start the server with --chat-template FILE or --chat-template plain"
)
OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


async def plan_chat(body: ChatRequest, service: Service, marks: Mapping[int, Mark] | None) -> plan.CompletionPlan:
    """Check, render the conversation and tokenize. Raises ServiceError, InvalidRequestError or ChatTemplateError.

    `marks` are the special tokens of a model that answers in harmony's channels.
    """
    template = service.options.chat_template
    if template is None:
        raise ServiceError("no_chat_template", NO_TEMPLATE)
    plan.check_request(body, service, 1)
    _check_together(body)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = _sampling_params(body, 1 if max_tokens is None else max_tokens)
    try:
        # A template may take long however short the conversation is.
        prompt, channels = await asyncio.to_thread(_encode, body, template, service, marks)
        if max_tokens is None:
            params = replace(params, max_tokens=max(1, service.engine.info.max_model_len - len(prompt)))
        plan.check_size(body, params, [prompt], service)
        identity = plan.new_identity(CHAT_SHAPE, body, service)
        planned = plan.make_plan(body, CHAT_SHAPE, [prompt], params, identity, channels=channels)
        planned.requests[0].check(service.engine.info)
    except InvalidRequestError as error:
        given = {
            "prompt": "messages",
            "max_tokens": "max_tokens" if body.max_tokens else "max_completion_tokens",
            "logprobs": "top_logprobs" if body.top_logprobs else "logprobs",
        }
        raise InvalidRequestError(str(error), param=given.get(error.param, error.param), code=error.code) from error
    return planned


def restore_chat(
    fields: dict[str, object],
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    identity: plan.Identity,
    *,
    tokenizer: Tokenizer,
    marks: Mapping[int, Mark] | None,
) -> plan.CompletionPlan:
    """Rebuild the plan of a chat from its body and prompt. To render again could differ: templates know the date."""
    body = ChatRequest.model_validate(fields)
    channels = None if marks is None else HarmonyChannels(marks)
    for prompt in prompts:
        if channels is not None:
            channels.follow(prompt, tokenizer)
    return plan.make_plan(body, CHAT_SHAPE, prompts, _sampling_params(body, max_tokens), identity, channels=channels)


def _sampling_params(body: ChatRequest, max_tokens: int) -> SamplingParams:
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return body.sampling_params(logprobs=logprobs, max_tokens=max_tokens)


def _encode(
    body: ChatRequest, template: ChatTemplate, service: Service, marks: Mapping[int, Mark] | None
) -> tuple[tuple[int, ...], HarmonyChannels | None]:
    """Return the prompt and the channels at its end. The template has put in all special tokens, so add none."""
    continues, adds = bool(body.continue_final_message), body.add_generation_prompt
    text = template.render(
        [message.to_template() for message in body.messages],
        body.chat_template_kwargs or {},
        add_generation_prompt=not continues if adds is None else adds,
        continue_final_message=continues,
    )
    plan.check_length(text, service)
    prompt = tuple(service.tokenizer.encode_with_special(text))
    return prompt, None if marks is None else HarmonyChannels(marks).follow(prompt, service.tokenizer)


def _check_together(body: ChatRequest) -> None:
    """Raise InvalidRequestError if fields contradict each other."""
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        message = (
            f"max_completion_tokens must be max_tokens, which is {body.max_tokens}, got {body.max_completion_tokens}"
        )
        raise InvalidRequestError(message, param="max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs may be given only with logprobs true", param="top_logprobs")
    if body.continue_final_message and body.add_generation_prompt:
        message = "continue_final_message must not be true together with add_generation_prompt"
        raise InvalidRequestError(message, param="continue_final_message")
    taken = OWN_VARIABLES.intersection(body.chat_template_kwargs or ())
    if taken:
        message = f"chat_template_kwargs must not hold {min(taken)}, which the server gives"
        raise InvalidRequestError(message, param="chat_template_kwargs")
