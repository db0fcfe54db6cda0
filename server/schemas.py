"""The wire shapes of the API. Types and sizes are checked here, ranges by engine.request.SamplingParams.

Request models refuse what they do not know; null means the default. Response models are what is sent, and what
/openapi.json says.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from engine.request import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1000
MAX_PROMPTS = 128
MAX_LABEL_LENGTH = 256  # user and cache_salt are carried along with every request
_TOKEN_ID = r"^(0|-?[1-9][0-9]{0,17})$"  # one spelling per id; its range is checked against the vocabulary

PROMPT_RULE = "Input should be a string, a list of strings, a list of token ids or a list of lists of token ids"
STOP_RULE = "Input should be a string or a list of strings"

Text = Annotated[str, Tag("text")]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_LENGTH)]


def _kind(value: Any) -> str | None:
    """Name the member of a union that `value` is meant to be, by its first item."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    return "texts" if isinstance(first, str) else "id lists" if isinstance(first, list) else "ids"


def _stop_kind(value: Any) -> str | None:
    kind = _kind(value)
    return kind if kind in (None, "text") else "texts"


Prompt = Annotated[
    Text
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("id lists")],
    Discriminator(_kind, custom_error_type="prompt_type", custom_error_message=PROMPT_RULE),
]
Stop = Annotated[
    Annotated[StopString, Tag("text")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), Tag("texts")],
    Discriminator(_stop_kind, custom_error_type="stop_type", custom_error_message=STOP_RULE),
]


class _RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(_RequestModel):
    """What a stream reports besides text."""

    include_usage: bool | None = Field(default=None, description="send one last chunk with usage and no choices")
    continuous_usage_stats: bool | None = Field(default=None, description="send usage so far with every chunk")


class CompletionRequest(_RequestModel):
    """The body of POST /v1/completions. Null is the same as leaving a field out."""

    prompt: Prompt
    model: str | None = None
    max_tokens: int | None = Field(default=None, description="default 16")
    temperature: float | None = Field(default=None, description="0 is greedy; default 1")
    top_p: float | None = None
    top_k: int | None = Field(default=None, description="0 or -1 is off")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Annotated[str, Field(pattern=_TOKEN_ID)], float] | None = Field(default=None, fail_fast=True)
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    seed: int | None = Field(default=None, description="drawn and reported back when left out")
    n: int | None = Field(default=None, ge=1, description="completions per prompt; default 1")
    best_of: int | None = Field(default=None, description="null or equal to n")
    logprobs: int | None = Field(default=None, description="how many likeliest tokens to report with each token")
    echo: bool | None = Field(default=None, description="return the prompt before the completion")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: None = None
    user: Annotated[str, Field(max_length=MAX_LABEL_LENGTH)] | None = Field(
        default=None, description="written to the log"
    )
    priority: int | None = Field(default=None, description="lower runs sooner; default 0")
    cache_salt: Annotated[str, Field(max_length=MAX_LABEL_LENGTH)] | None = Field(
        default=None, description="only requests with the same salt share cached prefixes"
    )

    @classmethod
    def parse(cls, value: dict[str, object]) -> CompletionRequest:
        """Validate a body. Raises ValidationError.

        Of unknown fields only the first is kept, and of a list of too many prompts only the first too many: pydantic
        would look at each of a million, and the event loop stands still meanwhile.
        """
        unknown = next((name for name in value if name not in cls.model_fields), None)
        if unknown is not None and len(value) > len(cls.model_fields):
            value = {name: value[name] for name in (*cls.model_fields, unknown) if name in value}
        prompt = value.get("prompt")
        if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and _kind(prompt) != "ids":
            value = {**value, "prompt": prompt[: MAX_PROMPTS + 1]}
        return cls.model_validate(value)

    def sampling_params(self) -> SamplingParams:
        """Return the parameters given, the others at their defaults. Raises InvalidRequestError."""
        same_name = self.model_fields_set & set(SamplingParams.__dataclass_fields__)
        given = {name: value for name in same_name if (value := getattr(self, name)) is not None}
        if self.top_k == -1:
            given["top_k"] = 0
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token_id): bias for token_id, bias in self.logit_bias.items()}
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.echo:
            given["prompt_logprobs"] = self.logprobs
        return SamplingParams(**given)


class _ResponseModel(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)


class PromptTokensDetails(_ResponseModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(_ResponseModel):
    """Tokens of one request; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Logprobs(_ResponseModel):
    """Parallel lists, one entry per token: of the prompt first with echo, then of every generated token.

    text_offset counts characters of the text before a stop string is cut off.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(_ResponseModel):
    """One completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = Field(description="the stop string or the id out of stop_token_ids that matched")


class Completion(_ResponseModel):
    """The body of a completion, and with `stream` the data of each event."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    seed: int
    choices: list[Choice]
    usage: Usage | None = None


class ErrorDetail(_ResponseModel):
    """What went wrong: field, rule and value given."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(_ResponseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class Model(_ResponseModel):
    """A model that can be asked for."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int


class ModelList(_ResponseModel):
    """The models served."""

    object: Literal["list"] = "list"
    data: list[Model]


class Status(_ResponseModel):
    """The answer to a probe."""

    status: Literal["ok"] = "ok"


class Version(_ResponseModel):
    """What is running."""

    version: str
