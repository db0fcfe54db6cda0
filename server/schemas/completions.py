"""The JSON shapes of the API. They check types and sizes; engine.request.SamplingParams checks ranges.

/openapi.json has the rules that others check, too: `_told` and `_tell_ranges` put them there.

`fields.py` takes unknown fields and nulls out before request models check the rest. Response models describe the
answers in /openapi.json; `completions/shapes.py` writes those of completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from gptserve.engine.request import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    SamplingParams,
)
from gptserve.server.core.background_status import BackgroundStatus
from gptserve.server.schemas.base import MAX_LABEL_LENGTH, Text, _Model, _RequestModel, _text_or_list
from gptserve.server.schemas.chat import Conversation
from gptserve.server.schemas.grammar import GrammarFields
from gptserve.server.schemas.seed import GREATEST_SEED, LEAST_SEED
from gptserve.server.schemas.tools import AnswerToolCall, ToolCallDelta, ToolFields
from gptserve.server.text.output import EndReason

MAX_STOP_STRINGS = 128  # chats of many characters send a name or two for each
MAX_STOP_STRING_LENGTH = 1000
MAX_STOP_CHARACTERS = 4000  # together; their automaton takes some 10 ms and half a megabyte
MAX_PROMPTS = 128
MAX_BAD_WORDS = 64  # each is at most two of the engine's
MAX_BAD_WORD_LENGTH = 100
MAX_TIMEOUT_MS = 2**31 - 1  # 24 days, the longest timer of many languages
# The ranges of numbers in a body. max_tokens may be 0 with echo and has no limit at -1, a top_k of -1 is off.
_RANGES = {
    **RANGES,
    "max_tokens": (-1, None),
    "max_completion_tokens": (-1, None),
    "top_k": (-1, None),
    "seed": (LEAST_SEED, GREATEST_SEED),
    "truncate_prompt_tokens": (-1, None),
}
_TOKEN_ID = r"^(0|-?[1-9][0-9]{0,17})$"  # one spelling per id; its range is checked against the vocabulary

PROMPT_RULE = "Input should be a string, a list of strings, a list of token ids or a list of lists of token ids"
STOP_RULE = "Input should be a string or a list of strings"


def _told(**rules: float) -> Any:
    """Return a field whose `rules` stand in the document; others check them."""
    return Field(json_schema_extra={**rules})


TokenIds = Annotated[list[int], Field(fail_fast=True)]
Label = Annotated[str, Field(max_length=MAX_LABEL_LENGTH)]
StopString = Annotated[str, Field(max_length=MAX_STOP_STRING_LENGTH)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=_TOKEN_ID)], Annotated[float, _told(minimum=-100, maximum=100)]],
    _told(maxProperties=MAX_LOGIT_BIAS_ENTRIES),
]
PromptIds = Annotated[TokenIds, _told(minItems=1)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]


def _kind(value: Any) -> str | None:
    """Return the union's member that `value` looks like, by its first item."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    return "texts" if isinstance(first, str) else "id lists" if isinstance(first, list) else "ids"


def cut_prompts(most: int) -> BeforeValidator:
    """Return a validator that cuts a list of too many prompts to one over the limit: pydantic would check them all."""
    return BeforeValidator(lambda given: given[: most + 1] if _kind(given) in ("texts", "id lists") else given)


def _check_stop(stops: list[str]) -> list[str]:
    """Return stop strings that are not too long together."""
    if (num_chars := sum(map(len, stops))) > MAX_STOP_CHARACTERS:
        rule = f"Texts should have at most {MAX_STOP_CHARACTERS} characters together, not {num_chars}"
        raise PydanticCustomError("stop_length", "{rule}", {"rule": rule})
    return stops


def _without_empty(stop: Any) -> Any:
    """Leave out empty texts, which ask for nothing: forms send "" or [""] where nobody wrote a stop string."""
    return [] if stop == "" else [text for text in stop if text != ""] if isinstance(stop, list) else stop


Prompt = Annotated[
    Text
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), _told(minItems=1), Tag("texts")]
    | Annotated[PromptIds, Tag("ids")]
    | Annotated[list[PromptIds], Field(max_length=MAX_PROMPTS, fail_fast=True), _told(minItems=1), Tag("id lists")],
    Discriminator(_kind, custom_error_type="prompt_type", custom_error_message=PROMPT_RULE),
    cut_prompts(MAX_PROMPTS),
]
Stop = Annotated[
    Annotated[StopString, Tag("text")]
    | Annotated[
        list[StopString],
        Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
        AfterValidator(_check_stop),
        Tag("list"),
    ],
    Discriminator(_text_or_list, custom_error_type="stop_type", custom_error_message=STOP_RULE),
    BeforeValidator(_without_empty),
]


def _tell_ranges(schema: dict[str, Any]) -> None:
    """Add _RANGES to the JSON schema of a body."""
    schema["additionalProperties"] = True
    for name, (low, high) in _RANGES.items():
        lower = "exclusiveMinimum" if name == "top_p" else "minimum"
        for option in schema["properties"].get(name, {}).get("anyOf", ()):
            if option["type"] in ("integer", "number"):
                option |= {lower: low} | ({} if high is None else {"maximum": high})


class StreamOptions(_RequestModel):
    """The reports of a stream besides text."""

    include_usage: bool | None = None
    """send one last chunk with usage and no choices"""
    continuous_usage_stats: bool | None = None
    """with include_usage, send usage so far with every chunk"""


class SharedFields(_RequestModel):
    """The fields that completions, chats and responses have under the same names. Null is the same as no field."""

    model_config = ConfigDict(json_schema_extra=_tell_ranges)

    model: str | None = None
    temperature: float | None = None
    """0 is greedy; default 1"""
    top_p: float | None = None
    top_k: int | None = None
    """0 or -1 is off"""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    """drawn and reported back when left out or -1"""
    stream: bool | None = None
    user: Label | None = None
    """written to the log"""
    priority: int | None = None
    """lower runs sooner; default 0; others need --priority-scheduling"""
    cache_salt: Label | None = None
    """only requests with the same salt share cached prefixes"""


class GenerationRequest(GrammarFields, SharedFields):
    """The fields of every completion request."""

    max_tokens: int | None = None
    """default 16; in a chat and for -1, what the context leaves"""
    max_completion_tokens: int | None = None
    """another name of max_tokens"""
    thinking_token_budget: int | None = Field(default=None, ge=-1)
    """the reasoning of a chat ends after so many tokens; -1: no limit"""
    min_tokens: int | None = None
    """nothing ends the answer before so many; default 0"""
    logit_bias: LogitBias | None = Field(default=None, fail_fast=True)
    allowed_token_ids: Annotated[TokenIds, _told(minItems=1, maxItems=MAX_ALLOWED_TOKEN_IDS)] | None = None
    """the answer has no other tokens"""
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    """texts whose tokens never come one after another"""
    stop_token_ids: Annotated[TokenIds, _told(maxItems=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    """end with the stop string, not before it"""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """how many likeliest tokens to report for each of the prompt's"""
    truncate_prompt_tokens: int | None = None
    """keep so many tokens of the prompt; -1: as many as fit"""
    truncation_side: Literal["left", "right"] | None = None
    """where truncate_prompt_tokens cuts: left, the default, or right, which keeps the first tokens"""
    add_special_tokens: bool | None = None
    """begin the prompt as the tokenizer does (BOS); default true, in a chat false"""
    n: int | None = Field(default=None, ge=1)
    """completions per prompt; default 1"""
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    """leave their text out; default true"""
    spaces_between_special_tokens: bool | None = None
    """true or false: these tokenizers put no spaces there"""
    return_token_ids: bool | None = None
    """return the ids of prompt and answer, too"""
    return_tokens_as_token_ids: bool | None = None
    """logprobs name a token token_id:ID"""
    request_id: Annotated[Label, Field(min_length=1)] | None = None
    """what follows cmpl- or chatcmpl- in the answer's id; not with background"""
    timeout_ms: int | None = Field(default=None, ge=1, le=MAX_TIMEOUT_MS)
    """what has not ended by then ends with the text so far"""
    background: bool | None = None
    """answer 202 at once and go on without the client"""
    generated_token_ids: list[TokenIds] | None = Field(default=None, fail_fast=True)
    """the tokens that the client has of each choice; the answer has what follows. Needs seed"""

    @property
    def thinking_limit(self) -> int | None:
        """The most tokens of the reasoning; None for any number."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    def sampling_params(
        self, defaults: Mapping[str, float], *, bad_words: tuple[tuple[int, ...], ...], **chosen: Any
    ) -> SamplingParams:
        """Return the parameters of the body over `defaults`, replaced by `chosen`. Raises InvalidRequestError.

        `bad_words` are the tokens of the body's; `grammar` is chosen, too, as it depends on a setting.
        """
        same_name = self.model_fields_set & set(SamplingParams.__dataclass_fields__)
        given = {name: value for name in same_name if (value := getattr(self, name)) is not None}
        if self.top_k == -1:
            given["top_k"] = 0
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token_id): bias for token_id, bias in self.logit_bias.items()}
        for name in ("stop_token_ids", "allowed_token_ids"):
            if name in given:
                given[name] = tuple(given[name])
        return SamplingParams(**{**defaults, **given, "bad_words": bad_words, **chosen})


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Prompt
    best_of: int | None = None
    """null or equal to n"""
    logprobs: int | None = None
    """how many likeliest tokens to report with each token"""
    echo: bool | None = None
    """return the prompt first; max_tokens may be 0 then"""

    def sampling_params(self, defaults: Mapping[str, float], **chosen: Any) -> SamplingParams:
        """Return the parameters. With echo the engine scores the prompt, and always computes at least one token."""
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        chosen["prompt_logprobs"] = max((k for k in asked if k is not None), default=None)
        return super().sampling_params(defaults, **chosen)


class ChatRequest(Conversation, ToolFields, GenerationRequest):
    """The body of POST /v1/chat/completions."""

    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """needs logprobs true"""

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the chat template shows: none that may not be called."""
        return None if self.tool_choice == "none" else super().template_tools()

    def sampling_params(self, defaults: Mapping[str, float], **chosen: Any) -> SamplingParams:
        """Return the parameters. In a chat logprobs only switches them on."""
        return super().sampling_params(defaults, **chosen, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class PromptTokensDetails(_Model):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(_Model):
    """Tokens of one request; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Logprobs(_Model):
    """Parallel lists, one entry per token: of the prompt first with echo, then of every generated token.

    text_offset counts characters of the text before a stop string is cut off.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(_Model):
    """The logprob of a token at its position in the prompt; `rank` - 1 tokens were likelier."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None] | None,
    Field(description="by token id, the prompt's own first and the likeliest after it; null for the first token"),
]


TokenIdList = Annotated[list[int] | None, Field(description="only with return_token_ids")]


class Choice(_Model):
    """One completion, or a chunk's addition to it. prompt_logprobs comes only on request."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: EndReason | None
    stop_reason: str | int | None
    """the stop string or the id out of stop_token_ids that matched"""
    token_ids: TokenIdList = None
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: TokenIdList = None


class _CompletionHead(_Model):
    id: str
    created: int
    model: str
    system_fingerprint: str
    """changes when the model or anything else that affects the numbers changes"""
    batch_invariant: bool
    """whether the same request and seed give the same answer, independent of the rest of the batch"""
    seed: int


class Completion(_CompletionHead):
    """The body of a completion, and with `stream` the data of each event."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[Choice]
    usage: Usage | None = None


class TopLogprob(_Model):
    """A token that could have come. `bytes` tells tokens without text of their own apart."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A generated token, and the likeliest at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Model):
    """One entry per generated token, including those of the reasoning and its frame."""

    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(_Model):
    """The model's message. Its reasoning has two names. content is null only beside calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnswerToolCall] | None = None


class MessageDelta(_Model):
    """A chunk's addition to a message; the role comes once, first."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class _ChatPart(_Model):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: EndReason | None
    stop_reason: str | int | None
    token_ids: TokenIdList = None


class ChatChoice(_ChatPart):
    """One answer."""

    message: AnswerMessage


class ChunkChoice(_ChatPart):
    """A chunk's addition to one answer."""

    delta: MessageDelta


class ChatCompletion(_CompletionHead):
    """The body of an answer to a conversation. prompt_logprobs comes only on request."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: TokenIdList = None
    usage: Usage


class ChatCompletionChunk(_CompletionHead):
    """The data of each event of a streamed answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: TokenIdList = None
    usage: Usage | None = None


class ErrorDetail(_Model):
    """The error: field, rule and value given."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(_Model):
    """The body of every error."""

    error: ErrorDetail


class BackgroundCompletion(_CompletionHead):
    """The answer to `background`: the completion has begun."""

    object: Literal["text_completion", "chat.completion"]
    status: BackgroundStatus


class KeptCompletion(Completion):
    """A background completion so far; `error` says why it failed or was cancelled."""

    status: BackgroundStatus
    error: ErrorDetail | None


class KeptChatCompletion(ChatCompletion):
    """A background chat completion so far; `error` says why it failed or was cancelled."""

    status: BackgroundStatus
    error: ErrorDetail | None


class KeptEntry(_Model):
    """A background completion in the list."""

    id: str
    object: str
    created: int
    status: BackgroundStatus
    key_name: str | None
    """the name of the API key that began it; null without keys"""
    prompt_tokens: int
    completion_tokens: int
    bytes: int
    """what it takes in the journal"""


class KeptList(_Model):
    """The background completions that run and that are kept, oldest first."""

    object: Literal["list"] = "list"
    data: list[KeptEntry]


class Model(_Model):
    """A model that requests may name, as OpenAI's clients and Anthropic's read it."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str
    """`created` as RFC 3339 has it"""
    owned_by: str
    max_model_len: int
    sampling_defaults: dict[str, float]
    """of requests that leave these fields out"""


class ModelList(_Model):
    """The models served, on one page."""

    object: Literal["list"] = "list"
    data: list[Model]
    has_more: Literal[False] = False


class Status(_Model):
    """The answer to a probe."""

    status: Literal["ok"] = "ok"


class Version(_Model):
    """The version that runs."""

    version: str
