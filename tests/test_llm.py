"""The door for scripts: text or ids in, text out, repeatable by seed."""

from __future__ import annotations

from pathlib import Path

import pytest

import gptserve
from gptserve import LLM
from gptserve.engine.errors import EngineError, InvalidRequestError
from gptserve.engine.request import FinishReason, Request, SamplingParams


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_threads=1, kv_cache_bytes=2**26)


def test_the_embedded_model_tells_a_story_and_ends_it(llm: LLM) -> None:
    (story,) = llm.generate("Once upon a time", SamplingParams(max_tokens=400, temperature=0.8), seed=1)
    assert story.finish_reason is FinishReason.STOP
    assert len(story.text.split()) > 30
    assert "<|endoftext|>" not in story.text
    assert story.text.rstrip()[-1] in '."!?'


def test_results_come_in_the_order_of_the_prompts_and_equal_those_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, logprobs=1)
    prompts = ["Once upon a time", [5, 6, 7], "The fox"]
    together = llm.generate(prompts, params, seed=7)
    assert [c.prompt_token_ids for c in together] == [
        tuple(llm.tokenizer.encode("Once upon a time")), (5, 6, 7), tuple(llm.tokenizer.encode("The fox")),
    ]  # fmt: skip
    assert together == [llm.generate([prompt], params, seed=7)[0] for prompt in prompts]
    assert [len(c.logprobs) for c in together] == [12, 12, 12]


def test_a_seed_that_was_drawn_repeats_the_completion(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.5)
    (first,) = llm.generate("One day", params)
    assert llm.generate("One day", params, seed=first.seed) == [first]
    assert llm.generate("One day", params)[0].seed != first.seed


def test_one_bad_prompt_refuses_all_before_anything_is_computed(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt must hold at least one token"):
        llm.generate(["fine", []])
    assert not llm.engine.has_work


def test_a_consumer_that_stops_early_aborts(llm: LLM) -> None:
    requests = [Request(f"r{i}", (5, 6), SamplingParams(max_tokens=50), seed=0) for i in range(3)]
    stream = llm.stream(requests)
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    assert llm.engine.stats.num_used_blocks == 0


def test_a_second_stream_is_refused_until_the_first_has_ended(llm: LLM) -> None:
    first = llm.stream([Request("r", (5, 6), SamplingParams(max_tokens=3), seed=0)])
    tokens = [next(first)]
    with pytest.raises(EngineError, match="this LLM is computing another stream"):
        llm.generate("Once")
    tokens += first
    assert len(tokens) == 3
    assert llm.generate("Once", SamplingParams(max_tokens=1))[0].token_ids


def test_a_model_may_be_a_folder(tiny_gpt2: Path, storyteller: Path) -> None:
    assert LLM(storyteller, num_threads=1, max_model_len=64, num_blocks=4).engine.info.max_model_len == 64


def test_the_package_has_nothing_else_to_offer() -> None:
    assert gptserve.__all__ == ["LLM", "EngineConfig", "SamplingParams"]
    with pytest.raises(AttributeError, match="'gptserve' has no attribute 'Model'"):
        _ = gptserve.Model
