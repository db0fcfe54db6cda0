from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from gptserve.engine.request import FinishReason, Request, TokenOutput
from tests.server.conftest import Api
from tests.server.fake_engine import FakeEngineClient, Reply, say


def test_a_stop_string_ends_its_choice_in_the_engine(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(say("one END two")))
    body = api.complete(prompt="a", stop=["END", "never"], max_tokens=100).json()
    assert body["choices"][0]["text"] == "one "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] == "END"
    assert body["usage"]["completion_tokens"] == 7
    assert api.engine.aborted == [f"{body['id']}-0"]
    assert api.engine.num_outputs == 7, "nothing is computed after a stop string"


def test_a_stop_string_ends_its_own_choice_only(make_api: Callable[..., Api]) -> None:
    def reply(request: Any) -> Any:
        return say("xyEND" if request.choice_index == 0 else "abcdefgh")(request)

    api = make_api(FakeEngineClient(reply))
    choices = api.complete(prompt="p", n=2, stop="END", max_tokens=8).json()["choices"]
    assert [choice["text"] for choice in choices] == ["xy", "abcdefgh"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]


def in_runs(reply: Reply, length: int) -> Reply:
    """Return the same reply, `length` tokens an output."""

    def joined(request: Request) -> Iterator[TokenOutput]:
        outputs: list[TokenOutput] = []
        for output in reply(request):
            outputs.append(output)
            if len(outputs) == length or output.finish_reason is not None:
                token_ids = tuple(token for output in outputs for token in output.token_ids)
                logprobs = tuple(entry for output in outputs for entry in output.logprobs)
                prompt_logprobs = outputs[0].prompt_logprobs
                yield replace(output, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
                outputs.clear()

    return joined


@pytest.mark.some(2)
@pytest.mark.parametrize("length", [2, 3, 7, 50])
@pytest.mark.parametrize("fields", [{"max_tokens": 9}, {"stop": "END"}, {"stop_token_ids": [68]}, {"echo": True}, {}])
def test_an_answer_is_the_same_however_many_tokens_come_at_once(
    make_api: Callable[..., Api], fields: dict[str, Any], length: int
) -> None:
    one, many = [
        make_api(FakeEngineClient(reply)).complete(**{"prompt": "ab", "max_tokens": 40, "logprobs": 2, **fields}).json()
        for reply in (say("one END two"), in_runs(say("one END two"), length))
    ]
    assert (many["choices"], many["usage"]) == (one["choices"], one["usage"])


def test_the_end_of_text_ends_a_choice(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(say("The end.", then_eos=True)))
    body = api.complete(prompt="a", max_tokens=100).json()
    assert body["choices"][0]["text"] == "The end."
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", None)
    assert body["usage"]["completion_tokens"] == 9
    assert api.engine.aborted == []


def test_a_stop_token_is_the_reason(api: Api) -> None:
    choice = api.complete(prompt="a", stop_token_ids=[98]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", 98)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_what_the_engine_gives_up_is_an_error_of_this_request(
    make_api: Callable[..., Api], reason: FinishReason
) -> None:
    def reply(request: Any) -> Any:
        if request.prompt_token_ids != (98,):
            return say("fine")(request)
        return iter([TokenOutput(request.request_id, (), finish_reason=reason, error="its logits were not finite")])

    api = make_api(FakeEngineClient(reply))
    response = api.complete(prompt=["a", "b"])
    ended = 'gptserve_request_success_total{finished_reason="error",model_name="test-model"} 2.0'
    assert ended in api.get("/metrics").text
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "choice 1: its logits were not finite",
        "type": "server_error",
        "param": None,
        "code": "generation_failed",
    }
    assert api.engine.live_ids == [], "its other choices are aborted"
    assert api.complete(prompt="a", max_tokens=4).json()["choices"][0]["text"] == "fine"


def test_a_prompt_counts_once_however_many_choices_it_has(api: Api) -> None:
    def reply(request: Any) -> Any:
        for output in say("xy")(request):
            yield replace(output, num_cached_tokens=len(request.prompt_token_ids) - 1)

    api.engine.reply = reply
    usage = api.complete(prompt=["abc", "de"], n=2, max_tokens=5).json()["usage"]
    assert usage == {
        "prompt_tokens": 5,
        "completion_tokens": 20,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
