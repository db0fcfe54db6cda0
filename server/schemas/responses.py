"""The JSON shapes of the Responses API: the body of a request, as a chat too, and the answers.

`response_fields.py` checks the items of `input` and takes unknown fields out before. The response models describe the
answers in /openapi.json; `responses/` writes them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from gptserve.engine.request import MAX_LOGPROBS
from gptserve.server.schemas.base import Text, _Model, _Page, _RequestModel, _text_or_list
from gptserve.server.schemas.completions import Label, SharedFields
from gptserve.server.schemas.response_tools import (
    CallItem,
    CallOutputItem,
    Content,
    CustomCallItem,
    OfferedTool,
    OutputCustomCall,
    OutputFunctionCall,
    ToolChoice,
)

LOGPROBS = "message.output_text.logprobs"
INPUT_RULE = "Input should be a string or a list of items"
Json = dict[str, Any]


class InputItem(_RequestModel):
    """A message, or the reasoning that led to the assistant's next one. An answer's items may come back as they are."""

    type: Literal["message", "reasoning"] | None = None
    """default message"""
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ItemReference(_RequestModel):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: str


ITEMS: dict[object, type[_RequestModel]] = {
    "item_reference": ItemReference,
    "message": InputItem,
    "reasoning": InputItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
}
"""The types of items."""


def _kind_of_item(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind in ("function_call_output", "custom_tool_call_output"):
        return "[call_output]"
    return f"[{kind}]" if kind in ("function_call", "custom_tool_call", "item_reference") else "[message]"


Item = Annotated[
    Annotated[InputItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[CustomCallItem, Tag("[custom_tool_call]")]
    | Annotated[CallOutputItem, Tag("[call_output]")],
    Discriminator(_kind_of_item),
]
GivenItem = Annotated[
    Annotated[Item, Tag("[message]")] | Annotated[ItemReference, Tag("[item_reference]")],
    Discriminator(lambda value: "[item_reference]" if _kind_of_item(value) == "[item_reference]" else "[message]"),
]


class TextFormat(_RequestModel):
    """JSON, or JSON of a schema. Name and description change nothing."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """true or false: the answer matches the schema"""


class TextOptions(_RequestModel):
    """What the text of the answer is like."""

    format: TextFormat | None = None
    verbosity: Label | None = None
    """a variable for the chat template, which may ignore it"""


class ReasoningOptions(_RequestModel):
    """How the model reasons."""

    effort: Label | None = None
    """a variable for the chat template, which may ignore it"""


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""OpenAI's values. All but the first ask for nothing here."""


class ResponsesRequest(SharedFields):
    """The body of POST /v1/responses."""

    input: Annotated[
        Text | Annotated[list[GivenItem], Field(min_length=1, fail_fast=True), Tag("list")],
        Discriminator(_text_or_list, custom_error_type="input_type", custom_error_message=INPUT_RULE),
    ]
    instructions: str | None = None
    """a system message before all others; not taken over from the previous response"""
    previous_response_id: str | None = None
    """a stored response, whose conversation comes before the input"""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """default what the context leaves"""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[OfferedTool], Field(fail_fast=True)] | None = None
    """the tools that the model may call"""
    tool_choice: ToolChoice | None = None
    """default auto with tools"""
    parallel_tool_calls: bool | None = None
    """more than one call in an answer; default true"""
    include: list[Includable] | None = None
    """logprobs; reasoning is always in the clear, and there is nothing of tools that OpenAI runs"""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """how many likeliest tokens to report with each token; needs logprobs to be included"""
    store: bool | None = None
    """keep the response, so that it can be read again and continued; default true"""
    background: bool | None = None
    """answer at once and go on without the client; needs store"""
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """auto: drop the oldest items of a conversation that is too long; default disabled"""
    chat_template_kwargs: dict[str, Any] | None = None
    """variables for the chat template"""

    @property
    def includes_logprobs(self) -> bool:
        """Whether the text comes with logprobs."""
        return LOGPROBS in (self.include or ())

    def to_chat(self, messages: list[Json]) -> Json:
        """Return the fields of the chat that answers these messages, but for its tools and the choice of one."""
        fields = {name: getattr(self, name) for name in SharedFields.model_fields}
        options = self.text or TextOptions()
        logprobs = {"logprobs": True, "top_logprobs": self.top_logprobs} if self.includes_logprobs else {}
        return {
            **fields,
            **logprobs,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "verbosity": options.verbosity,
            "chat_template_kwargs": self.chat_template_kwargs,
            "response_format": _response_format(options.format),
            "parallel_tool_calls": self.parallel_tool_calls,
            "return_token_ids": True,  # reasoning tokens are counted
        }


def _response_format(given: TextFormat | None) -> Json | None:
    if given is None or given.type != "json_schema":
        return None if given is None else {"type": given.type}
    return {"type": given.type, "json_schema": {"schema": given.schema_}}


class StoredRequest(ResponsesRequest):
    """The body of a response as it is kept; `earlier` are the items of the conversation before its input."""

    earlier: list[Item] = Field(default_factory=list)


class TextLogprob(_Model):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class OutputLogprob(TextLogprob):
    """A token of the text, and the likeliest at its position."""

    top_logprobs: list[TextLogprob]


class InputText(_Model):
    """A text of the input."""

    type: Literal["input_text"]
    text: str


class OutputText(_Model):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[OutputLogprob]


class ReasoningText(_Model):
    """A text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class _OutputItem(_Model):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class OutputMessage(_OutputItem):
    """What the model says."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(_OutputItem):
    """How the model came to it."""

    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]


class InputTokensDetails(_Model):
    """Where the tokens of the input came from."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(_Model):
    """What the tokens of the output are."""

    reasoning_tokens: int


class ResponseUsage(_Model):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(_Model):
    """Why a response failed."""

    code: Literal["server_error"]
    message: str


class IncompleteDetails(_Model):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(_Model):
    """A response: what was asked, and the answer so far."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall]
    usage: ResponseUsage | None
    model: str
    system_fingerprint: str
    batch_invariant: bool
    seed: int
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_logprobs: int
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, str]
    store: bool
    background: bool
    parallel_tool_calls: bool
    tool_choice: ToolChoice
    tools: list[OfferedTool]
    truncation: Literal["auto", "disabled"]
    user: str | None


class ResponseEvent(_Model):
    """An event of a stream; other fields depend on its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class InputMessage(_Model):
    """A message of the input."""

    id: str
    type: Literal["message"]
    status: Literal["completed"]
    role: Literal["user", "system", "developer"]
    content: list[InputText]


class OutputOfCall(_Model):
    """The result of a call."""

    id: str
    type: Literal["function_call_output", "custom_tool_call_output"]
    status: Literal["completed"]
    call_id: str
    output: str | list[InputText]


class InputItemList(_Page):
    """A page of the items that a response was made of."""

    data: list[InputMessage | OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall | OutputOfCall]


class InputTokens(_Model):
    """How many tokens a response would have as its input."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(_Model):
    """The answer to DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
