"""The JSON shapes of /tokenize, /detokenize and /tokenizer_info: vLLM's."""

from __future__ import annotations

from pydantic import ConfigDict

from gptserve.server.schemas.base import _Model, _RequestModel
from gptserve.server.schemas.chat import Conversation
from gptserve.server.schemas.completions import TokenIds


class _ToTokenize(_RequestModel):
    model: str | None = None
    add_special_tokens: bool | None = None
    """begin as a prompt does (BOS); default true, with a conversation false, as its template has them"""
    return_token_strs: bool | None = None
    """return the text of each token, too"""


class TextToTokenize(_ToTokenize):
    """The body of POST /tokenize with a text."""

    prompt: str


class ConversationToTokenize(_ToTokenize, Conversation):
    """The body of POST /tokenize with a conversation."""


class TokensToText(_RequestModel):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class Tokens(_Model):
    """A text as tokens; those that a prompt begins or ends with are counted."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(_Model):
    """The text of tokens."""

    prompt: str


class TokenizerInfo(_Model):
    """tokenizer_config.json, with the texts of the special tokens and the chat template in use."""

    model_config = ConfigDict(extra="allow")
    tokenizer_class: str
