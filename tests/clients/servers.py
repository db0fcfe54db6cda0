"""Servers for clients: their start and end, a tiny model to chat with, and the plain way to ask one."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from gptserve.engine.request import Request, TokenOutput
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES
from tests.server.fake_engine import INFO, FakeEngineClient, say
from tests.server.serving import LIMIT_S, Process
from tests.weights.tiny_tokenizers import FAMILIES

CONTEXT = 512
OFTEN = ("--sse-keep-alive-interval", "0.001")  # comments between nearly all events, so that every client meets them
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PERSON = '{"name": "Theo", "age": 5}\n'
"""One token of the tiny model: with a bias towards it, the model writes JSON."""


@contextlib.contextmanager
def served(*flags: str, **options: str) -> Iterator[str]:
    """Serve until the block ends, with flags and options of a Process; give the URL with /v1."""
    process = Process(*flags, **options)
    try:
        with process.wait_until_ready() as http:
            yield f"{str(http.base_url).rstrip('/')}/v1"
        process.popen.terminate()
        assert process.wait()[0] == 0
    finally:
        process.kill()


@contextlib.contextmanager
def ranks_documents(chat_model: Path, folder: Path) -> Iterator[str]:
    """Serve a copy of a chat model, in a new folder, that scores by two of its tokens; give the URL without /v1."""
    shutil.copytree(chat_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"classifier_from_token": ["a", "b"]}))
    with served("--model", str(folder), "--served-model-name", "tiny", "--task", "score") as url:
        yield url.removesuffix("/v1")


def write_chat_model(folder: Path) -> Path:
    """Write a Llama of random weights with a ChatML template."""
    from transformers import PreTrainedTokenizerFast

    library = FAMILIES["qwen"]()
    library.add_tokens([PERSON])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="<|im_end|>", bos_token="<|endoftext|>", chat_template=CHATML
    )
    model_type, fields = SHAPES["Llama"]
    sizes = {"vocab_size": library.get_vocab_size(), "max_position_embeddings": CONTEXT}
    write_model(folder, model_type, {**fields, **sizes})
    tokenizer.save_pretrained(folder)
    return folder


TOOLS = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for m in messages %}{{ m.role }}: {{ m.content or "" }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}assistant:"""
"""A chat template that knows tools; the calls of a model that speaks nonsense are forced."""
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
"""What a model says that calls a tool, in the format that the template shows."""


def scripted(*answers: str) -> FakeEngineClient:
    """Return an engine whose answers are these, one after another. Its tokens are bytes, its context holds many."""
    rest = iter(answers)

    def reply(request: Request) -> Iterator[TokenOutput]:
        return iter(say(next(rest), then_eos=True)(request))

    return FakeEngineClient(reply, info=replace(INFO, max_model_len=200_000))


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    """Return the server's answer to a body, asked for without any client."""
    response = httpx.post(f"{url}/{path}", json=body, timeout=LIMIT_S)
    assert response.is_success, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text_of(url: str, **body: Any) -> str:
    """Return the text of the only choice."""
    [choice] = post(url, "chat/completions" if "messages" in body else "completions", **body)["choices"]
    return str(choice["message"]["content"] if "messages" in body else choice["text"])


def until_stopped(url: str, **chat: Any) -> dict[str, Any]:
    """Return the fields with a stop string that comes: some helpers take an answer of max_tokens for a failure."""
    found = re.search("[a-z]{2}", text_of(url, **chat)[1:])
    assert found is not None
    return {**chat, "stop": [found[0]]}
