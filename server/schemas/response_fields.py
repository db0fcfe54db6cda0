"""The fields of a response's body that ask for nothing, those that are refused in words, and its items.

As `fields.py` for completions; docs/stored-completions.md repeats UNREAD, and a test compares them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from pydantic import BaseModel

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.core.errors import show
from gptserve.server.schemas.fields import FieldReader, Unread
from gptserve.server.schemas.response_tool_fields import take_choice, take_tool
from gptserve.server.schemas.response_tools import CallOutputItem, InputPart
from gptserve.server.schemas.responses import ITEMS, InputItem, ReasoningOptions, TextFormat, TextOptions

_HINT = Unread()

UNREAD: dict[str, Unread] = {
    **dict.fromkeys(("service_tier", "safety_identifier", "stream_options", "client_metadata"), _HINT),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "max_tool_calls"), _HINT),
    **dict.fromkeys(("background_options", "access_programs", "image"), _HINT),
    "personality": Unread((), "a personality is"),
    "conversation": Unread((), "a conversation object (previous_response_id is another way) is"),
    "prompt": Unread((), "a prompt template is"),
    "context_management": Unread(([],), "compaction of the conversation is"),
    "moderation": Unread((), "moderation is"),
}
"""Fields of OpenAI's API."""

_SUMMARY = Unread(("auto", "concise", "detailed", "none"), "this summary of the reasoning is")
OF_REASONING = {
    **dict.fromkeys(("summary", "generate_summary"), _SUMMARY),
    "context": Unread(("auto",), "a choice of the reasoning that the model sees again is"),
    "mode": Unread(("standard",), "another mode of reasoning is"),
}
OF_CACHE = {
    **dict.fromkeys(("mode", "ttl", "comparison_response_id"), _HINT),
    "prewarm": Unread((False,), "filling the prompt cache without an answer is"),
}
_OF_ITEMS = dict.fromkeys(("id", "status", "phase", "summary", "encrypted_content", "caller", "async"), _HINT)
_OF_RESULTS = {**_OF_ITEMS, **dict.fromkeys(("name", "namespace"), _HINT)}  # the call with its call_id has them
_OF_PARTS = dict.fromkeys(("annotations", "logprobs", "prompt_cache_breakpoint"), _HINT)
_PART_TYPES = ("input_text", "output_text", "reasoning_text", "refusal")


def take_response_fields(
    given: Mapping[str, object], model: type[BaseModel], *, strict: bool = False
) -> tuple[dict[str, object], list[str]]:
    """Return the fields of a body that its model reads, and the names of unknown ones.

    `strict` refuses the latter. Raises InvalidRequestError.
    """
    reader = FieldReader(strict)
    taken = reader.take(given, model, UNREAD)
    reader.take_each(taken, "input", _take_item)
    reader.take_inner(reader.take_inner(taken, "text", TextOptions), "format", TextFormat, where="text.")
    reader.take_inner(taken, "reasoning", ReasoningOptions, OF_REASONING)
    if isinstance(options := given.get("prompt_cache_options"), dict):
        reader.take(options, BaseModel, OF_CACHE, "prompt_cache_options.")
    reader.take_each(taken, "tools", take_tool)
    if isinstance(choice := taken.get("tool_choice"), dict):
        taken["tool_choice"] = take_choice(choice, reader)
    return taken, list(reader.ignored)


def _take_item(where: str, item: dict[str, Any], reader: FieldReader) -> dict[str, object]:
    """Return the fields of an item. Reasoning is the assistant's, and may have nothing to read."""
    kind = _check_type(where, item, ITEMS, "an item")
    if kind is None and "role" not in item and "id" in item:
        kind, item = "item_reference", {**item, "type": "item_reference"}
    model = ITEMS.get(kind, InputItem)
    taken = reader.take(item, model, _OF_RESULTS if model is CallOutputItem else _OF_ITEMS, "input.")
    if taken.get("type") == "reasoning":
        taken = {"content": [], **taken, "role": "assistant"}
    for name in ("content", "output"):
        reader.take_each(taken, name, _take_part, f"{where}.")
    return taken


def _take_part(where: str, part: dict[str, Any], reader: FieldReader) -> dict[str, object]:
    kind = _check_type(where, part, _PART_TYPES, "a part")
    if kind == "refusal":
        if "refusal" not in part:
            name = f"{where}.refusal"
            raise InvalidRequestError(f"{name} is required", param=name, code="missing_required_parameter")
        return {"type": "output_text", "text": part["refusal"]}
    return reader.take(part, InputPart, _OF_PARTS, "input.content.")


def _check_type(where: str, given: Mapping[str, object], supported: Container[object], what: str) -> str | None:
    """Return the type if it is a text. Raises InvalidRequestError for one that is not supported."""
    kind = given.get("type")
    if not isinstance(kind, str):
        return None
    if kind not in supported:
        message = f"{where}: {what} of the type {show(kind)} is not supported by this server"
        raise InvalidRequestError(message, param=where, code="unsupported_parameter")
    return kind
