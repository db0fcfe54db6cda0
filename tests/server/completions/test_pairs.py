"""Prompts of pairs: those of Qwen3-Reranker's model card, of a template with roles of its own, and of two texts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.completions.pairs import PairPrompt, pair_prompt
from gptserve.weights.chat.template import ChatTemplate
from gptserve.weights.classes import TextClasses
from gptserve.weights.errors import UnsupportedModelError
from tests.server.fake_engine import ByteTokenizer

OF_TOKENS = TextClasses(("no", "yes"), "softmax", (7, 11))
OF_HEAD = TextClasses(("LABEL_0",), "sigmoid")
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endif %}"
    "{% if m.role == 'query' %}Q {{ m.content }}{% endif %}"
    "{% if m.role == 'document' %} D {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
CARD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
DEFAULT = "Given a web search query, retrieve relevant passages that answer the query"
TOKENIZER = ByteTokenizer("<|im_start|>", "<|im_end|>", begin=(2,))


@pytest.fixture(scope="module")
def templates() -> Iterator[dict[str, ChatTemplate]]:
    """One worker process for each."""
    sources = {"chatml": CHATML, "roles": ROLES, "twice": CHATML.replace("m.content", "m.content + m.content")}
    sources["strange"] = CHATML.replace("m.content", "m.content | length | string")
    found = {name: ChatTemplate(source, {}) for name, source in sources.items()}
    yield found
    for template in found.values():
        template.close()


def encode(
    prompt: PairPrompt, instruction: str | None = None, most: int | None = None, document: str = "d"
) -> list[int]:
    return list(prompt.encode(TOKENIZER, "q", document, instruction, most))


def test_a_chat_asks_qwen3_rerankers_question(templates: dict[str, ChatTemplate]) -> None:
    prompt = pair_prompt(TOKENIZER, templates["chatml"], OF_TOKENS)
    for instruction in (None, "Find cats"):
        text = CARD.format(instruction=instruction or DEFAULT, query="q", document="d")
        assert encode(prompt, instruction) == TOKENIZER.encode_with_special(text)


def test_a_template_may_have_roles_of_its_own(templates: dict[str, ChatTemplate]) -> None:
    for classes in (OF_TOKENS, OF_HEAD):
        prompt = pair_prompt(TOKENIZER, templates["roles"], classes)
        assert encode(prompt) == TOKENIZER.encode_with_special("Q q D d<|im_end|>")
        assert encode(prompt, "i") == TOKENIZER.encode_with_special("<|im_start|>i<|im_end|>Q q D d<|im_end|>")


@pytest.mark.parametrize("name", [None, "chatml"])
def test_a_classifier_gets_two_texts_one_after_the_other(templates: dict[str, ChatTemplate], name: str | None) -> None:
    prompt = pair_prompt(TOKENIZER, None if name is None else templates[name], OF_HEAD)
    assert encode(prompt) == TOKENIZER.encode_prompt("qd")
    with pytest.raises(InvalidRequestError, match=r"^instruction may not be given: this model's prompt has no place"):
        encode(prompt, "i")


def test_a_special_token_in_a_text_stays_text(templates: dict[str, ChatTemplate]) -> None:
    prompt = pair_prompt(TOKENIZER, templates["chatml"], OF_TOKENS)
    found = encode(prompt, document="<|im_end|>")
    assert bytes(its for its in found if its < 256).count(b"<|im_end|>") == 1
    assert len(found) == len(encode(prompt)) + len("<|im_end|>") - 1


def test_a_cut_prompt_keeps_what_stands_around_the_texts(templates: dict[str, ChatTemplate]) -> None:
    prompt = pair_prompt(TOKENIZER, templates["roles"], OF_TOKENS)
    assert encode(prompt, document="long", most=7) == TOKENIZER.encode_with_special("Q q D <|im_end|>")
    assert encode(prompt, document="long", most=99) == encode(prompt, document="long")
    message = "^truncate_prompt_tokens must be above 1, the tokens around the texts, got 1$"
    with pytest.raises(InvalidRequestError, match=message):
        encode(prompt, most=1)


@pytest.mark.parametrize("name", ["twice", "strange"])
def test_a_template_must_write_both_texts_once(templates: dict[str, ChatTemplate], name: str) -> None:
    message = "^the chat template must write the query and the document once, as they are$"
    with pytest.raises(UnsupportedModelError, match=message):
        pair_prompt(TOKENIZER, templates[name], OF_TOKENS)


def test_a_model_that_says_yes_needs_a_template() -> None:
    message = (
        "^--task score asks the model in a chat, and this one has no chat template; start with --chat-template FILE$"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        pair_prompt(TOKENIZER, None, OF_TOKENS)


def test_the_instruction_of_a_folder_is_the_default(templates: dict[str, ChatTemplate]) -> None:
    of_roles = pair_prompt(TOKENIZER, templates["roles"], OF_TOKENS, "find it")
    assert encode(of_roles) == encode(of_roles, "find it") != encode(of_roles, "i")
    of_chat = pair_prompt(TOKENIZER, templates["chatml"], OF_TOKENS, "find it")
    assert encode(of_chat) == TOKENIZER.encode_with_special(CARD.format(instruction="find it", query="q", document="d"))
    assert encode(pair_prompt(TOKENIZER, None, OF_HEAD, "find it: ")) == TOKENIZER.encode_prompt("find it: qd")
