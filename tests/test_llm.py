"""The door for scripts: text or ids in, text out, repeatable by seed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gptserve
from gptserve import LLM
from gptserve.engine.errors import EngineError, InvalidRequestError
from gptserve.engine.request import FinishReason, Request, SamplingParams, TokenOutput
from gptserve.weights.chat.template import ChatTemplate, load_chat_template
from gptserve.weights.errors import ChatTemplateError
from gptserve.weights.source import resolve_model


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
    assert [completion.seed for completion in together] == [7, 8, 9]
    assert together == [llm.generate([prompt], params, seed=7 + i)[0] for i, prompt in enumerate(prompts)]
    assert [len(c.logprobs) for c in together] == [12, 12, 12]


def test_the_same_prompt_several_times_gives_several_texts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20)
    for seed in (None, 3):
        assert len({completion.token_ids for completion in llm.generate(["One day"] * 4, params, seed=seed)}) == 4


def test_choices_of_a_prompt_share_its_seed_and_come_together(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20)
    answers = llm.generate(["One day", "Once"], params, n=2, seed=5)
    assert [(its.seed, its.choice_index) for its in answers] == [(5, 0), (5, 1), (6, 0), (6, 1)]
    assert len({its.token_ids for its in answers}) == 4
    assert answers[2] == llm.generate("Once", params, seed=6)[0]


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    lengths = [3, 5]
    answers = llm.generate(["One day", [5, 6]], [SamplingParams(max_tokens=length) for length in lengths])
    assert [len(its.token_ids) for its in answers] == lengths


def test_the_text_of_a_special_token_is_that_token(llm: LLM) -> None:
    (answer,) = llm.generate("<|im_start|><|endoftext|>", SamplingParams(max_tokens=1))
    assert answer.prompt_token_ids == (2028, 0)


def test_token_ids_alone_are_one_prompt(llm: LLM) -> None:
    ids = np.array([5, 6, 7])
    for given in ([5, 6, 7], ids, [ids]):
        (answer,) = llm.generate(given, SamplingParams(max_tokens=1))  # type: ignore[arg-type]
        assert answer.prompt_token_ids == (5, 6, 7)
        assert {type(token) for token in answer.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"prompts": ["a", "b"], "params": [SamplingParams()]},
            "params must be one, or one for each of 2 prompts, got 1",
        ),
        ({"prompts": "a", "n": 0}, "n must be at least 1, got 0"),
        ({"prompts": "a", "n": 1.5}, "n must be an integer, got 1.5"),
        ({"prompts": "a", "seed": "x"}, "seed must be an integer or None, got 'x'"),
        ({"prompts": "a", "seed": 1.5}, "seed must be an integer or None, got 1.5"),
        ({"prompts": "a", "seed": -1}, "seed must be in [0, 2**64), got -1"),
        (
            {"prompts": [[1.5]]},
            "a prompt must be text or a sequence of token ids: 'float' object cannot be interpreted as an integer",
        ),
        ({"prompts": [None]}, "a prompt must be text or a sequence of token ids: 'NoneType' object is not iterable"),
    ],
)
def test_arguments_that_fit_nothing_are_refused(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(**arguments)
    assert str(caught.value) == message
    assert not llm.engine.has_work


def test_one_completion_that_fails_leaves_the_others_whole(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=8)
    whole = llm.generate(["One day", "Once"], params, seed=1)
    step = llm.engine.step

    def end_the_second() -> list[TokenOutput]:
        outputs = step()
        for i, output in enumerate(outputs):
            if output.request_id == "llm-1-0":
                llm.engine.abort(output.request_id)
                outputs[i] = TokenOutput("llm-1-0", (), finish_reason=FinishReason.QUEUE_TIMEOUT, error="too late")
        return outputs

    monkeypatch.setattr(llm.engine, "step", end_the_second)
    first, second = llm.generate(["One day", "Once"], params, seed=1)
    assert first == whole[0]
    assert (second.finish_reason, second.error, second.token_ids) == (FinishReason.QUEUE_TIMEOUT, "too late", ())


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_stream_ends_after_an_abort_within_its_loop(llm: LLM, is_alone: bool) -> None:
    requests = [Request(f"r{i}", (5, 6), SamplingParams(max_tokens=5), seed=0) for i in range(2 - is_alone)]
    outputs = []
    for output in llm.stream(requests):
        llm.engine.abort("r0")
        outputs.append(output)
    assert sum(output.request_id == "r0" for output in outputs) == 1
    assert sum(output.request_id == "r1" for output in outputs) == (0 if is_alone else 5)
    assert not llm.engine.has_work


def test_a_chat_is_rendered_by_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    (answer,) = llm.chat(messages, seed=1)
    template = load_chat_template(resolve_model(None))
    assert template is not None
    prompt = llm.tokenizer.encode_with_special(template.render(messages, {}))
    template.close()
    assert answer.prompt_token_ids == tuple(prompt)
    assert answer.finish_reason is FinishReason.STOP
    assert llm.chat([messages, messages], seed=1, n=2)[0] == answer
    assert len(llm.chat(messages, SamplingParams(max_tokens=3))[0].token_ids) == 3


TOOL_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def prompts_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return the function from the arguments of a chat to the text of its prompt."""
    template = ChatTemplate(TOOL_TEMPLATE, {})
    monkeypatch.setitem(vars(llm), "_chat_template", template)

    def prompt(messages: Any, **options: Any) -> str:
        (answer,) = llm.chat(messages, SamplingParams(max_tokens=1), **options)
        return llm.tokenizer.decode(answer.prompt_token_ids)

    yield prompt
    template.close()


def test_calls_in_the_history_are_given_to_the_template_as_a_server_does(prompts_of: Callable[..., str]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    history = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "warm"}]
    assert prompts_of(history) == '<assistant>f={"city": "Rome"}<tool>warm<assistant>'
    assert prompts_of([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]) == "<user>Hi<assistant>"


def test_a_chat_may_go_on_within_its_last_message(prompts_of: Callable[..., str]) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The"}]
    assert prompts_of(messages, add_generation_prompt=False) == "<user>Hi<assistant>The"
    given = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompts_of(messages, **given) == "<user>Hi<assistant>The"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"conversations": "hi"}, "a message must be an object with a role, got 'h'"),
        ({"conversations": [{"content": "x"}]}, "a message must be an object with a role, got {'content': 'x'}"),
        (
            {"conversations": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a message must be one whose content is text or a list of text parts, got "
            "{'role': 'user', 'content': [{'type': 'image_url'}]}",
        ),
        (
            {"conversations": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "a message must be one whose tool_calls have a function with a name, got {'id': '1'}",
        ),
        ({"documents": []}, "the template's variables must not hold documents"),
        (
            {"continue_final_message": True},
            "continue_final_message must not be true together with add_generation_prompt",
        ),
    ],
)
def test_a_chat_that_fits_nothing_is_refused(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat(**{"conversations": [{"role": "user", "content": "Hi"}], **arguments})
    assert str(caught.value) == message


def test_a_model_without_a_template_does_not_chat(storyteller: Path, tmp_path: Path) -> None:
    shutil.copytree(storyteller, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    llm = LLM(tmp_path / "model", num_threads=1, max_model_len=64, num_blocks=4)
    with pytest.raises(ChatTemplateError, match="this model has no chat template"):
        llm.chat([{"role": "user", "content": "Hi"}])


def test_scores_equal_the_logprobs_of_the_prompt(llm: LLM) -> None:
    text = "Once upon a time there was a little fox. She lived in a wood."
    (scored,) = llm.generate(text, SamplingParams(max_tokens=1, prompt_logprobs=0))
    entries = scored.prompt_logprobs
    assert entries is not None
    expected = math.fsum(entry.logprob for entry in entries if entry is not None)
    [score] = llm.score(text)
    assert (score.num_tokens, score.logprob) == (len(scored.prompt_token_ids) - 1, expected)
    first = llm.tokenizer.token_bytes(scored.prompt_token_ids[0])
    assert score.num_bytes == len(text.encode()) - len(first)
    assert score.perplexity == pytest.approx(math.exp(-expected / score.num_tokens))
    assert score.bits_per_byte == pytest.approx(-expected / math.log(2) / score.num_bytes)
    assert llm.score(["The fox", text])[1] == score


def test_windows_score_each_token_once_with_what_they_see(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Once upon a time there was a little fox. " * 8)
    [score] = llm.score([ids], window=20, stride=5)
    expected = []
    for position in range(1, len(ids)):
        end = 20 if position < 20 else min(len(ids), 20 + ((position - 20) // 5 + 1) * 5)
        (scored,) = llm.generate([ids[max(0, end - 20) : end]], SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert scored.prompt_logprobs is not None
        entry = scored.prompt_logprobs[position - max(0, end - 20)]
        assert entry is not None
        expected.append(entry.logprob)
    assert (score.num_tokens, score.logprob) == (len(ids) - 1, math.fsum(expected))
    assert llm.score([ids], window=21, stride=5) != [score]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 2.5}, "window must be an integer or None, got 2.5"),
        ({"window": 1}, "window must be at least 2, got 1"),
        ({"window": 1024}, "window must be at most 1023, got 1024"),
        ({"window": 8, "stride": 8}, "stride must be in [1, 7], as a window has 8 tokens, got 8"),
        ({"window": 8, "stride": 0}, "stride must be in [1, 7], as a window has 8 tokens, got 0"),
        ({"texts": ["fine day", ""]}, "a text to score must have at least two tokens, got 0"),
    ],
)
def test_windows_that_fit_nothing_are_refused(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.score(**{"texts": "A fox", **arguments})
    assert str(caught.value) == message


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
