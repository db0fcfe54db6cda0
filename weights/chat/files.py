"""Finds the chat templates of a model folder, by name. A model may have one for chats with tools beside the default.

As `transformers` reads them: a list of named texts in tokenizer_config.json; or chat_template.jinja with the others in
additional_chat_templates/, which takes precedence. chat_template.json is of models with images. Called by template.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gptserve.weights.errors import ChatTemplateError, TokenizerError, shown
from gptserve.weights.json_file import read_json_object, read_text

DEFAULT, TOOL_USE = "default", "tool_use"
MORE_TEMPLATES = "additional_chat_templates"
_FILE, _OLD_FILE = "chat_template.jinja", "chat_template.json"


def named_templates(folder: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Return the templates of a model by name; a blank one is none. Raises TokenizerError or ChatTemplateError."""
    return {name: text for name, text in _all_named(folder, tokenizer_config).items() if text.strip()}


def _all_named(folder: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    files = [*folder.glob(_FILE), *sorted(folder.glob(f"{MORE_TEMPLATES}/*.jinja"))]
    read = {DEFAULT if path.name == _FILE else path.stem: read_text(path, ChatTemplateError) for path in files}
    if DEFAULT in read:
        return read
    named = _of_config(folder / "tokenizer_config.json", tokenizer_config)
    if not named:
        named = _of_config(folder / _OLD_FILE, read_json_object(folder / _OLD_FILE, TokenizerError, required=False))
    return named | read


def _of_config(path: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Return the templates in the field chat_template of a file."""
    field = config.get("chat_template")
    if field is None:
        return {}
    named: dict[object, object] = {DEFAULT: field}
    if isinstance(field, list):
        entries = [entry for entry in field if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
    texts = {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
    wrong = [text for name, text in named.items() if name in (DEFAULT, TOOL_USE) and not isinstance(text, str)]
    if wrong:
        raise TokenizerError(f"{path}: chat_template must be text or a list of named texts, got {shown(wrong[0])}")
    return texts
