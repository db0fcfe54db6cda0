"""Plans a response: the conversation it continues and its input become a chat, whose answer is written as a response.

Knows no HTTP; `api/responses.py` calls it, and the store to restore what it keeps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from pydantic import BaseModel

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.completions.admission import in_worker_if_large, take_places
from gptserve.server.completions.chat import count_prompt_tokens, plan_chat
from gptserve.server.completions.identity import Identity
from gptserve.server.completions.model import Model
from gptserve.server.completions.plan import CompletionPlan, restore_plan
from gptserve.server.completions.service import Service
from gptserve.server.completions.shapes import CHAT_SHAPE, Json
from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.job import BackgroundRequest
from gptserve.server.responses.output import ItemStatus, ResponseOutput
from gptserve.server.responses.tools import ResponseTools
from gptserve.server.responses.truncation import truncations
from gptserve.server.schemas.completions import ChatRequest
from gptserve.server.schemas.response_tools import CallItem, CallOutputItem, CustomCallItem, HostedTool, InputPart
from gptserve.server.schemas.responses import InputItem, Item, ItemReference, StoredRequest
from gptserve.server.text.output import Delta
from gptserve.weights.errors import ChatTemplateError
from gptserve.weights.generation import SAMPLING_DEFAULTS

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

RESPONSE_SHAPE = replace(CHAT_SHAPE, id_prefix="resp_", object="response")

_ITEM_STATUSES: dict[Status, ItemStatus] = {
    "queued": "in_progress",
    "in_progress": "in_progress",
    "completed": "completed",
}
# The fields of a chat that a message about one may name, and those of a response.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "].function.": "].",
    "tool_choice.allowed_tools.": "tool_choice.",
}
_PLACE = re.compile(r"^tools\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class ResponsePlan(CompletionPlan):
    """The plan of a chat, with the request for the response that it makes."""

    asked: StoredRequest

    def new_output(self) -> ResponseOutput:
        """Return the output before the first token."""
        tools = ResponseTools(self.asked.tools)
        return ResponseOutput(self.identity.completion_id, tools, marks_reasoning=self.reading is not None)

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Mapping[str, object]) -> Json:
        """Return the response that has ended well, from the deltas of its only choice."""
        output = self.new_output()
        for delta in choices[0]:
            list(output.add(delta))
        return self.response(end_status(output), output, usage)

    def response(
        self,
        status: Status,
        output: ResponseOutput | None = None,
        usage: Mapping[str, object] | None = None,
        error: str | None = None,
    ) -> Json:
        """Return the response object; `usage` is that of a completion."""
        return {
            "id": self.identity.completion_id,
            "object": "response",
            "created_at": self.identity.created,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [] if output is None else output.items(_ITEM_STATUSES.get(status, "incomplete")),
            "usage": None if usage is None or output is None else _to_usage(usage, output),
            "model": self.identity.model,
            "system_fingerprint": self.identity.fingerprint,
            "batch_invariant": self.identity.batch_invariant,
            "seed": self.identity.seed,
            **_echo(self.asked),
        }


def _echo_tool(tool: BaseModel) -> Json:
    """Return a tool as OpenAI's client reads it: the description of a namespace is a text, given or not."""
    told = tool.model_dump()
    return {**told, "description": told["description"] or ""} if told["type"] == "namespace" else told


def _echo(asked: StoredRequest) -> Json:
    """Return the fields of the request that a response repeats, and the values of those that have no other."""
    text = {} if asked.text is None else asked.text.model_dump(by_alias=True, exclude_unset=True)
    reasoning = {} if asked.reasoning is None else asked.reasoning.model_dump()
    choice = asked.tool_choice
    same = ("instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p", "user")
    return {
        **{name: getattr(asked, name) for name in same},
        "top_logprobs": asked.top_logprobs or 0,
        "text": {"format": {"type": "text"}, **text},
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "metadata": asked.metadata or {},
        "store": asked.store is not False,
        "background": bool(asked.background),
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
        "tools": [_echo_tool(tool) for tool in asked.tools or () if not isinstance(tool, HostedTool)],
        "truncation": asked.truncation or "disabled",
    }


def _to_usage(of_completion: Mapping[str, Any], output: ResponseOutput) -> Json:
    cached = of_completion["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": of_completion["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": of_completion["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": output.num_reasoning_tokens},
        "total_tokens": of_completion["total_tokens"],
    }


def end_status(output: ResponseOutput) -> Status:
    """Return the status of a response that ended well."""
    return "completed" if output.finish_reason in ("stop", "tool_calls") else "incomplete"


async def plan_response(
    asked: StoredRequest,
    background: BackgroundRequest | None,
    service: Service,
    owner: str | None,
) -> ResponsePlan:
    """Plan the chat. `background` is the request for it if it is kept. Raises what `plan_chat` raises."""
    tools = ResponseTools(asked.tools)
    of_chat = tools.to_chat(asked.tool_choice)
    with _own_names(tools):
        plan = await _plan_chat(asked, of_chat, background, service, owner)
    in_force = {name: getattr(plan.requests[0].params, name) for name in SAMPLING_DEFAULTS}
    return _of_chat(plan, asked.model_copy(update=in_force))


async def count_input_tokens(asked: StoredRequest, service: Service) -> int:
    """Return the number of tokens of the prompt, of all that was said. Raises what `plan_response` raises."""
    tools, items = ResponseTools(asked.tools), [*asked.earlier, *input_items(asked)]
    of_chat = tools.to_chat(asked.tool_choice)
    with _own_names(tools):
        chat = await in_worker_if_large(service, _to_chat, asked, of_chat, items)
        return await count_prompt_tokens(chat, service)


@contextmanager
def _own_names(tools: ResponseTools) -> Iterator[None]:
    """Let errors about the chat name the fields of the response."""
    try:
        yield
    except ChatTemplateError as error:
        raise ServiceError("invalid_chat_template_input", str(error), param="input") from error
    except InvalidRequestError as error:
        param, message = error.param, str(error)
        for name, own in _NAMES.items():
            message = message.replace(name, own)
        message = _PLACE.sub(lambda found: tools.place(int(found[1])), message)
        own_param = "input" if param == "prompt" else _NAMES.get(param or "", param)
        raise InvalidRequestError(message, param=own_param, code=error.code) from error


async def _plan_chat(
    asked: StoredRequest,
    tools: Json,
    background: BackgroundRequest | None,
    service: Service,
    owner: str | None,
) -> CompletionPlan:
    """Plan the chat; with truncation auto without as many of its oldest items as make it fit."""

    async def plan(make: Callable[..., ChatRequest], *arguments: object) -> CompletionPlan:
        chat = await in_worker_if_large(service, make, *arguments)
        if background is not None:
            chat = background.seeded(chat)
        return await plan_chat(chat, service, owner, RESPONSE_SHAPE)

    service = service.naming(asked.model)
    take_places(service, owner, 1, 1)  # before a large conversation waits for its turn
    items = [*asked.earlier, *input_items(asked)]
    try:
        return await plan(_to_chat, asked, tools, items)
    except InvalidRequestError as error:
        if asked.truncation != "auto" or error.code != "context_length_exceeded":
            raise
        too_long = error
    last, shortened = await in_worker_if_large(service, truncations, items)
    first, found = 1, None
    while first <= last:  # the first that fits, by halves: the templates of some models take long
        middle = (first + last) // 2
        try:
            found = await plan(lambda step: _to_chat(asked, tools, shortened(step)), middle)
            last = middle - 1
        except InvalidRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            first = middle + 1
    if found is None:
        raise too_long
    return found


def _to_chat(asked: StoredRequest, tools: Json, items: Sequence[Item]) -> ChatRequest:
    return ChatRequest.model_validate({**asked.to_chat(_to_messages(asked.instructions, items)), **tools})


def restore_response(
    stored: dict[str, object],
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    identity: Identity,
    kept: Mapping[str, object] | None,
    model: Model,
) -> ResponsePlan:
    """Rebuild the plan of a response from its body and the tokens of its prompt, as `restore_plan` does."""
    asked = StoredRequest.model_validate(stored)
    chat = asked.to_chat([{"role": "user", "content": ""}]) | ResponseTools(asked.tools).to_chat(asked.tool_choice)
    plan = restore_plan(
        chat,
        prompts,
        max_tokens,
        identity,
        kept,
        model,
        schema=ChatRequest,
        shape=RESPONSE_SHAPE,
    )
    return _of_chat(plan, asked)


def _of_chat(plan: CompletionPlan, asked: StoredRequest) -> ResponsePlan:
    return ResponsePlan(**{field.name: getattr(plan, field.name) for field in fields(CompletionPlan)}, asked=asked)


def input_items(asked: StoredRequest) -> list[Item]:
    """Return the items of the input; a text is a message of the user."""
    if isinstance(asked.input, str):
        return [InputItem(role="user", content=asked.input)]
    return [item for item in asked.input if not isinstance(item, ItemReference)]  # those are resolved before


def output_items(response: Mapping[str, Any]) -> list[Item]:
    """Return the output of a response as items of an input."""
    items: list[Item] = []
    for item in response["output"]:
        if item["type"] == "function_call":
            items.append(CallItem.model_validate(_without_status(item)))
        elif item["type"] == "custom_tool_call":
            items.append(CustomCallItem.model_validate(_without_status(item)))
        else:
            parts = [InputPart(type=part["type"], text=part["text"]) for part in item["content"]]
            items.append(InputItem(type=item["type"], role="assistant", content=parts))
    return items


def _without_status(item: Mapping[str, Any]) -> Json:
    return {name: value for name, value in item.items() if name not in ("id", "status")}


def _to_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages of the conversation.

    Reasoning belongs to the assistant's message after it, or is one without content. Calls and the text beside them are
    one message.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    reasoning: list[str] = []
    for item in items:
        message = _to_message(item)
        if isinstance(item, InputItem) and item.type == "reasoning":
            reasoning += [part["text"] for part in message["content"]]
            continue
        if reasoning and message["role"] != "assistant":  # the answer was cut off before its text
            messages.append({"role": "assistant", "content": [], "reasoning": reasoning})
        if message["role"] == "assistant":
            message["reasoning"] = reasoning
        reasoning = []
        last = messages[-1] if messages else {}
        is_one_turn = message["role"] == last.get("role") == "assistant"
        if is_one_turn and ("tool_calls" in message or "tool_calls" in last):
            for name in ("content", "reasoning", "tool_calls"):
                last.setdefault(name, []).extend(message.get(name, ()))
        else:
            messages.append(message)
    for message in messages:
        if thoughts := message.pop("reasoning", None):
            message["reasoning_content"] = "\n".join(thoughts)
    return messages


def _to_message(item: Item) -> dict[str, Any]:
    """Return the message that an item is by itself; its lists are new."""
    if isinstance(item, CallItem | CustomCallItem):
        return {"role": "assistant", "content": [], "tool_calls": [item.to_chat()]}
    content = item.output if isinstance(item, CallOutputItem) else item.content
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    parts = [{"type": "text", "text": text} for text in texts]
    if isinstance(item, CallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": parts}
    return {"role": item.role, "content": parts}
