"""Models of other families through the real server, chosen as a user does: a folder with weights and tokenizer.

Greedy text is that of the ids which transformers' own model gives after its own tokenizer's prompt, for a text and for
a conversation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.parity.models import load_in_transformers, write_model
from tests.parity.shapes import SHAPES
from tests.server.serving import Process
from tests.weights.tiny_tokenizers import FAMILIES

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MESSAGES = [{"role": "user", "content": "The cat sat, 1000 years old"}]
NUM_TOKENS = 12

MODELS = {
    "Llama 3": ("Llama", "llama3", "<|begin_of_text|>"),
    "Llama 2": ("Llama", "llama2", "<s>"),
    "gpt-oss": ("gpt-oss, past its window", "gpt_oss", ""),
}


def write(folder: Path, shape: str, tokenizer_name: str, bos: str) -> Any:
    """Write a whole model folder and return transformers' tokenizer of it."""
    from transformers import PreTrainedTokenizerFast

    library = FAMILIES[tokenizer_name]()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, bos_token=bos or None, chat_template=TEMPLATE)
    model_type, fields = SHAPES[shape]
    write_model(folder, model_type, {**fields, "vocab_size": library.get_vocab_size()})
    tokenizer.save_pretrained(folder)
    return tokenizer


def greedy_ids(folder: Path, prompt: list[int]) -> list[int]:
    model, ids = load_in_transformers(folder), list(prompt)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0, "skip_special_tokens": False, "ignore_eos": True}
    response = client.post(path, json={**fields, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "Llama 3" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_text_and_conversation_are_continued_as_in_transformers(name: str, tmp_path: Path) -> None:
    tokenizer = write(tmp_path, *MODELS[name])
    text = "The cat sat on the mat"
    prompt = tokenizer(text).input_ids
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    conversation = tokenizer(rendered, add_special_tokens=False).input_ids
    server = Process("--model", str(tmp_path), "--dtype", "float32", "--num-blocks", "64")
    try:
        with server.wait_until_ready() as client:
            completion = post(client, "/v1/completions", prompt=text)
            chat = post(client, "/v1/chat/completions", messages=MESSAGES)
    finally:
        server.popen.terminate()
        assert server.wait()[0] == 0

    for answer, ids, got in (
        (completion, prompt, completion["choices"][0]["text"]),
        (chat, conversation, chat["choices"][0]["message"]["content"]),
    ):
        assert answer["usage"]["prompt_tokens"] == len(ids)
        # By our bytes of each token: random ones are seldom whole UTF-8, which libraries mark in different ways.
        assert got == Tokenizer.open(tmp_path).decode(greedy_ids(tmp_path, ids)[len(ids) :])
