"""Plans a chat: the model's template turns the conversation into a prompt; the rest is a completion like any other.

Knows no HTTP; `api/completions.py` calls it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.completions import plan
from gptserve.server.completions.bad_words import bad_word_ids
from gptserve.server.completions.checks import check_request, check_size
from gptserve.server.completions.grammar import check_compiles, check_grammar
from gptserve.server.completions.identity import new_identity
from gptserve.server.completions.lengths import Overlong, asked_max_tokens, fit_max_tokens
from gptserve.server.completions.prompt import blaming, check_length, cut_tokens, num_kept_tokens
from gptserve.server.completions.roles import check_roles
from gptserve.server.completions.service import Service
from gptserve.server.completions.shapes import CHAT_SHAPE, Shape
from gptserve.server.core.errors import ServiceError
from gptserve.server.schemas.chat import Conversation
from gptserve.server.schemas.completions import ChatRequest
from gptserve.server.schemas.grammar import asked_grammar
from gptserve.server.schemas.seed import choose_seed, engine_seed
from gptserve.server.tools.dialect import Reading
from gptserve.server.tools.grammar import fault_of_function
from gptserve.server.tools.request import asked_tools

NO_TEMPLATE = (
    "this model has no chat template: it continues text, for which there is /v1/completions; to chat with it all the "
    "same, start the server with --chat-template FILE or --chat-template plain"
)
OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


async def plan_chat(
    body: ChatRequest,
    service: Service,
    owner: str | None,
    shape: Shape = CHAT_SHAPE,
    *,
    overlong: Overlong | None = None,
) -> plan.CompletionPlan:
    """Check, render the conversation and tokenize. Raises ServiceError, InvalidRequestError or ChatTemplateError.

    `overlong` says what becomes of max_tokens beyond the context; None is the server's setting.
    """
    service = service.naming(body.model)
    model = service.model
    check_conversation(body, service)
    check_request(body, service, owner, 1)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs may be given only with logprobs true", param="top_logprobs")
    model.dialect.check(body)
    grammar = await check_grammar(body, service)
    max_tokens = asked_max_tokens(body)
    params = body.sampling_params(
        model.sampling_defaults,
        bad_words=await bad_word_ids(body, service),
        max_tokens=model.engine.info.max_model_len if max_tokens is None else max_tokens,
        grammar=grammar,
    )
    try:
        num_kept = num_kept_tokens(body, max_tokens or 1, service)
        # A template may take long however short the conversation is, and so may the schemas of tools.
        prompt, reading = await service.in_worker(_prepare, body, service, num_kept)
        if reading is not None and reading.grammar is not None:
            await _check_reading(reading, body, service)
            params = replace(params, grammar=reading.grammar)
        params = fit_max_tokens(params, max_tokens, len(prompt), service, most=model.max_new_tokens, overlong=overlong)
        check_size(body, params, [prompt], service)
        identity = new_identity(shape, body, service, owner)
        planned = plan.make_plan(body, shape, model, [prompt], params, identity, reading=reading, dialect=model.dialect)
        replace(planned.requests[0], generated_token_ids=()).check(model.engine.info)  # they may be all
    except InvalidRequestError as error:
        given = {
            "prompt": "messages",
            "max_tokens": "max_tokens" if body.max_tokens else "max_completion_tokens",
            "logprobs": "top_logprobs" if body.top_logprobs else "logprobs",
        }
        raise InvalidRequestError(str(error), param=given.get(error.param, error.param), code=error.code) from error
    # The messages have become the prompt, and parsed they take up to ten times the bytes that were sent.
    return replace(planned, body=body.model_copy(update={"messages": []}))


async def count_prompt_tokens(body: ChatRequest, service: Service) -> int:
    """Return the number of tokens of a chat's prompt. Raises what `plan_chat` raises for a body that it refuses."""
    service = service.naming(body.model)
    engine_seed(choose_seed(body.seed))
    body.sampling_params(service.model.sampling_defaults, bad_words=(), max_tokens=1)
    check_conversation(body, service)
    service.model.dialect.check(body)
    encode = partial(encode_conversation, body, service, add_special=bool(body.add_special_tokens))
    return len(await service.in_worker(encode))


async def _check_reading(reading: Reading, body: ChatRequest, service: Service) -> None:
    """Raise InvalidRequestError unless the grammar of an answer compiles; name the function at fault."""
    asked, name = asked_tools(body), asked_grammar(body)[0]
    assert reading.grammar is not None
    try:
        await check_compiles("tools" if asked is not None else name, reading.grammar, service)
    except InvalidRequestError as error:
        fault = None if asked is None else fault_of_function(str(error), reading.grammar, asked)
        if fault is None:
            raise
        raise InvalidRequestError(fault, param="tools") from error


def _prepare(body: ChatRequest, service: Service, num_kept: int) -> tuple[tuple[int, ...], Reading | None]:
    """Return the prompt, of at most num_kept tokens unless that is 0, and how to read the answers to it."""
    add_special = bool(body.add_special_tokens)
    token_ids = encode_conversation(body, service, add_special=add_special, is_cut=num_kept > 0)
    prompt = tuple(cut_tokens(token_ids, num_kept, body))
    return prompt, service.model.dialect.reading(body, prompt)


def encode_conversation(body: Conversation, service: Service, *, add_special: bool, is_cut: bool = False) -> list[int]:
    """Return the tokens of a conversation. The template puts in special tokens; add_special adds the tokenizer's own.

    A text that is not to be cut must not be too long. Takes long. Raises ChatTemplateError or InvalidRequestError.
    """
    template = service.model.chat_template
    assert template is not None, "check_conversation has seen it"
    continues, adds = bool(body.continue_final_message), body.add_generation_prompt
    render = partial(
        template.render,
        variables=body.template_variables(),
        tools=body.template_tools(),
        add_generation_prompt=not continues if adds is None else adds,
        continue_final_message=continues,
    )
    messages = [message.to_template() for message in body.messages]
    text = render(messages)
    check_roles(messages, render)
    if not is_cut:
        check_length(text, service)
    with blaming("messages"):
        return service.model.tokenizer.encode_with_special(text, template=add_special)


def check_conversation(body: Conversation, service: Service) -> None:
    """Raise ServiceError without a template, InvalidRequestError if the fields for it contradict each other."""
    if service.model.chat_template is None:
        raise ServiceError("no_chat_template", NO_TEMPLATE)
    if body.continue_final_message and body.add_generation_prompt:
        message = "continue_final_message must not be true together with add_generation_prompt"
        raise InvalidRequestError(message, param="continue_final_message")
    taken = OWN_VARIABLES.intersection(body.chat_template_kwargs or ())
    if taken:
        message = f"chat_template_kwargs must not hold {min(taken)}, which the server gives"
        raise InvalidRequestError(message, param="chat_template_kwargs")
