"""Scores of a text through the application: lm-evaluation-harness's rule finds the greedy tokens and no others.

Its backend local-completions sends the token ids of context and continuation with echo, logprobs 1 and max_tokens 1
(its forerunners: logprobs 10 and max_tokens 0) and calls a token greedy if its logprob equals the largest of its
top_logprobs. What is greedy is decided here by the raw logits, computed apart from any engine.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from gptserve.engine.backends.cpu.decoder import NativeDecoder
from gptserve.engine.config import EngineConfig
from gptserve.engine.model.attention_specs import layer_specs
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.runner.attention_choice import choose_backend
from gptserve.weights.families import load_config
from gptserve.weights.storyteller.recipe.generator import stories
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.e2e.application import ask
from tests.parity.test_families import paged_logits

STORYTELLER = Path(__file__).parents[2] / "weights" / "storyteller"
CONTEXT_LENGTH = 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.open(STORYTELLER)


@functools.cache
def texts() -> list[list[int]]:
    """Return the starts of stories, a later token of every other one exchanged for another story's."""
    starts = [list(tokenizer().encode(story.text))[:60] for story in stories("held_out", 12)]
    return [ids[:40] + starts[i - 1][40:] if i % 2 else ids for i, ids in enumerate(starts)]


@functools.cache
def raw_logits(dtype: str) -> list[torch.Tensor]:
    """Return the logits [tokens, vocab] after every token of every text."""
    specs = layer_specs(load_config(STORYTELLER), torch.device("cpu"))
    backend = choose_backend(EngineConfig(STORYTELLER), torch.device("cpu"), DTYPES[dtype], specs, 64)
    with torch.inference_mode():
        return paged_logits(STORYTELLER, texts(), backend, DTYPES[dtype])


def greedy_by_logits(logits: list[torch.Tensor]) -> list[list[bool]]:
    """Return for every token but a text's first whether no logit in its place is larger than its own."""
    pairs = zip(texts(), logits, strict=True)
    return [[bool(row[token] == row.max()) for token, row in zip(ids[1:], rows, strict=False)] for ids, rows in pairs]


def greedy_by_rule(choice: dict[str, Any], num_generated: int) -> list[bool]:
    """Return the same of the tokens of an echoed prompt, as the harness finds it."""
    logprobs = choice["logprobs"]
    end = len(logprobs["tokens"]) - num_generated
    pairs = zip(logprobs["token_logprobs"][1:end], logprobs["top_logprobs"][1:end], strict=True)
    return [own == max(top.values()) for own, top in pairs]


@functools.cache
def echoed(dtype: str, logprobs: int, max_tokens: int) -> list[dict[str, Any]]:
    fields = {"temperature": 0, "seed": 1234, "echo": True, "logprobs": logprobs, "max_tokens": max_tokens}
    [response] = ask(STORYTELLER, tokenizer(), [{"prompt": texts(), **fields}], dtype=dtype)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("logprobs", "max_tokens"), [(1, 1), (5, 1), (1, 0), (10, 0)])
def test_a_token_is_greedy_exactly_where_its_logprob_is_the_largest(dtype: str, logprobs: int, max_tokens: int) -> None:
    found = [greedy_by_rule(choice, max_tokens) for choice in echoed(dtype, logprobs, max_tokens)]
    assert found == greedy_by_logits(raw_logits(dtype))
    flat = [is_greedy for text in found for is_greedy in text]
    assert min(flat.count(True), flat.count(False)) > 50


def test_numbers_of_another_type_would_be_seen() -> None:
    """The negative control: rounded logits name other tokens in a place or two."""
    rounded = [rows.bfloat16() for rows in raw_logits("float32")]
    assert [greedy_by_rule(choice, 1) for choice in echoed("float32", 1, 1)] != greedy_by_logits(rounded)


def test_equal_logits_are_all_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 equals are common: the rule counts each of them, argmax only the one with the lowest id."""
    for kind in (Decoder, NativeDecoder):
        logits = kind.logits
        monkeypatch.setattr(kind, "logits", lambda self, rows, of=logits: of(self, rows).bfloat16().float())
    ties = []
    pairs = zip(texts(), raw_logits.__wrapped__("bfloat16"), echoed.__wrapped__("bfloat16", 5, 1), strict=True)
    for ids, rows, found in pairs:
        rule = greedy_by_rule(found, 1)
        for position, (token, row) in enumerate(zip(ids[1:], rows, strict=False)):
            if row[token] == row.max() and row.argmax() != token:
                ties.append(rule[position])
    assert ties
    assert all(ties)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_greedy_continuation_is_greedy_until_a_token_is_exchanged(dtype: str) -> None:
    context = texts()[0][:CONTEXT_LENGTH]
    generate = {"prompt": context, "temperature": 0, "max_tokens": 30, "logprobs": 1, "prompt_logprobs": 3}
    [made] = ask(STORYTELLER, tokenizer(), [generate], dtype=dtype)
    continuation = [tokenizer().encode(token)[0] for token in made.json()["choices"][0]["logprobs"]["tokens"]]
    other = [*continuation[:-1], (continuation[-1] + 1) % 1000]
    score = {"temperature": 0, "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 0}
    bodies = [{"prompt": context + tokens, **score} for tokens in (continuation, other)]
    same, exchanged = (response.json()["choices"][0] for response in ask(STORYTELLER, tokenizer(), bodies, dtype=dtype))
    start = CONTEXT_LENGTH - 1
    assert all(greedy_by_rule(same, 1)[start:])
    assert (
        same["logprobs"]["token_logprobs"][CONTEXT_LENGTH:-1] == made.json()["choices"][0]["logprobs"]["token_logprobs"]
    )
    assert greedy_by_rule(exchanged, 1)[start:] == [True] * 29 + [False]
    ranks = [next(iter(entry.values()))["rank"] for entry in exchanged["prompt_logprobs"][CONTEXT_LENGTH:]]
    assert ranks[:-1] == [1] * 29
    assert ranks[-1] > 1


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_are_those_of_the_raw_logits(dtype: str) -> None:
    fields = {"max_tokens": 1, "prompt_logprobs": 4}
    [response] = ask(STORYTELLER, tokenizer(), [{"prompt": texts(), **fields}], dtype=dtype)
    for choice, ids, rows in zip(response.json()["choices"], texts(), raw_logits(dtype), strict=True):
        assert choice["prompt_logprobs"][0] is None
        for token, entry, row in zip(ids[1:], choice["prompt_logprobs"][1:], rows, strict=False):
            assert next(iter(entry)) == str(token)
            assert {id_: score["rank"] for id_, score in entry.items()} == {
                id_: int((row > row[int(id_)]).sum()) + 1 for id_ in entry
            }
            logprobs = row.log_softmax(-1)
            expected = [logprobs[int(id_)].item() for id_ in entry]
            assert [score["logprob"] for score in entry.values()] == pytest.approx(expected, abs=1e-5)
