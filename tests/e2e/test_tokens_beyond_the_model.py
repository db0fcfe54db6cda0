"""A tokenizer with added tokens that its model lacks, as Gemma 3's text models have: served, but for those tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.e2e.application import MODEL, ask

IMAGE, PAD = 2030, 2031
LACKED = {"message": f"prompt: token ids must be in [0, {IMAGE}), got {IMAGE}", "param": "prompt"}


@pytest.fixture
def folder(storyteller: Path, tmp_path: Path) -> Path:
    """Storyteller with a special token and one that is always found, both beyond its vocabulary."""
    shutil.copytree(storyteller, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("recipe", "*.py"))
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    last = described["added_tokens"][-1]
    described["added_tokens"] += [
        {**last, "id": IMAGE, "content": "<image_soft_token>", "special": True},
        {**last, "id": PAD, "content": "<pad>", "special": False},
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    return tmp_path


def test_only_prompts_with_such_a_token_are_refused(folder: Path) -> None:
    good: list[dict[str, Any]] = [
        {"prompt": "Once upon a time"},
        {"messages": [{"role": "user", "content": "Tell me a story."}]},
        {"prompt": "{", "structured_outputs": {"regex": "[a-z]{2,4}"}},
    ]
    bad: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"prompt": [1, IMAGE]}, LACKED),
        ({"prompt": "<image_soft_token>"}, LACKED),
        ({"prompt": "a <pad> b"}, {**LACKED, "message": f"prompt: token ids must be in [0, {IMAGE}), got {PAD}"}),
        ({"messages": [{"role": "user", "content": "see <image_soft_token>"}]}, {**LACKED, "param": "messages"}),
        (
            {"prompt": "a", "logit_bias": {str(IMAGE): 5}},
            {"message": f"logit_bias: token ids must be in [0, {IMAGE}), got {IMAGE}", "param": "logit_bias"},
        ),
    ]
    common = {"model": MODEL, "max_tokens": 40, "temperature": 2.0, "seed": 1, "ignore_eos": True, "logprobs": None}
    tokenizer = Tokenizer.of_model(folder)

    answers = ask(folder, tokenizer, [common | body for body in (*good, *(body for body, _ in bad))])

    for body, answer in zip(good, answers, strict=False):
        assert answer.status_code == 200, (body, answer.json())
    for (body, expected), answer in zip(bad, answers[len(good) :], strict=True):
        assert answer.status_code == 400, body
        error = answer.json()["error"]
        assert {name: error[name] for name in expected} == expected


def test_such_a_token_is_never_sampled(folder: Path) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 200, "temperature": 2.0, "seed": 3, "ignore_eos": True}
    [answer] = ask(folder, Tokenizer.of_model(folder), [{**body, "logprobs": 5, "return_tokens_as_token_ids": True}])

    assert answer.status_code == 200, answer.json()
    tokens = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
    ids = {int(token.removeprefix("token_id:")) for entry in tokens for token in entry}
    assert len(ids) > 100
    assert max(ids) < IMAGE
