"""No NaN and no infinity ever reaches a client: minus infinity is a number there, the others are a refusal.

A model with chosen logits goes the whole way. All its blocks add nothing, so that the logits after a token depend on
its position alone, and each position has one row of LOGITS.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gptserve.server.text.output import MIN_LOGPROB
from tests.e2e.application import ask
from tests.server.fake_engine import ByteTokenizer

HUGE = 3e38
"""Near fp32's end: twice this overflows."""
KINDS = ("plain", "few", "infinite", "nan")
NUM_POSITIONS = 64
NOT_FINITE = "choice 0: the model's logits for this request were not finite (NaN or infinity)"
CANDIDATES = (97, 98, 99)
"""The only tokens that the kind `few` leaves possible."""

FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "filtered": {"top_p": 0.9, "min_p": 0.1, "top_k": 7, "temperature": 0.1},
    "biased": {"logit_bias": {str(token): -100 for token in CANDIDATES}},
    "all but impossible": {"logit_bias": {"5": 100}, "repetition_penalty": 100, "presence_penalty": 2},
}
ASKED: dict[str, dict[str, Any]] = {
    "completion": {"logprobs": 5},
    "stream": {"logprobs": 5, "stream": True},
    "echo": {"logprobs": 5, "echo": True},
    "echo alone": {"logprobs": 5, "echo": True, "max_tokens": 0},
    "streamed echo": {"logprobs": 5, "echo": True, "stream": True},
    "prompt_logprobs": {"prompt_logprobs": 5},
    "chat": {"messages": [{"role": "user", "content": "abc"}], "logprobs": True, "top_logprobs": 5},
    "streamed chat": {
        **{"messages": [{"role": "user", "content": "abc"}], "logprobs": True, "top_logprobs": 5},
        "stream": True,
    },
    "chat's prompt_logprobs": {"messages": [{"role": "user", "content": "abc"}], "prompt_logprobs": 5},
}


def write_model(folder: Path, kinds: dict[int, str]) -> Path:
    """Write a model whose logits after a position are of the kind named for it, elsewhere of the kind plain.

    The final norm makes of a position's (1, -1) in the two places of its kind (2, -2), which the head reads.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=257, n_positions=NUM_POSITIONS, n_embd=2 * len(KINDS), n_layer=1, n_head=1, tie_word_embeddings=False
    )
    config.bos_token_id = config.eos_token_id = None
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float("ln_f.weight" in name))
        for position in range(NUM_POSITIONS):
            place = 2 * KINDS.index(kinds.get(position, "plain"))
            model.transformer.wpe.weight[position, place : place + 2] = torch.tensor([1.0, -1.0])
        head = model.lm_head.weight
        head[:, 0] = torch.linspace(-1, 1, 257)
        head[:, 2] = -HUGE
        head[list(CANDIDATES), 2] = torch.tensor([0.5, 0.5, -1.0])
        head[100, 4] = HUGE
        head[100, 6:8] = HUGE
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mostly_impossible(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits are minus infinity for all but three tokens, after the first."""
    return write_model(tmp_path_factory.mktemp("few"), dict.fromkeys(range(1, NUM_POSITIONS), "few"))


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    prompt = {} if "messages" in fields else {"prompt": [97, 98, 5]}
    return {"max_tokens": 3, "seed": 1, "ignore_eos": True, **prompt, **fields}


def documents(text: str) -> list[Any]:
    """Return the JSON of an answer or of all events of a stream; what JSON does not have is an error."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(part, parse_constant=refuse) for part in data or [text] if part != "[DONE]"]


def numbers(value: Any) -> list[float]:
    """Return all numbers anywhere in a document."""
    if isinstance(value, dict | list):
        return [number for item in (value.values() if isinstance(value, dict) else value) for number in numbers(item)]
    return [value] if isinstance(value, float) else []


def test_the_check_would_see_infinity() -> None:
    for text in ('{"a": NaN}', 'data: {"a": [-Infinity]}\n\ndata: [DONE]\n', "Infinity"):
        with pytest.raises(AssertionError, match="is no JSON"):
            documents(text)


def test_minus_infinity_is_a_number(mostly_impossible: Path) -> None:
    bodies = [body_of(asked | fields) for asked in ASKED.values() for fields in FIELDS.values()]
    for body, response in zip(bodies, ask(mostly_impossible, ByteTokenizer(), bodies), strict=True):
        assert response.status_code == 200, response.text
        found = documents(response.text)
        assert "error" not in found[-1]
        logprobs = [number for number in numbers(found) if number <= 0]
        assert MIN_LOGPROB in logprobs, body
        assert min(logprobs) == MIN_LOGPROB
        assert any(-10 < number < 0 for number in logprobs), body


def test_an_impossible_token_is_never_drawn(mostly_impossible: Path) -> None:
    bodies = [body_of({**fields, "seed": seed, "max_tokens": 20}) for fields in FIELDS.values() for seed in range(5)]
    responses = ask(mostly_impossible, ByteTokenizer(), bodies)
    assert {char for response in responses for char in response.json()["choices"][0]["text"]} == set("abc")


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", ["infinite", pytest.param("nan", marks=pytest.mark.slow)])
@pytest.mark.parametrize("asked", ASKED)
def test_other_numbers_that_are_not_finite_end_the_request(tmp_path: Path, kind: str, asked: str) -> None:
    """After the prompt's second token: its third has no logprob, but what is generated has."""
    folder = write_model(tmp_path, {1: kind})
    fields = ASKED[asked]
    scores_prompt = fields.get("echo") or "prompt_logprobs" in fields
    bodies = [body_of(fields), body_of({name: value for name, value in fields.items() if name == "messages"})]
    response, unscored = ask(folder, ByteTokenizer(), bodies)
    [*before, last] = documents(response.text)
    if scores_prompt:
        assert before == []
        assert (last["error"]["code"], last["error"]["message"]) == ("generation_failed", NOT_FINITE)
        assert response.status_code == (200 if "stream" in fields else 500)
    else:
        assert response.status_code == 200
        assert "error" not in last
    assert unscored.status_code == 200
    documents(unscored.text)


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", ["infinite", "nan"])
@pytest.mark.parametrize("position", [2, 3])
def test_what_cannot_be_drawn_ends_the_request(tmp_path: Path, kind: str, position: int) -> None:
    """After the prompt's last token nothing can be drawn, after the first generated one the second cannot."""
    folder = write_model(tmp_path, {position: kind})
    bodies = [body_of(fields | {"logprobs": 5}) for fields in ({}, {"temperature": 0}, {"stream": True})]
    for body, response in zip(bodies, ask(folder, ByteTokenizer(), bodies), strict=True):
        [*before, last] = documents(response.text)
        assert (last["error"]["code"], last["error"]["message"]) == ("generation_failed", NOT_FINITE)
        assert len(before) == (position - 2 if "stream" in body else 0)
