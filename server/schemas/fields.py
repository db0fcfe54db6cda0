"""The fields of a body that its model does not have: which ask for nothing, which are refused, which are let through.

Clients send many fields that do not change the answer. A field that would change it, and is not supported, is refused
in words. A field that no table knows is let through and its name is reported, unless it looks like a typo.
`read_body` calls `take_fields` before pydantic checks the rest. docs/api.md repeats UNREAD; a test compares them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

from pydantic import BaseModel

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.core.errors import show
from gptserve.server.schemas.chat import ROLES, Message, RefusalPart, TextPart
from gptserve.server.schemas.completions import ChatRequest, CompletionRequest, StreamOptions
from gptserve.server.schemas.grammar import NamedSchema, ResponseFormat, StructuredOutputs
from gptserve.server.schemas.tools import (
    AllowedChoice,
    AllowedTools,
    Function,
    FunctionCall,
    FunctionName,
    NamedTool,
    Tool,
    ToolCall,
)

MAX_IGNORED = 64  # each costs a search for similar names; no client sends as many
_MAX_SHOWN = 20  # names in the response header
_MAX_NAME = 60  # characters of each


class Take(Protocol):
    """`take_fields`, or what takes its place on another route."""

    def __call__(
        self, given: Mapping[str, object], model: type[BaseModel], *, strict: bool = False
    ) -> tuple[dict[str, object], list[str]]: ...


_Models = tuple[type[BaseModel], type[BaseModel]]
Value = bool | int | float | str | list[str] | dict[str, str]


@dataclass(frozen=True, slots=True)
class Unread:
    """A field that the server knows and does not read. Only its `neutral` values, and null, ask for nothing.

    Without a `lack`, every value asks for nothing. With one, it says what other values ask for.
    """

    neutral: tuple[Value, ...] = ()
    lack: str = ""


_HINT = Unread()
_NONE: Mapping[str, Unread] = {}
_FUNCTIONS, _BEAMS = "an older spelling of tools is", "beam search is"
_FORMAT = "this way to ask for structured output (response_format and structured_outputs are others) is"
_TEMPLATE, _MEDIA = "a chat template of the request is", "media other than text are"

UNREAD: dict[str, Unread] = {
    **dict.fromkeys(("store", "metadata", "service_tier", "safety_identifier", "prediction"), _HINT),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"), _HINT),
    "functions": Unread(([],), _FUNCTIONS),
    "function_call": Unread(("none", "auto"), _FUNCTIONS),
    "web_search_options": Unread((), "web search is"),
    "moderation": Unread((), "moderation is"),
    **dict.fromkeys(("structural_tag", "grammar", "json_schema", "regex", "ebnf"), Unread((), _FORMAT)),
    "guided_decoding_backend": _HINT,
    "modalities": Unread((["text"],), _MEDIA),
    "audio": Unread((), _MEDIA),
    "mm_processor_kwargs": Unread(({},), _MEDIA),
    "media_io_kwargs": Unread(({},), _MEDIA),
    "suffix": Unread(("",), "a suffix is"),
    "use_beam_search": Unread((False,), _BEAMS),
    "length_penalty": Unread((1,), _BEAMS),
    "early_stopping": Unread((False,), _BEAMS),
    "documents": Unread(([],), "a list of documents is"),
    "chat_template": Unread((), _TEMPLATE),
    "include_reasoning": Unread((True,), "leaving out the reasoning is"),
    "logits_processors": Unread(([],), "a processor of logits is"),
    "prompt_embeds": Unread((), "a prompt of embeddings is"),
    "kv_transfer_params": Unread(({},), "transfer of the KV cache is"),
    "ec_transfer_params": Unread(({},), "transfer of an encoder's cache is"),
    "watermarking": Unread((False,), "a watermark is"),
    "logprob_token_ids": Unread((), "a choice of the tokens with logprobs is"),
    "repetition_detection": Unread((), "an end at repetitions is"),
    "return_prompt_text": Unread((False,), "the text of the prompt in an answer is"),
    **dict.fromkeys(("session_id", "stream_interval", "return_token_offsets", "return_mm_kwargs"), _HINT),
    "routed_experts_prompt_start": _HINT,
    "vllm_xargs": Unread(({},), "an argument of vLLM's plugins is"),
}
"""Fields of OpenAI's API, of vLLM and of others."""

_OF_OUTPUTS = {
    **dict.fromkeys(("disable_fallback", "backend"), _HINT),
    "disable_additional_properties": Unread((False,), "closing the objects of a schema is"),
    "structural_tag": Unread((), "a structural tag is"),
}
_OF_STREAM_OPTIONS = {"include_obfuscation": _HINT}
_OF_MESSAGES = {
    **dict.fromkeys(("type", "id", "annotations", "provider_specific_fields"), _HINT),
    "audio": Unread(({},), _MEDIA),
}
_OF_CALLS = {"index": _HINT}
_OF_PARTS = dict.fromkeys(("cache_control", "prompt_cache_breakpoint", "annotations", "logprobs", "id"), _HINT)

FOREIGN = frozenset(
    {
        # transformers and text-generation-inference
        *("max_new_tokens", "min_new_tokens", "max_length", "min_length", "no_repeat_ngram_size", "num_beams"),
        *("do_sample", "watermark", "truncate", "top_n_tokens", "return_full_text", "decoder_input_details"),
        # llama.cpp and Ollama
        *("repeat_penalty", "repeat_last_n", "n_predict", "num_predict", "num_ctx", "n_keep", "cache_prompt"),
        *("typical_p", "tfs_z", "top_a", "mirostat", "mirostat_tau", "mirostat_eta", "penalize_nl"),
        *("reasoning_format", "parse_tool_calls", "min_keep", "return_tokens"),
        # text-generation-webui, whose fields SillyTavern sends, and OpenRouter
        *("mode", "truncation_length", "temperature_last", "models"),
        # Anthropic, Mistral and SGLang
        *("stop_sequences", "thinking", "random_seed", "safe_prompt", "separate_reasoning", "stream_reasoning"),
    }
)
"""Fields of other APIs that resemble ours and are no slips of the pen."""

_ROUTES = (CompletionRequest, ChatRequest)


@dataclass(slots=True)
class FieldReader:
    """Reads one body, and collects the names that are let through."""

    strict: bool
    ignored: dict[str, None] = field(default_factory=dict)

    def take(
        self, given: Mapping[str, object], model: type[BaseModel], unread: Mapping[str, Unread], where: str = ""
    ) -> dict[str, object]:
        """Return the fields that `model` has; null is the same as no field. Raises InvalidRequestError."""
        taken: dict[str, object] = {}
        fields = {about.alias or name for name, about in model.model_fields.items()}
        for name, value in given.items():
            if value is None:
                continue
            if name in fields:
                taken[name] = _whole(value)
            elif name in unread:
                _check_neutral(unread[name], where + name, value)
            else:
                self._ignore(where + name, value, (*fields, *unread))
        return taken

    def take_inner(
        self,
        holder: dict[str, object],
        name: str,
        model: type[BaseModel],
        unread: Mapping[str, Unread] = _NONE,
        where: str = "",
    ) -> dict[str, object]:
        """Take the fields of the object that `holder` has under this name, and return them; none if it is no object."""
        if not isinstance(given := holder.get(name), dict):
            return {}
        holder[name] = taken = self.take(given, model, unread, f"{where}{name}.")
        return taken

    def take_each(
        self,
        holder: dict[str, object],
        name: str,
        take: Callable[[str, dict[str, Any], FieldReader], object],
        where: str = "",
    ) -> None:
        """Replace the objects in the list that `holder` has under this name by what `take` makes of each.

        It gets where the object stands, the object and this reader.
        """
        if isinstance(entries := holder.get(name), list):
            holder[name] = [
                take(f"{where}{name}[{i}]", entry, self) if isinstance(entry, dict) else entry
                for i, entry in enumerate(entries)
            ]

    def leave_out(self, name: str, message: str) -> None:
        """Name what is left out of the prompt; if strict, refuse it with the message. Raises InvalidRequestError."""
        if self.strict:
            raise InvalidRequestError(message, param=name, code="unsupported_parameter")
        self._check_room(name)
        self.ignored[name] = None

    def _check_room(self, name: str) -> None:
        if len(self.ignored) == MAX_IGNORED and name not in self.ignored:
            raise _unknown(f"the body may have at most {MAX_IGNORED} unknown fields", show(name)[1:-1])

    def _ignore(self, name: str, value: object, known: Iterable[str]) -> None:
        if name in self.ignored:
            return
        shown = show(name)[1:-1]
        if any(name in route.model_fields for route in _ROUTES):
            if value is False:  # of a switch that is off, as vLLM's clients send echo with chats
                return
            raise _unknown(f"{shown} is not a field of this route", shown)
        if self.strict:
            raise _unknown(f"unknown field {shown}, got {show(value)}", shown)
        self._check_room(name)
        where, dot, last = name.rpartition(".")
        similar = difflib.get_close_matches(last[:_MAX_NAME], known, n=1, cutoff=0.75)
        if similar and last not in FOREIGN:
            raise _unknown(f"unknown field {shown}; did you mean {where}{dot}{similar[0]}?", shown)
        self.ignored[name] = None


def take_fields(
    given: Mapping[str, object], model: type[BaseModel], *, strict: bool = False
) -> tuple[dict[str, object], list[str]]:
    """Return the fields of a body that its model reads, and the names of unknown ones.

    `strict` refuses the latter. Raises InvalidRequestError.
    """
    reader = FieldReader(strict)
    taken = reader.take(given, model, UNREAD)
    reader.take_inner(taken, "stream_options", StreamOptions, _OF_STREAM_OPTIONS)
    wanted = reader.take_inner(taken, "response_format", ResponseFormat)
    reader.take_inner(wanted, "json_schema", NamedSchema, where="response_format.")
    reader.take_inner(taken, "structured_outputs", StructuredOutputs, _OF_OUTPUTS)
    reader.take_each(taken, "tools", _take_tool)
    if isinstance(choice := taken.get("tool_choice"), dict):
        taken["tool_choice"] = _take_choice(choice, reader)
    reader.take_each(taken, "messages", _take_message)
    return taken, list(reader.ignored)


def ignored_names(names: list[str]) -> str:
    """Return names for a header and the log: ASCII, escaped, and no more than a line."""
    shown = [quote(name[:_MAX_NAME], safe=".") for name in names[:_MAX_SHOWN]]
    return ", ".join(shown + [f"and {len(names) - _MAX_SHOWN} more"] * (len(names) > _MAX_SHOWN))


def _whole(value: object) -> object:
    """Return a float without a fraction as an integer: JSON has numbers only, and some languages write 100.0."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


def _take_message(where: str, message: dict[str, Any], reader: FieldReader) -> dict[str, object]:
    _check_role(f"{where}.role", message.get("role"))
    taken = reader.take(message, Message, _OF_MESSAGES, "messages.")
    reader.take_each(taken, "content", _take_part)
    if "content" not in taken and taken.get("role") in ("assistant", "tool", "function"):
        taken["content"] = ""
    for name, empty in (("function_call", {}), ("tool_calls", [])):
        if taken.get(name) == empty:
            del taken[name]
    reader.take_inner(taken, "function_call", FunctionCall, where="messages.")
    reader.take_each(taken, "tool_calls", _take_call)
    return taken


def _take_tool(_where: str, tool: dict[str, Any], reader: FieldReader) -> dict[str, object]:
    return _take_function(tool, (Tool, Function), _NONE, "tools.", reader)


def _take_call(_where: str, call: dict[str, Any], reader: FieldReader) -> dict[str, object]:
    return _take_function(call, (ToolCall, FunctionCall), _OF_CALLS, "messages.tool_calls.", reader)


def _take_choice(given: dict[str, Any], reader: FieldReader) -> dict[str, object]:
    if given.get("type") != "allowed_tools":
        return _take_function(given, (NamedTool, FunctionName), _NONE, "tool_choice.", reader)
    taken = reader.take(given, AllowedChoice, _NONE, "tool_choice.")
    allowed = reader.take_inner(taken, "allowed_tools", AllowedTools, where="tool_choice.")
    reader.take_each(allowed, "tools", _take_allowed)
    return taken


def _take_allowed(_where: str, tool: dict[str, Any], reader: FieldReader) -> dict[str, object]:
    return _take_function(tool, (NamedTool, FunctionName), _NONE, "tool_choice.allowed_tools.tools.", reader)


def _take_part(_where: str, part: dict[str, Any], reader: FieldReader) -> dict[str, object]:
    model = RefusalPart if part.get("type") == "refusal" else TextPart
    return reader.take(part, model, _OF_PARTS, "messages.content.")


def _check_role(where: str, role: Any) -> None:
    """Raise InvalidRequestError for a role that resembles one that every template may have."""
    if not isinstance(role, str) or role in ROLES:
        return
    similar = difflib.get_close_matches(role[:_MAX_NAME].lower(), ROLES, n=1, cutoff=0.75)
    if similar:
        message = f"{where}: unknown role {show(role)}; did you mean {similar[0]}?"
        raise InvalidRequestError(message, param="messages")


def _take_function(
    given: dict[str, Any], models: _Models, unread: Mapping[str, Unread], where: str, reader: FieldReader
) -> dict[str, object]:
    """Take the fields of a tool, a choice or a call, and those of its function."""
    taken = reader.take(given, models[0], unread, where)
    reader.take_inner(taken, "function", models[1], where=where)
    return taken


def _check_neutral(rule: Unread, name: str, value: object) -> None:
    if rule.lack and value not in rule.neutral:
        message = f"{rule.lack} not supported by this server; leave out {name}"
        raise InvalidRequestError(message, param=name, code="unsupported_parameter")


def _unknown(message: str, name: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=name, code="unknown_parameter")
