"""Chat templates: the Jinja that comes with a model and turns a conversation into the text of a prompt.

The text equals that of `transformers`' apply_chat_template. As there, a special token spelled out in a message becomes
that token when encoded, so untrusted text can end a message. Messages are never read as Jinja. A template runs in
worker processes, as sandbox.py has it. Knows no tokenizer. Called by the server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gptserve.weights.chat.concessions import versions
from gptserve.weights.chat.files import DEFAULT, TOOL_USE, named_templates
from gptserve.weights.chat.fitting import Fitting, Message
from gptserve.weights.errors import ChatTemplateError, TokenizerError
from gptserve.weights.json_file import read_json_object, read_text
from gptserve.weights.special_tokens import special_tokens
from gptserve.weights.workers import CannotOpenError, ForeignCodeError, Limits, WorkerDiedError, Workers

LIMITS = Limits()
PLAIN_NAME = "plain"
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For a model that only continues text: lines of "User: …" and "Assistant: …". Clients end an answer by the stop
"\\nUser:"."""

_FINAL = "CONTINUE_FINAL_MESSAGE_TAG "  # as in transformers; it ends in a blank, to see whether the template trims


class ChatTemplate:
    """A template and the special tokens it may name. Compiled by the first worker; threads may share it.

    `for_tools` takes its place in chats with tools.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, for_tools: ChatTemplate | None = None
    ) -> None:
        self.source = source
        self._for_tools = for_tools
        self._special_tokens = special_tokens
        self._reads_reasoning = re.search(r"""\.reasoning\b|(['"])reasoning\1""", source) is not None
        self._workers = Workers("gptserve.weights.chat.sandbox:open_template", source, LIMITS)
        self._fitting = Fitting(source, partial(_try, self._workers, special_tokens))

    @property
    def tool_source(self) -> str:
        """The source of the template for chats with tools."""
        return self.source if self._for_tools is None else self._for_tools.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, object],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the text of the prompt; the variables are JSON. Raises ChatTemplateError.

        A content is a text or a list of text parts. continue_final_message leaves the last message open at its end.
        """
        if tools and self._for_tools is not None:
            return self._for_tools.render(
                messages,
                variables,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        more = {**variables, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        refusal: ChatTemplateError | None = None
        for version in versions([self._with_reasoning(message) for message in messages]):
            try:
                final, text = self._render(version, more, continue_final_message)
            except ChatTemplateError as fault:
                refusal = refusal or fault  # the first is about what the client sent
            else:
                return _cut_after(final, text) if continue_final_message else text
        assert refusal is not None, "there is a version"
        raise refusal

    def _render(self, messages: Sequence[Message], more: Mapping[str, object], is_continued: bool) -> tuple[str, str]:
        """Return the text of the final message, if that is continued, and that of the prompt."""
        final = ""
        try:
            shown = self._fitting.fit(messages)
            if is_continued:
                final, shown[-1] = _open(shown[-1])
            text = str(self._workers.call(variables={**self._special_tokens, **more, "messages": shown}))
        except CannotOpenError as fault:
            raise ChatTemplateError(f"the chat template is not valid: {fault}") from fault
        except ForeignCodeError as fault:
            raise ChatTemplateError(f"the chat template refuses this conversation: {fault}") from fault
        return final, text

    def _with_reasoning(self, message: Mapping[str, Any]) -> Message:
        """Return a copy that has reasoning_content also as "thinking", which gpt-oss's template reads.

        For a template that reads it, also as "reasoning".
        """
        if "reasoning_content" not in message:
            return {**message}
        reasoning = message["reasoning_content"]
        more = {"reasoning": reasoning} if self._reads_reasoning else {}
        return {"thinking": reasoning, **more, **message}

    def check(self) -> None:
        """Raise ChatTemplateError unless it is valid Jinja."""
        try:
            self._workers.open()
        except ForeignCodeError as fault:
            raise ChatTemplateError(f"the chat template is not valid: {fault}") from fault
        except OSError as fault:  # the system starts no process
            raise ChatTemplateError(f"the chat template cannot be checked: {fault}") from fault

    def close(self) -> None:
        """End its workers. Without this they end with the template itself."""
        self._workers.close()
        if self._for_tools is not None:
            self._for_tools.close()


def load_chat_template(folder: Path, chosen: str | None = None) -> ChatTemplate | None:
    """Return the template of a model folder, or the one `chosen`: a Jinja file, or "plain". None if there is none.

    Raises TokenizerError or ChatTemplateError.
    """
    config = read_json_object(folder / "tokenizer_config.json", TokenizerError, required=False)
    if chosen is not None:
        source = PLAIN_TEMPLATE if chosen == PLAIN_NAME else read_text(Path(chosen), ChatTemplateError)
        template = ChatTemplate(source, special_tokens(folder, config))
        template.check()
        return template
    named, tokens = named_templates(folder, config), special_tokens(folder, config)
    if DEFAULT not in named:
        return None
    for_tools = ChatTemplate(named[TOOL_USE], tokens) if TOOL_USE in named else None
    return ChatTemplate(named[DEFAULT], tokens, for_tools=for_tools)


def _try(workers: Workers, special_tokens: Mapping[str, str], messages: Sequence[Message]) -> str | None:
    """Return the text of a conversation; None if the template refuses it. Raises ForeignCodeError if it cannot tell."""
    variables = {**special_tokens, "messages": messages, "tools": None, "documents": None}
    try:
        return str(workers.call(variables={**variables, "add_generation_prompt": True}))
    except (CannotOpenError, WorkerDiedError):
        raise
    except ForeignCodeError:
        return None


def _open(message: Message) -> tuple[str, Message]:
    """Return the text of a message, or of its last part, and the message with the tag after that."""
    content = message["content"]
    if isinstance(content, str):
        return content, {**message, "content": content + _FINAL}
    *before, last = content
    return last["text"], {**message, "content": [*before, {**last, "text": last["text"] + _FINAL}]}


def _cut_after(final: str, text: str) -> str:
    """Return `text` up to the end of the final message, which the tag marks."""
    tag = _FINAL.strip()
    if tag not in text or final.strip() not in text:
        raise ChatTemplateError("the chat template leaves out the final message, so that it cannot be continued")
    at = text.rindex(tag)
    return text[:at] if text.startswith(_FINAL, at) else text[:at].rstrip()
