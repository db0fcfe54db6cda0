"""Chat templates against transformers' apply_chat_template, on templates written like those that models come with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gptserve.weights.chat.template
from gptserve.weights.chat.template import PLAIN_TEMPLATE, ChatTemplate, load_chat_template
from gptserve.weights.errors import ChatTemplateError, TokenizerError
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from gptserve.weights.workers import Limits

SPECIAL_TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|return|>"),
]
CHATML = """\
{% for message in messages %}
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- ' [INST] ' + system_message + '\n\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {% generation %}{{- ' ' + message['content'] + eos_token }}{% endgeneration %}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported after the system message!') }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}
"""
PHI_3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + "
    "'<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
HARMONY = """\
{%- macro header(role, channel=none) -%}
    {{- "<|start|>" ~ role ~ ("<|channel|>" ~ channel if channel else "") ~ "<|message|>" -}}
{%- endmacro -%}
{{- header("system") }}
{{- "You are ChatGPT.\nCurrent date: " + strftime_now("%Y-%m-%d") + "\n\nReasoning: " }}
{{- (reasoning_effort if reasoning_effort is defined else "medium") + "<|end|>" }}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages if message.role == "user" %}{% set ns.last_user = loop.index0 %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == "tool" %}{% continue %}{% endif %}
    {%- if message.role == "assistant" %}
        {%- if message.thinking is defined %}
            {{- header("assistant", "analysis") + message.thinking + "<|end|>" }}
        {%- endif %}
        {{- header("assistant", "final") + message.content + ("<|return|>" if loop.last else "<|end|>") }}
    {%- else %}
        {{- header({"system": "developer"}.get(message.role, message.role)) + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{% endif -%}
"""
EVERYTHING = """\
{% for message in messages %}
  {%- set outer = loop -%}
{{ loop.index }}/{{ loop.length }} {{ loop.revindex0 }} {{ loop.last }} {{ loop.cycle('a', 'b') }}
  {{ loop.changed(message.role) }} {{ loop.previtem.role if loop.previtem is defined }}
  {{ loop.nextitem.role if loop.nextitem is defined else 'end' }}
  {% for name, value in message.items() | sort if name != 'thinking' %}
    {{- name ~ '=' ~ value | tojson ~ ';' }}{{ outer.index + loop.index * 2 }}
  {%- else %}nothing{% endfor %}
{% endfor %}
{{ messages | tojson(indent=2) }} {{ {'é': '<&>', 'b': [1, none, true]} | tojson(sort_keys=true) }}
{% for tree in [[1, [2, 3]], [4]] recursive %}
  {{- '(' ~ (tree if tree is number else loop(tree)) ~ ')' }}{% endfor %}
{% for letter in 'abc' %}{% if letter == 'c' %}{% break %}{% endif %}{{ letter }}{% endfor %}
{%- macro wrap(n) %}<{{ caller(n) }}>{% endmacro %}{% call(n) wrap(2 ** 3) %}{{ '=' * n }}{% endcall %}
{{ messages[::-1] | map(attribute='role') | join(', ') }} {{ missing }} {{ missing is defined }} {{ tools }}
{{ documents }} {{ add_generation_prompt }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{% generation %}{% set inner = 1 %}{{ inner }}{% endgeneration %}{{ inner }} {{ eos_token + bos_token + unk_token }}
{{ range(3) | list }} {{ '%s-%d' % ('x', 3) }} {{ [1] + [2] }} {{ 1.5 * 2 }} {{ dict(a=1) }} {{ 7 // 2 ~ 7 % 4 }}
"""
TEMPLATES = {
    "chatml": CHATML,
    "llama 3": LLAMA_3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi 3": PHI_3,
    "harmony": HARMONY,
    "everything": EVERYTHING,
    "plain": PLAIN_TEMPLATE,
}


def say(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Return a conversation of user and assistant in turn."""
    said = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return said if system is None else [{"role": "system", "content": system}, *said]


CONVERSATIONS = {
    "one": say("Hi"),
    "three": say(" Hi \n", "Hello, “you”!", "Éh? 😀"),
    "system": say("Hi", system="Be brief."),
    "empty": say(""),
    "template code": say("{{ 7 * 7 }}{% for x in y %}{# no #}", "{{ messages }}", "{% endfor %}\n{{"),
    "special tokens": say("a<|im_end|>\n<|im_start|>system\nb<|endoftext|><|end|>[/INST]"),
    "html": say("<b>&amp;'\"</b>\u2028"),
    "reasoning": [{**message, "reasoning_content": "Hm."} for message in say("2+2?", "4", "Sure?")],
}

MakeChat = Callable[[str], tuple[Any, ChatTemplate, Tokenizer]]


@pytest.fixture(scope="module")
def make_chat(storyteller: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeChat]:
    """Write a model folder with a template; return transformers' tokenizer, our template, our tokenizer."""
    from transformers import AutoTokenizer

    made: dict[str, tuple[Any, ChatTemplate, Tokenizer]] = {}

    def make(template: str) -> tuple[Any, ChatTemplate, Tokenizer]:
        if template not in made:
            folder = tmp_path_factory.mktemp("chat")
            theirs = AutoTokenizer.from_pretrained(storyteller)
            theirs.add_special_tokens({"extra_special_tokens": SPECIAL_TOKENS})
            theirs.chat_template = template
            theirs.save_pretrained(folder)
            saved = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
            # What transformers adds around a text is nothing, but our tokenizer would rather not guess.
            (folder / "tokenizer.json").write_text(json.dumps({**saved, "post_processor": None}), encoding="utf-8")
            ours = load_chat_template(folder)
            assert ours is not None
            made[template] = AutoTokenizer.from_pretrained(folder), ours, Tokenizer.open(folder)
        return made[template]

    yield make
    for _, ours, _ in made.values():
        ours.close()


def render_both(
    chat: tuple[Any, ChatTemplate, Tokenizer],
    messages: list[dict[str, str]],
    variables: dict[str, Any],
    **options: bool,
) -> tuple[str | None, str | None]:
    """Return transformers' text and ours, None for a refusal, having compared the ids."""
    theirs, ours, tokenizer = chat
    try:
        expected = theirs.apply_chat_template(messages, tokenize=False, **options, **variables)
    except Exception:
        expected = None
    try:
        text = ours.render(messages, variables, **options)
    except ChatTemplateError:
        return expected, None
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options, **variables)
    assert tokenizer.encode_with_special(text) == ids
    return expected, text


@pytest.mark.some(4)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_text_and_ids_are_those_of_transformers(
    make_chat: MakeChat, template: str, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    today = None
    while today != date.today():  # the harmony template writes the date
        today = date.today()
        variables = {"reasoning_effort": "high"} if add_generation_prompt else {}
        options = {"add_generation_prompt": add_generation_prompt}
        expected, text = render_both(make_chat(template), messages, variables, **options)
    assert text == expected
    refused = template == GEMMA and messages[0]["role"] == "system"
    assert (text is None) is refused


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=4), st.data())
def test_any_text_is_rendered_as_transformers_does(
    make_chat: MakeChat, contents: list[str], data: st.DataObject
) -> None:
    template = data.draw(st.sampled_from([CHATML, LLAMA_3, PHI_3, EVERYTHING, PLAIN_TEMPLATE]))
    expected, text = render_both(make_chat(template), say(*contents), {}, add_generation_prompt=True)
    assert text is not None
    assert text == expected


@pytest.mark.parametrize("content", ["Once", "Once upon ", " a\n\n", "Once CONTINUE_FINAL_MESSAGE_TAG twice"])
@pytest.mark.parametrize("template", [CHATML, LLAMA_3, MISTRAL, PHI_3, PLAIN_TEMPLATE])
def test_a_final_message_is_continued_where_transformers_does(make_chat: MakeChat, template: str, content: str) -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    expected, text = render_both(make_chat(template), say("Go on", content), {}, **options)
    assert text is not None
    assert text == expected
    assert text.rstrip().endswith(content.strip())


def test_a_final_message_that_is_left_out_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(ChatTemplateError, match="leaves out the final message, so that it cannot be continued"):
        template.render(say("Hi", "Once"), {}, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("messages", [say("Hi", "there")[::-1], [{"role": "tool", "content": "x"}]])
@pytest.mark.parametrize("template", [MISTRAL, GEMMA])
def test_what_a_template_refuses_is_told_in_its_words(
    make_chat: MakeChat, template: str, messages: list[dict[str, str]]
) -> None:
    expected, text = render_both(make_chat(template), messages, {})
    assert (expected, text) == (None, None)
    with pytest.raises(ChatTemplateError, match=r"^the chat template refuses this conversation: .*oles must alternate"):
        make_chat(template)[1].render(messages, {})


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("{{ messages[0].content + missing.more }}", "'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", 'TypeError: can only concatenate str (not "int") to str'),
        ("{{ messages[7].content }}", "list object has no element 7"),
    ],
)
def test_what_goes_wrong_in_a_template_is_told(source: str, cause: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source, {}).render(say("Hi"), {})
    assert str(caught.value) == f"the chat template refuses this conversation: {cause}"


def test_a_broken_template_is_told_when_it_is_used() -> None:
    template = ChatTemplate("{% for %}", {})
    with pytest.raises(ChatTemplateError, match=r"^the chat template is not valid: Expected an expression"):
        template.render(say("Hi"), {})


def test_a_conversation_is_not_changed() -> None:
    messages = [{"role": "user", "content": "Hi", "reasoning_content": "Hm"}]
    ChatTemplate(CHATML, {}).render(messages, {}, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "user", "content": "Hi", "reasoning_content": "Hm"}]


@pytest.mark.slow
def test_the_server_needs_no_jinja() -> None:
    code = """
import sys, gptserve.server.app, gptserve.weights.chat.template
template = gptserve.weights.chat.template.ChatTemplate("{{ messages[0].content }}", {})
print(template.render([{"content": "Hi"}], {}), "jinja2" in sys.modules)
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("Hi False\n", "")


ENDLESS = "{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% if BODY %}x{% endif %}{% endfor %}{% endfor %}"
LONG = "{% set x = messages[0].content * 1000000 %}"
TIME = "it took more than 1 s of CPU time"
MEMORY = "it needed more than 256 MiB of memory"
HOSTILE = {
    "a loop": (ENDLESS.replace("BODY", "i < 0"), TIME),
    "a macro": ("{% macro f(n) %}{% if n %}{% set x = f(n - 1), f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}", TIME),
    "sort": (LONG + ENDLESS.replace("BODY", "(r | sort | first) < 0"), TIME),
    "groupby": (ENDLESS.replace("BODY", "(r | groupby('real') | first | first) < 0"), TIME),
    "pprint": (ENDLESS.replace("BODY", "(r | list | pprint) is none"), TIME),
    "wordwrap": (LONG + ENDLESS.replace("BODY", "(x | wordwrap(2)) is none"), TIME),
    "a power": ("{% set n = 9 %}{{ n ** 99999999 }}", TIME),
    "ljust": ("{{ 'a'.ljust(2000000000) }}", MEMORY),
    "indent": ("{% set x = (messages[0].content ~ '\n') * 10000000 %}{% set y = x | indent(200) %}", MEMORY),
    "format": ("{{ '%2000000000d' % 1 }}", MEMORY),
    "a sum": ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", MEMORY),
    "output": ("{{ 'x' * 17000000 }}", "it made more than 16 MiB"),
}


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    low = Limits(cpu_s=1, memory_bytes=2**28, open_cpu_s=1, open_memory_bytes=2**28)
    monkeypatch.setattr(gptserve.weights.chat.template, "LIMITS", low)


ALWAYS = ("a power", "ljust", "output")  # one of each limit; the others are slow


@pytest.mark.slow
@pytest.mark.usefixtures("low_limits")
@pytest.mark.parametrize(
    ("source", "cause"),
    [pytest.param(*HOSTILE[name], id=name, marks=() if name in ALWAYS else pytest.mark.slow) for name in HOSTILE],
)
def test_a_template_that_passes_a_limit_refuses_the_conversation(source: str, cause: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source, {}).render(say("Hi"), {})
    assert str(caught.value) == f"the chat template refuses this conversation: {cause}"


@pytest.mark.slow
@pytest.mark.usefixtures("low_limits")
@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("{{ 9 ** 99999999 }}", TIME),  # a constant, which Jinja computes while it compiles
        pytest.param(
            "{{ " + "(" * 5000 + ")" * 5000 + " }}",
            "RecursionError: maximum recursion depth exceeded",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a constant", "parentheses"],
)
def test_a_template_that_passes_a_limit_while_it_is_compiled_is_not_valid(source: str, cause: str) -> None:
    template = ChatTemplate(source, {})
    for attempt in (template.check, lambda: template.render(say("Hi"), {})):
        with pytest.raises(ChatTemplateError) as caught:
            attempt()
        assert str(caught.value).startswith(f"the chat template is not valid: {cause}")


def write_config(folder: Path, **fields: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def loaded_text(folder: Path, chosen: str | None = None) -> str:
    template = load_chat_template(folder, chosen)
    assert template is not None
    return template.render(say("Hi"), {})


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "a list"}]


@pytest.mark.parametrize(("field", "expected"), [("text", "text"), (NAMED, "a list")])
def test_the_configuration_may_hold_one_template_or_several(tmp_path: Path, field: object, expected: str) -> None:
    assert loaded_text(write_config(tmp_path, chat_template=field)) == expected


def test_a_template_file_wins_over_the_configuration_and_the_one_chosen_over_both(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="text", bos_token="<s>")
    (tmp_path / "chat_template.jinja").write_text("a file, é", encoding="utf-8")
    assert loaded_text(tmp_path) == "a file, é"
    mine = tmp_path / "mine.jinja"
    mine.write_text("mine {{ bos_token }}", encoding="utf-8")
    assert loaded_text(tmp_path, str(mine)) == "mine <s>"
    assert loaded_text(tmp_path, "plain") == "<s>User: Hi\nAssistant:"


@pytest.mark.parametrize("field", [None, [], [{"name": "tool_use", "template": "tools"}]])
def test_a_model_may_have_no_template(tmp_path: Path, field: object) -> None:
    assert load_chat_template(tmp_path) is None
    assert load_chat_template(write_config(tmp_path, chat_template=field)) is None


@pytest.mark.parametrize("field", [5, {"default": "x"}, [{"name": "default", "template": 5}]])
def test_a_template_that_is_no_text_is_refused(tmp_path: Path, field: object) -> None:
    with pytest.raises(TokenizerError, match="chat_template must be text or a list of named texts, got "):
        load_chat_template(write_config(tmp_path, chat_template=field))


def test_a_chosen_file_must_be_valid_jinja_in_utf_8(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    with pytest.raises(ChatTemplateError, match="not valid: Expected an expression"):
        load_chat_template(tmp_path, str(broken))
    broken.write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match="could not be read as UTF-8"):
        load_chat_template(tmp_path, str(broken))
    with pytest.raises(ChatTemplateError, match="could not be read as UTF-8"):
        load_chat_template(tmp_path, str(tmp_path / "none.jinja"))


def test_special_tokens_are_known_by_name(tmp_path: Path) -> None:
    source = "{{ bos_token }} {{ eos_token }} {{ image_token }} {{ pad_token }} {{ add_bos_token }} {{ sep_token }}"
    older = {"sep_token": {"content": "<sep>"}, "bos_token": "<old>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    fields: dict[str, object] = {
        "chat_template": source,
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": True,
        "extra_special_tokens": {"image_token": "<image>"},
    }
    assert loaded_text(write_config(tmp_path, **fields)) == "<old> </s> <image>   <sep>"
    assert loaded_text(write_config(tmp_path, **fields, added_tokens_decoder={})) == "<s> </s> <image>   "


def test_variables_of_the_client_win_over_special_tokens_as_in_transformers(make_chat: MakeChat) -> None:
    expected, text = render_both(make_chat(LLAMA_3), say("Hi"), {"bos_token": "<mine>"}, add_generation_prompt=True)
    assert text == expected
    assert text is not None
    assert text.startswith("<mine><|start_header_id|>")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[1].reasoning }}|{{ messages[1].thinking }}", "Hm.|Hm."),
        ("{{ messages[1].get('reasoning') }}", "Hm."),
        ("{{ messages[1]['reasoning_content'] }}{{ messages[1] | length }}", "Hm.4"),
    ],
)
def test_reasoning_has_the_name_that_a_template_reads(source: str, expected: str) -> None:
    messages = [*say("Sure?"), {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}]
    assert ChatTemplate(source, {}).render(messages, {}) == expected
