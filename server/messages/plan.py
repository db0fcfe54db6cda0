"""Plans a message: its conversation becomes a chat, whose answer is written in the shape of Anthropic's Messages API.

Knows no HTTP; `api/messages.py` calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.completions.admission import in_worker_if_large, take_places
from gptserve.server.completions.chat import count_prompt_tokens, plan_chat
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.service import Service
from gptserve.server.completions.shapes import CHAT_SHAPE, Json
from gptserve.server.messages.conversation import to_chat_messages
from gptserve.server.messages.output import MessageOutput
from gptserve.server.schemas.completions import ChatRequest
from gptserve.server.schemas.messages import ClientTool, MessagesRequest, TokenCountRequest
from gptserve.server.text.output import Delta

MESSAGE_SHAPE = replace(CHAT_SHAPE, id_prefix="msg_", object="message")

# The fields of a chat that a message about one may name, and those of a message.
_NAMES = {
    "continue_final_message": "a last message of the assistant",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "].function.parameters": "].input_schema",
    "].function.": "].",
    "tool_choice.function.name": "tool_choice.name",
}
_PLACE = re.compile(r"^tools\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class MessagePlan(CompletionPlan):
    """The plan of a chat whose answer is a message."""

    shows_thinking: bool

    def new_output(self) -> MessageOutput:
        """Return the output before the first token."""
        return MessageOutput(shows_thinking=self.shows_thinking)

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Mapping[str, object]) -> Json:
        """Return the message from the deltas of its only choice."""
        output = self.new_output()
        for delta in choices[0]:
            list(output.add(delta))
        return self.message(output, usage_of(usage, output))

    def message(self, output: MessageOutput, usage: Json) -> Json:
        """Return the message so far."""
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.identity.model,
            "content": output.content(),
            "stop_reason": output.stop_reason,
            "stop_sequence": output.stop_sequence,
            "usage": usage,
            "system_fingerprint": self.identity.fingerprint,
            "batch_invariant": self.identity.batch_invariant,
            "seed": self.identity.seed,
        }


def usage_of(of_completion: Mapping[str, Any], output: MessageOutput) -> Json:
    """Return the usage; as in Anthropic's API, tokens found in the cache are counted apart from the others."""
    cached = of_completion["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": of_completion["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": of_completion["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": output.num_thinking_tokens},
    }


async def plan_message(asked: MessagesRequest, service: Service, owner: str | None) -> MessagePlan:
    """Plan the chat. Raises what `plan_chat` raises."""
    service = service.naming(asked.model)
    take_places(service, owner, 1, 1)  # before a large conversation waits for its turn
    with _own_names(asked):
        chat = await in_worker_if_large(service, _to_chat, asked, service)
        plan = await plan_chat(chat, service, owner, MESSAGE_SHAPE, overlong="cap")
    of_chat = {field.name: getattr(plan, field.name) for field in fields(CompletionPlan)}
    return MessagePlan(**of_chat, shows_thinking=asked.shows_thinking)


async def count_tokens(asked: TokenCountRequest, service: Service) -> int:
    """Return the number of tokens of the prompt. Raises what `plan_message` raises."""
    service = service.naming(asked.model)
    with _own_names(asked):
        return await count_prompt_tokens(await in_worker_if_large(service, _to_chat, asked, service), service)


def unread_budget(asked: TokenCountRequest, service: Service) -> bool:
    """Return whether the request limits a thinking that this model writes in a way that cannot be limited."""
    dialect = service.naming(asked.model).model.dialect
    has_thinking = dialect.marks is not None or dialect.think is not None
    return _budget_of(asked) is not None and has_thinking and not dialect.can_limit_reasoning


def _to_chat(asked: TokenCountRequest, service: Service) -> ChatRequest:
    _check_together(asked)
    given = asked.to_chat(to_chat_messages(asked))
    if service.model.dialect.can_limit_reasoning:
        given["thinking_token_budget"] = _budget_of(asked)
    return ChatRequest.model_validate(given)


def _budget_of(asked: TokenCountRequest) -> int | None:
    thinking = asked.thinking
    return thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None


def _check_together(asked: TokenCountRequest) -> None:
    """Raise InvalidRequestError if fields contradict each other."""
    if asked.stop is not None and asked.stop_sequences is not None:
        raise InvalidRequestError("stop and stop_sequences must not both be given", param="stop_sequences")
    if asked.output_format is not None and asked.output_config is not None and asked.output_config.format is not None:
        message = "output_format and output_config.format must not both be given"
        raise InvalidRequestError(message, param="output_config.format")
    thinking, choice = asked.thinking, asked.tool_choice
    if thinking is not None and thinking.budget_tokens is None and thinking.type == "enabled":
        message = "thinking.budget_tokens must be given with the type enabled"
        raise InvalidRequestError(message, param="thinking.budget_tokens")
    if choice is not None and (choice.name is None) == (choice.type == "tool"):
        rule = "must be given" if choice.type == "tool" else "may be given only"
        raise InvalidRequestError(f"tool_choice.name {rule} with the type tool", param="tool_choice.name")


@contextmanager
def _own_names(asked: TokenCountRequest) -> Iterator[None]:
    """Let errors about the chat name the fields of the message."""
    try:
        yield
    except InvalidRequestError as error:
        message = str(error)
        for name, own in _NAMES.items():
            message = message.replace(name, own)
        kept = [i for i, tool in enumerate(asked.tools or ()) if isinstance(tool, ClientTool)]
        message = _PLACE.sub(lambda found: f"tools[{kept[int(found[1])]}]", message)
        raise InvalidRequestError(message, param=error.param, code=error.code) from error
