"""Chat templates: the Jinja that comes with a model and turns a conversation into the text of a prompt.

The text equals that of `transformers`' apply_chat_template. As there, a special token spelled out in a message becomes
that token when encoded, so untrusted text can end a message. Messages are never read as Jinja. A template runs in
worker processes, as sandbox.py has it. Knows no tokenizer. Called by the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptserve.weights.chat.concessions import versions
from gptserve.weights.errors import ChatTemplateError, TokenizerError, shown
from gptserve.weights.json_file import read_json_object, read_text
from gptserve.weights.tokenizers.special_tokens import special_tokens
from gptserve.weights.workers import CannotOpenError, ForeignCodeError, Limits, Workers

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
    """A template and the special tokens it may name. Compiled by the first worker; threads may share it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = special_tokens
        self._workers = Workers("gptserve.weights.chat.sandbox:open_template", source, LIMITS)

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

        continue_final_message leaves the last message open at its end.
        """
        more = {**variables, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        refusal: ChatTemplateError | None = None
        for version in versions([_with_reasoning(message) for message in messages]):
            *before, last = version
            final = last["content"]
            shown = [*before, {**last, "content": final + _FINAL}] if continue_final_message else version
            try:
                text = self._render({**more, "messages": shown})
            except ChatTemplateError as fault:
                refusal = refusal or fault  # the first is about what the client sent
            else:
                return _cut_after(final, text) if continue_final_message else text
        assert refusal is not None, "there is a version"
        raise refusal

    def _render(self, variables: Mapping[str, object]) -> str:
        try:
            return str(self._workers.call(variables={**self._special_tokens, **variables}))
        except CannotOpenError as fault:
            raise ChatTemplateError(f"the chat template is not valid: {fault}") from fault
        except ForeignCodeError as fault:
            raise ChatTemplateError(f"the chat template refuses this conversation: {fault}") from fault

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


def load_chat_template(folder: Path, chosen: str | None = None) -> ChatTemplate | None:
    """Return the template of a model folder, or the one `chosen`: a Jinja file, or "plain". None if there is none.

    chat_template.jinja takes precedence over chat_template in tokenizer_config.json; of several there, "default" does.
    Raises TokenizerError or ChatTemplateError.
    """
    path = folder / "tokenizer_config.json"
    config = read_json_object(path, TokenizerError, required=False)
    source: object = config.get("chat_template")
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = entries[-1].get("template") if entries else None
    if (folder / "chat_template.jinja").is_file():
        source = read_text(folder / "chat_template.jinja", ChatTemplateError)
    if chosen is not None:
        source = PLAIN_TEMPLATE if chosen == PLAIN_NAME else read_text(Path(chosen), ChatTemplateError)
    if source is None:
        return None
    if not isinstance(source, str):
        raise TokenizerError(f"{path}: chat_template must be text or a list of named texts, got {shown(source)}")
    template = ChatTemplate(source, special_tokens(folder, config))
    if chosen is not None:
        template.check()
    return template


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that has reasoning_content also as "thinking", which gpt-oss's template reads."""
    return {"thinking": message["reasoning_content"], **message} if "reasoning_content" in message else {**message}


def _cut_after(final: str, text: str) -> str:
    """Return `text` up to the end of the final message, which the tag marks."""
    tag = _FINAL.strip()
    if tag not in text or final.strip() not in text:
        raise ChatTemplateError("the chat template leaves out the final message, so that it cannot be continued")
    at = text.rindex(tag)
    return text[:at] if text.startswith(_FINAL, at) else text[:at].rstrip()
