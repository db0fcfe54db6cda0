"""Which templates a model folder has, as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptserve.weights.chat.files import named_templates
from gptserve.weights.chat.template import load_chat_template
from gptserve.weights.errors import ChatTemplateError, TokenizerError

LISTED = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "listed tools"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def write(folder: Path, **files: object) -> Path:
    """Write files whose names have _ for a dot and __ for a slash before their endings."""
    for name, content in files.items():
        stem, _, ending = name.replace("__", "/").rpartition("_")
        path = folder / f"{stem}.{ending}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("field", "files", "expected"),
    [
        (None, {}, {}),
        ("text", {}, {"default": "text"}),
        (LISTED, {}, {"default": "listed", "tool_use": "listed tools"}),
        (LISTED, {"chat_template_jinja": "a file"}, {"default": "a file"}),
        ("text", {"chat_template_json": {"chat_template": "old"}}, {"default": "text"}),
        (None, {"chat_template_json": {"chat_template": "old"}}, {"default": "old"}),
        (None, {"chat_template_json": {}}, {}),
        ("text", {"additional_chat_templates__tool_use_jinja": "tools"}, {"default": "text", "tool_use": "tools"}),
        (None, {"chat_template_jinja": "a file", "additional_chat_templates__tool_use_jinja": "tools",
                "additional_chat_templates__rag_jinja": "rag"},
         {"default": "a file", "tool_use": "tools", "rag": "rag"}),
        ([{"name": "rag", "template": 5}, *LISTED[:1]], {}, {"default": "listed"}),
    ],
)  # fmt: skip
def test_templates_have_names(
    tmp_path: Path, field: object, files: dict[str, object], expected: dict[str, str]
) -> None:
    assert named_templates(write(tmp_path, **files), {"chat_template": field}) == expected


@pytest.mark.some(1)
@pytest.mark.parametrize("field", [LISTED, None])
def test_chats_with_tools_have_a_template_of_their_own(tmp_path: Path, field: object) -> None:
    files = {"chat_template_jinja": "{{ '' }}listed", "additional_chat_templates__tool_use_jinja": "listed tools"}
    write(tmp_path, tokenizer_config_json={"chat_template": field}, **({} if field else files))
    template = load_chat_template(tmp_path)
    assert template is not None
    messages = [{"role": "user", "content": "Hi"}]
    assert [template.render(messages, {}, tools=tools) for tools in (None, [], [TOOL])] == [
        *["listed"] * 2,
        "listed tools",
    ]
    assert (template.source[-6:], template.tool_source) == ("listed", "listed tools")
    chosen = load_chat_template(tmp_path, "plain")
    assert chosen is not None
    assert chosen.render(messages, {}, tools=[TOOL]) == "User: Hi\nAssistant:", "the chosen one is for all chats"


def test_a_template_for_tools_alone_is_none_for_chats(tmp_path: Path) -> None:
    write(tmp_path, additional_chat_templates__tool_use_jinja="tools")
    assert load_chat_template(tmp_path) is None


@pytest.mark.parametrize("text", ["", "\n"])
def test_a_blank_template_is_none(text: str, tmp_path: Path) -> None:
    assert named_templates(tmp_path, {"chat_template": text}) == {}
    (tmp_path / "chat_template.jinja").write_text(text)
    assert named_templates(tmp_path, {}) == {}


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: chat_template must be text or a list of named"):
        named_templates(tmp_path, {"chat_template": [*LISTED[:1], {"name": "tool_use", "template": 5}]})
    with pytest.raises(TokenizerError, match=r"chat_template.json: chat_template must be text .* got 5"):
        named_templates(write(tmp_path, chat_template_json={"chat_template": 5}), {})
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match="could not be read as UTF-8"):
        named_templates(tmp_path, {})
