"""Dialect: how the served model marks reasoning and calls of tools in its answers. It makes what reads them.

`dialect_of` finds it by the chat template and the vocabulary, once a server. A `Reading` is of one completion, and an
`AnswerReader` of one choice: it splits the text of each delta. All depends on the plan and the tokens alone, so that a
completion that is read again has the same deltas. Chats and responses use it; knows no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.grammar.grammar import Grammar, UnnamedProperties
from gptserve.server.core.settings import ServerSettings
from gptserve.server.core.tokenizer import Tokenizer
from gptserve.server.schemas.completions import ChatRequest, GenerationRequest
from gptserve.server.schemas.grammar import asked_grammar
from gptserve.server.text.calls import call_id
from gptserve.server.text.output import Delta
from gptserve.server.tools.format import ToolFormat
from gptserve.server.tools.formats import format_named, format_of, formats
from gptserve.server.tools.grammar import FREE, at_most, harmony_grammar, spelling, text_grammar, thinking_grammar
from gptserve.server.tools.harmony import HarmonyChannels, Mark, find_marks
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.reasoning import ThinkMarks, marks_of, read_reasoning, state_after
from gptserve.server.tools.request import AskedTools, asked_tools
from gptserve.server.tools.tape import Steps, Tape, drop
from gptserve.server.tools.values import Tools, kinds_of
from gptserve.weights.chat.template import ChatTemplate

_Text = Literal["before", "apart", "none"]
"""Where the text of an answer is: before calls, instead of calls, nowhere."""

NO_TOOLS = "tools may not be given: the chat template of this model knows no tools"
NO_THINKING = "thinking_token_budget may not be given: the chat template of this model marks no reasoning by tokens"
NO_FORMAT = (
    "tools may not be given: the chat template of this model asks for calls in a format that this server cannot read; "
    "if it can, the operator may name the format by --tool-call-format"
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model writes reasoning and tool calls.

    `marks` are the special tokens of harmony's channels, None for a model without them. `form` is the format of the
    calls of other models. `think` are the marks around their reasoning, None if they do not reason.
    """

    tokenizer: Tokenizer
    marks: Mapping[int, Mark] | None
    form: ToolFormat | None
    knows_tools: bool
    think: ThinkMarks | None
    unnamed_properties: UnnamedProperties

    def to_record(self) -> dict[str, object]:
        """Return what the journal keeps, so that an answer is read again as it was; the tokenizer has the rest."""
        name = next((name for name, form in formats().items() if form is self.form), None)
        return {"format": name, "think": self.think, "unnamed_properties": self.unnamed_properties}

    def of_record(self, kept: Mapping[str, Any] | None) -> Dialect:
        """Return the dialect that a record has; today's for one that has none. Raises LookupError."""
        if kept is None:
            return self
        name, marks = kept["format"], kept["think"]
        form, think = None if name is None else formats()[name], None if marks is None else ThinkMarks(*marks)
        unnamed = kept.get("unnamed_properties", self.unnamed_properties)  # which older records lack
        return replace(self, form=form, think=think, unnamed_properties=unnamed)

    def check(self, body: ChatRequest) -> None:
        """Raise InvalidRequestError if the model cannot do what a body asks of its tools and its text."""
        asked, (field, wanted) = asked_tools(body), asked_grammar(body)
        if asked is not None:
            if not self.knows_tools or (self.marks is None and self.form is None):
                message = NO_FORMAT if self.knows_tools else NO_TOOLS
                raise InvalidRequestError(message, param="tools", code="unsupported_parameter")
            if wanted is not None and wanted.kind != "json":
                message = f"{field} may not be given together with tools that may be called, but JSON may be asked for"
                raise InvalidRequestError(message, param=field)
        if body.thinking_limit is not None and not self.can_limit_reasoning:
            raise InvalidRequestError(NO_THINKING, param="thinking_token_budget", code="unsupported_parameter")
        reason = ""
        if asked is not None and asked.needs_grammar:
            reason = "tools whose calls are forced, strict or not parallel"
        elif body.thinking_limit is not None:
            reason = "thinking_token_budget"
        elif wanted is not None and (asked is not None or self.marks is not None):
            reason = f"{field} and tools" if asked is not None else f"{field} and a model that marks its reasoning"
        if reason and (body.continue_final_message or body.add_generation_prompt is False):
            name = "continue_final_message" if body.continue_final_message else "add_generation_prompt"
            raise InvalidRequestError(f"{name} may not be given with {reason}", param=name)

    def reading(self, body: GenerationRequest, prompt: Sequence[int]) -> Reading | None:
        """Return how to read the answers to a prompt; None if they are all text. Raises InvalidRequestError."""
        assert isinstance(body, ChatRequest), "other completions have no dialect"
        asked, wanted, limit = asked_tools(body), asked_grammar(body, self.unnamed_properties)[1], body.thinking_limit
        spell = spelling(self.tokenizer, as_tokens=() if limit is None else self.think or ())
        special_ids, grammar = self.tokenizer.special_ids, None
        if asked is not None and asked.must_call:
            wanted = None  # it is about the text, and there is none
        has_grammar = wanted is not None or (asked is not None and asked.needs_grammar)
        if self.marks is not None:
            channels = HarmonyChannels(self.marks).follow(prompt, self.tokenizer)
            grammar = harmony_grammar(asked, spell, self.unnamed_properties, wanted) if has_grammar else None
            return Reading(grammar, special_ids, channels=channels, has_tools=asked is not None)
        form, think = None if asked is None else self.form, self.think
        is_continued = bool(body.continue_final_message)
        state = "closed" if think is None else state_after(prompt, self.tokenizer, think, is_continued=is_continued)
        is_open = state == "open"
        # Text that matches a regex could be taken for the mark of a reasoning, JSON could not.
        if not (wanted is None or is_open or (wanted.kind == "json" and state == "none")):
            think = None
        if form is None and think is None:
            return None
        has_grammar |= limit is not None
        thinking = FREE if limit is None or think is None else at_most(limit, self.tokenizer, think.end)
        if has_grammar and asked is not None and form is not None:
            grammar = text_grammar(
                asked,
                form,
                spell,
                self.unnamed_properties,
                think=think,
                is_open=is_open,
                wanted=wanted,
                thinking=thinking,
            )
        elif has_grammar and think is not None:
            grammar = thinking_grammar(wanted, spell, think, is_open=is_open, thinking=thinking)
        tools = _tools(form, asked)
        text: _Text = "apart" if wanted is not None else "none" if asked is not None and asked.must_call else "before"
        steps = partial(_read, form=form, tools=tools, think=think, is_open=is_open, text=text)
        return Reading(grammar, special_ids - self._mark_ids(form, think), steps=steps)

    @property
    def can_limit_reasoning(self) -> bool:
        """Whether thinking_token_budget is taken: the marks of reasoning are a token each."""
        return self.think is not None and all(len(self.tokenizer.encode_with_special(mark)) == 1 for mark in self.think)

    def _mark_ids(self, form: ToolFormat | None, think: ThinkMarks | None) -> set[int]:
        """Return the special tokens that are marks to read."""
        marks = (*(() if form is None else form.marks), *(think or ()))
        ids = map(self.tokenizer.encode_with_special, marks)
        return {found[0] for found in ids if len(found) == 1}


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read the answers of one completion: their tokens by `channels`, or else their text by `steps`.

    `grammar` is what they have to match, None for anything. Tokens in special_ids have no text.
    """

    grammar: Grammar | None
    special_ids: frozenset[int]
    channels: HarmonyChannels | None = None
    has_tools: bool = False
    steps: Callable[[Tape, Parts], Steps[None]] | None = None

    def reader(self, completion_id: str, choice_index: int) -> AnswerReader:
        """Return the reader of a choice."""
        parts = Parts(partial(call_id, completion_id, choice_index))
        if self.channels is None:
            return AnswerReader(parts, None, self.steps)
        return AnswerReader(parts, self.channels.of_choice(parts if self.has_tools else None, self.special_ids), None)


class AnswerReader:
    """Splits the text of one choice. Give `channel_of` to its ChoiceOutput, and each of its deltas to `read`."""

    def __init__(
        self, parts: Parts, channels: HarmonyChannels | None, steps: Callable[[Tape, Parts], Steps[None]] | None
    ) -> None:
        self.channel_of = None if channels is None else channels.channel_of
        self._parts = parts
        self._channels = channels
        self._tape = Tape()
        self._steps = None if steps is None else steps(self._tape, parts)

    def read(self, delta: Delta) -> Delta:
        """Return the next delta with its text, its reasoning and its calls apart."""
        has_ended = delta.finish_reason is not None
        if self._channels is not None and has_ended:
            self._channels.end()
        if self._steps is not None:
            self._tape.feed(delta.text, is_last=has_ended)
            next(self._steps, None)
        text, thought, calls = self._parts.take()
        reason = delta.finish_reason
        if reason == "stop" and delta.stop_reason is None and self._parts.num_calls:
            reason = "tool_calls"
        if self._steps is None:
            text, thought = delta.text, delta.reasoning
        return replace(delta, text=text, reasoning=thought, tool_calls=calls, finish_reason=reason)


def dialect_of(tokenizer: Tokenizer, template: ChatTemplate | None, settings: ServerSettings) -> Dialect:
    """Return the dialect of the model that has this tokenizer and this template; the settings may name its format.

    Raises ChatTemplateError.
    """
    source, tool_source = ("", "") if template is None else (template.source, template.tool_source)
    named = settings.tool_call_format
    form = format_of(tool_source) if named is None else format_named(named)
    knows_tools = re.search(r"\btools\b", tool_source) is not None
    marks, think = find_marks(tokenizer), marks_of(source + tool_source)
    return Dialect(tokenizer, marks, form, knows_tools, think, settings.unnamed_properties)


def _tools(form: ToolFormat | None, asked: AskedTools | None) -> Tools:
    """Return the tools that may be called, with the kinds of their arguments if the format needs those."""
    has_kinds = form is not None and form.arguments is not None
    functions = () if asked is None else asked.functions
    return {function.name: kinds_of(function.parameters or {}) if has_kinds else {} for function in functions}


def _read(
    tape: Tape,
    parts: Parts,
    *,
    form: ToolFormat | None,
    tools: Tools,
    think: ThinkMarks | None,
    is_open: bool,
    text: _Text,
) -> Steps[None]:
    """Read an answer. Where calls and text come apart, a mark of calls within the text is a part of it.

    Where there is no text, what seems to be one is the beginning of a call that was cut off.
    """
    if text == "none":
        parts.add_text = drop
    if think is not None:
        yield from read_reasoning(tape, parts, think, is_open=is_open)
    if form is None or (text == "apart" and not (yield from tape.sees(form.begin))):
        yield from tape.pass_until((), parts.add_text)
    else:
        yield from form.read(tape, parts, tools)
