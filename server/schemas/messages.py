"""The JSON shapes of Anthropic's Messages API: the body of a request, as a chat too, and the answers.

`message_fields.py` checks the blocks and takes unknown fields out before. The response models describe the answers in
/openapi.json; `messages/` writes them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag

from gptserve.server.schemas.base import Text, _Model, _RequestModel, _text_or_list
from gptserve.server.schemas.completions import MAX_STOP_STRINGS, Label, SharedFields, StopString, _check_stop
from gptserve.server.schemas.tools import FUNCTION_NAME

BLOCKS_RULE = "Input should be a string or a list of blocks"
Json = dict[str, Any]
_TextOrBlocks = Discriminator(_text_or_list, custom_error_type="content_type", custom_error_message=BLOCKS_RULE)


class TextBlock(_RequestModel):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(_RequestModel):
    """How the assistant came to its next text. A block of an answer may come back as it is."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """of an answer that omitted the thinking: what it was"""


class ToolUseBlock(_RequestModel):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolReferenceBlock(_RequestModel):
    """A tool that a search of the client's has found; the model sees its name."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        """The text that the model sees."""
        return self.tool_name


def _kind_of_block(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"[{kind}]" if kind in ("thinking", "tool_use", "tool_result", "tool_reference") else "[text]"


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("[text]")] | Annotated[ToolReferenceBlock, Tag("[tool_reference]")],
    Discriminator(_kind_of_block),
]


class ToolResultBlock(_RequestModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[Text | Annotated[list[ResultBlock], Field(fail_fast=True), Tag("list")], _TextOrBlocks] | None
    ) = None
    is_error: bool | None = None
    """true: the model sees a line with Error: before the result"""


Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")],
    Discriminator(_kind_of_block),
]


class TurnMessage(_RequestModel):
    """A message of one side, or of the system amid them. The answer goes on with a last one of the assistant's."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Text | Annotated[list[Block], Field(fail_fast=True), Tag("list")], _TextOrBlocks]

    @property
    def blocks(self) -> list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]:
        """The content as blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else list(self.content)


class ClientTool(_RequestModel):
    """A tool that the model may call, and the client runs."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    input_schema: dict[str, Any]
    """a JSON Schema of an object"""
    strict: bool | None = None
    """the input matches the schema; default false"""

    def to_chat(self) -> Json:
        """Return the tool of a chat."""
        about = {"name": self.name, "description": self.description, "strict": self.strict}
        return {"type": "function", "function": {**about, "parameters": self.input_schema}}


class ServerTool(_RequestModel):
    """A tool that Anthropic defines or runs. The model does not see it."""

    type: str


def is_client_tool(kind: object) -> bool:
    """Return whether this is the type of a ClientTool, or of something that is no tool."""
    return not isinstance(kind, str) or kind == "custom"


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "[function]" if is_client_tool(kind) else "[hosted]"


MessageTool = Annotated[
    Annotated[ClientTool, Tag("[function]")] | Annotated[ServerTool, Tag("[hosted]")], Discriminator(_kind_of_tool)
]


class MessageToolChoice(_RequestModel):
    """Which tools the model calls: any one, the one named, some or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """with the type tool"""
    disable_parallel_tool_use: bool | None = None
    """at most one call in an answer; default false"""

    def to_chat(self) -> Json:
        """Return the fields of a chat."""
        choice: Any = {"any": "required"}.get(self.type, self.type)
        if self.type == "tool":
            choice = {"type": "function", "function": {"name": self.name}}
        return {"tool_choice": choice, "parallel_tool_calls": not self.disable_parallel_tool_use}


class Thinking(_RequestModel):
    """How the model thinks, if its template can switch that: the variable enable_thinking is false for disabled."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=0)
    """the thinking ends after so many tokens"""
    display: Literal["summarized", "omitted"] | None = None
    """omitted: the thinking is in the signature alone; default summarized, which here is all of it"""


class JsonOutput(_RequestModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_RequestModel):
    """What the answer is like."""

    effort: Label | None = None
    """a variable for the chat template (reasoning_effort), which may ignore it"""
    format: JsonOutput | None = None


class MessageMetadata(_RequestModel):
    """Who asks."""

    user_id: Label | None = None
    """written to the log"""


class TokenCountRequest(SharedFields):
    """The body of POST /v1/messages/count_tokens: that of a message, where max_tokens is not needed."""

    messages: Annotated[list[TurnMessage], Field(min_length=1, fail_fast=True)]
    system: Annotated[Text | Annotated[list[TextBlock], Field(fail_fast=True), Tag("list")], _TextOrBlocks] | None = (
        None
    )
    """before all messages"""
    stop_sequences: (
        Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), AfterValidator(_check_stop)]
        | None
    ) = None
    """another name of stop"""
    thinking: Thinking | None = None
    """default as the template has it"""
    tools: Annotated[list[MessageTool], Field(fail_fast=True)] | None = None
    tool_choice: MessageToolChoice | None = None
    """default auto with tools"""
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None
    """an older name of output_config.format"""
    metadata: MessageMetadata | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """variables for the chat template"""

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer has the thinking in the clear."""
        return self.thinking is None or self.thinking.display != "omitted"

    def to_chat(self, messages: list[Json]) -> Json:
        """Return the fields of the chat that answers these messages."""
        fields = {name: getattr(self, name) for name in SharedFields.model_fields}
        options, choice = self.output_config or OutputConfig(), self.tool_choice
        variables = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        wanted = options.format or self.output_format
        tools = None if self.tools is None else [tool.to_chat() for tool in self.tools if isinstance(tool, ClientTool)]
        return {
            **fields,
            "stop": self.stop if self.stop_sequences is None else self.stop_sequences,
            "user": self.user if self.metadata is None or self.user is not None else self.metadata.user_id,
            "messages": messages,
            "continue_final_message": bool(messages) and messages[-1]["role"] == "assistant",
            "tools": tools,
            **({} if choice is None else choice.to_chat()),
            "reasoning_effort": options.effort,
            "response_format": None if wanted is None else _format_of_chat(wanted),
            "chat_template_kwargs": {**variables, **(self.chat_template_kwargs or {})} or None,
            "return_token_ids": True,  # tokens of the thinking are counted
        }


class MessagesRequest(TokenCountRequest):
    """The body of POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    """what the context leaves, if it is more"""

    def to_chat(self, messages: list[Json]) -> Json:
        """Return the fields of the chat that answers these messages."""
        return {**super().to_chat(messages), "max_tokens": self.max_tokens}


def _format_of_chat(wanted: JsonOutput) -> Json:
    return {"type": wanted.type, "json_schema": {"schema": wanted.schema_}}


class AnswerText(_Model):
    """What the model says."""

    type: Literal["text"]
    text: str


class AnswerThinking(_Model):
    """How the model came to it."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    """nothing is signed; with display omitted it has the thinking"""


class AnswerToolUse(_Model):
    """A call that the client is to make."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    """{"INVALID_JSON": TEXT} if the model wrote another text than an object, or was cut off"""


class OutputTokenDetails(_Model):
    """What the tokens of the answer are."""

    thinking_tokens: int


class MessageUsage(_Model):
    """Tokens of one message. Those of the prompt are the sum of the three counts of input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokenDetails


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageObject(_Model):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerThinking | AnswerToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    """the one that matched"""
    usage: MessageUsage
    system_fingerprint: str
    batch_invariant: bool
    seed: int


class MessageEvent(_Model):
    """An event of a stream; other fields depend on its type."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ]


class CountedTokens(_Model):
    """How many tokens the prompt of a message has."""

    input_tokens: int


class MessagesErrorDetail(_Model):
    """What is wrong."""

    type: str
    message: str


class MessagesErrorBody(_Model):
    """An error on the routes of messages."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None = None
