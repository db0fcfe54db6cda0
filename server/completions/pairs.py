"""PairPrompt: from a query and a document to the tokens of one prompt, whose score says how well they fit.

A chat template that knows the roles "query" and "document" writes the prompt (sentence-transformers' and vLLM's
convention; a system message has the instruction). For any other, a model that answers yes or no gets Qwen3-Reranker's
question as a chat, and a classifier the two texts one after the other. Knows no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.core.tokenizer import Tokenizer
from gptserve.weights.chat.template import ChatTemplate
from gptserve.weights.classes import TextClasses
from gptserve.weights.errors import ChatTemplateError, UnsupportedModelError

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
"""Qwen3-Reranker's words, as in its model card."""
QUERY, DOCUMENT, INSTRUCTION = "\ufdd0", "\ufdd1", "\ufdd2"
"""Stand for the texts while the template runs: characters that Unicode keeps out of all texts."""
_SLOTS = re.compile(f"([{QUERY}{DOCUMENT}{INSTRUCTION}])")
_ROLES = tuple(re.compile(f"['\"]{role}['\"]") for role in ("query", "document"))
_NO_INSTRUCTION = "this model's prompt has no place for an instruction"

TokenIds = tuple[int, ...]
Pieces = tuple[str, ...]
"""Texts and slots, which are tokenized as one text."""


@dataclass(frozen=True, slots=True)
class Form:
    """A prompt with places for texts: tokens, and pieces between special tokens."""

    parts: tuple[TokenIds | Pieces, ...]

    def encode(self, tokenizer: Tokenizer, texts: Mapping[str, str]) -> tuple[list[TokenIds], int]:
        """Return the tokens of each part, with these texts in the slots, and which part is the last one with a slot."""
        found, last = list[TokenIds](), 0
        for i, part in enumerate(self.parts):
            pieces = [its for its in part if isinstance(its, str)]
            last = i if pieces else last
            text = "".join(texts.get(piece, piece) for piece in pieces)
            found.append(
                tuple(tokenizer.encode(text)) if pieces else tuple(its for its in part if isinstance(its, int))
            )
        return found, last


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """The two forms of a prompt, with an instruction of the request and without; None: it takes none.

    The texts are plain: a special token that is spelled out in one stays text, so that it can end no message.
    """

    plain: Form
    instructed: Form | None = None

    def encode(
        self, tokenizer: Tokenizer, query: str, document: str, instruction: str | None, most: int | None
    ) -> tuple[int, ...]:
        """Return the tokens, at most `most` if given: the end of the document, or of both, is cut.

        Raises InvalidRequestError.
        """
        parts, last = self.form(instruction).encode(tokenizer, _texts(query, document, instruction))
        over = 0 if most is None else sum(map(len, parts)) - most
        if over > 0:
            if over >= (room := len(parts[last])):
                rule = (
                    f"truncate_prompt_tokens must be above {sum(map(len, parts)) - room}, the tokens around the texts"
                )
                raise InvalidRequestError(f"{rule}, got {most}", param="truncate_prompt_tokens")
            parts[last] = parts[last][:-over]
        return tuple(chain.from_iterable(parts))

    def form(self, instruction: str | None) -> Form:
        """Return the form with or without an instruction. Raises InvalidRequestError if it takes none."""
        if instruction is None:
            return self.plain
        if self.instructed is None:
            raise InvalidRequestError(f"instruction may not be given: {_NO_INSTRUCTION}", param="instruction")
        return self.instructed


def _texts(query: str, document: str, instruction: str | None) -> Mapping[str, str]:
    return {QUERY: query, DOCUMENT: document, INSTRUCTION: instruction or ""}


def pair_prompt(
    tokenizer: Tokenizer, template: ChatTemplate | None, classes: TextClasses, default_instruction: str | None = None
) -> PairPrompt:
    """Return the prompts of a model, whose folder may have an instruction. Raises UnsupportedModelError or
    ChatTemplateError.
    """
    if template is not None and all(role.search(template.source) for role in _ROLES):
        pair = [{"role": "query", "content": QUERY}, {"role": "document", "content": DOCUMENT}]
        plain = _form(tokenizer, template, pair, QUERY + DOCUMENT)
        try:
            system = {"role": "system", "content": INSTRUCTION}
            instructed = _form(tokenizer, template, [system, *pair], QUERY + DOCUMENT + INSTRUCTION)
            if default_instruction is not None:
                system = {"role": "system", "content": default_instruction}
                plain = _form(tokenizer, template, [system, *pair], QUERY + DOCUMENT)
            return PairPrompt(plain, instructed)
        except (UnsupportedModelError, ChatTemplateError):
            return PairPrompt(plain)
    if not classes.token_ids:
        return PairPrompt(_bare(tokenizer, default_instruction or ""))
    if template is None:
        raise UnsupportedModelError(
            "--task score asks the model in a chat, and this one has no chat template; start with --chat-template FILE"
        )
    default, asked = (
        _form(tokenizer, template, _question(instruction), QUERY + DOCUMENT + slots)
        for instruction, slots in ((default_instruction or DEFAULT_INSTRUCTION, ""), (INSTRUCTION, INSTRUCTION))
    )
    return PairPrompt(default, asked)


def _question(instruction: str) -> Sequence[Mapping[str, str]]:
    asked = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {DOCUMENT}"
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]


def _form(tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, str]], slots: str) -> Form:
    """Return the form that a template writes. What lies between the special tokens around the slots is one text."""
    text = template.render(messages, {"enable_thinking": False})
    found = "".join(_SLOTS.findall(text))
    if sorted(found) != sorted(slots):
        raise UnsupportedModelError("the chat template must write the query and the document once, as they are")
    special = [tokenizer.token_bytes(its).decode(errors="ignore") for its in tokenizer.special_ids]
    names = "|".join(sorted(map(re.escape, filter(None, special)), key=len, reverse=True)) or r"(?!)"
    parts, fixed = list[TokenIds | Pieces](), ""
    for piece in [*re.split(f"({names})", text), None]:
        if piece is not None and not _SLOTS.search(piece):
            fixed += piece
            continue
        if fixed:
            parts.append(tuple(tokenizer.encode_with_special(fixed)))
        if piece is not None:
            parts.append(tuple(filter(None, _SLOTS.split(piece))))
        fixed = ""
    form = Form(tuple(parts))
    _check(tokenizer, form, text)
    return form


def _check(tokenizer: Tokenizer, form: Form, text: str) -> None:
    """Raise UnsupportedModelError unless the parts have the tokens that the whole has."""
    texts = _texts("a query", "its document", "one instruction")
    whole = "".join(texts.get(piece, piece) for piece in _SLOTS.split(text))
    parts = list(chain.from_iterable(form.encode(tokenizer, texts)[0]))
    if parts != tokenizer.encode_with_special(whole):
        raise UnsupportedModelError("the texts of a pair are not tokens of their own within this model's chat template")


def _bare(tokenizer: Tokenizer, begin: str) -> Form:
    """Return a text, the query, then the document, between the tokens that begin and end a prompt."""
    sample = "a"
    alone, prompt = tokenizer.encode(sample), tokenizer.encode_prompt(sample)
    start = next((i for i in range(len(prompt)) if prompt[i : i + len(alone)] == alone), None)
    if start is None:
        raise UnsupportedModelError("the tokens of a prompt are not those of its text and others around them")
    return Form(
        (tuple(prompt[:start]), tuple(filter(None, (begin, QUERY, DOCUMENT))), tuple(prompt[start + len(alone) :]))
    )
