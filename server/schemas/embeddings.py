"""The JSON shapes of POST /v1/embeddings: OpenAI's, with fields of vLLM and our timeout_ms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from gptserve.server.schemas.base import Text, _Model, _RequestModel
from gptserve.server.schemas.completions import MAX_TIMEOUT_MS, PROMPT_RULE, Label, PromptIds, _kind, _told, cut_prompts

MAX_INPUTS = 2048  # OpenAI's limit


Input = Annotated[
    Text
    | Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True), _told(minItems=1), Tag("texts")]
    | Annotated[PromptIds, Tag("ids")]
    | Annotated[list[PromptIds], Field(max_length=MAX_INPUTS, fail_fast=True), _told(minItems=1), Tag("id lists")],
    Discriminator(_kind, custom_error_type="prompt_type", custom_error_message=PROMPT_RULE),
    cut_prompts(MAX_INPUTS),
]


class PooledRequest(_RequestModel):
    """The fields of all bodies that ask for what the model makes of whole prompts."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """the most tokens of a prompt, -1 for the context; what is longer is cut at the end of its text; default none"""
    user: Label | None = None
    """goes into the log"""
    timeout_ms: Annotated[int, Field(ge=1, le=MAX_TIMEOUT_MS)] | None = None
    """the request ends with an error after this time"""


class InputRequest(PooledRequest):
    """The fields of those that ask about inputs one by one."""

    input: Input
    """a text, a list of texts, or the token ids of one or of several"""
    add_special_tokens: bool | None = None
    """begin and end texts as the tokenizer does; default true"""


class EmbeddingRequest(InputRequest):
    """The body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    """base64 is that of the numbers as fp32, the lowest byte first; default float"""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """the first so many numbers of each vector (Matryoshka), normalised again; default all"""


class Embedding(_Model):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    """which input it is of"""
    embedding: list[float] | str


class EmbeddingUsage(_Model):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(_Model):
    """The answer of POST /v1/embeddings."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
