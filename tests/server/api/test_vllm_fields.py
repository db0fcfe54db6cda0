"""vLLM's fields beside OpenAI's, of both routes: what each changes in the answer, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gptserve.server.schemas.completions import ChatCompletion, ChatCompletionChunk, Completion
from tests.server.conftest import Api
from tests.server.fake_engine import EOS, INFO, ByteTokenizer, FakeEngineClient, say
from tests.server.pydantic_says import NO_BOOLEAN, NO_INTEGER, NO_STRING

MakeApi = Callable[..., Api]
BOS = 7


def choice(api: Api, **body: Any) -> dict[str, Any]:
    response = api.complete(**{"prompt": "x", **body})
    assert response.status_code == 200, response.json()
    found: dict[str, Any] = response.json()["choices"][0]
    return found


def chunks(text: str) -> list[dict[str, Any]]:
    *events, end = text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_stop_strings_wait_for_min_tokens(api: Api) -> None:
    early, late = choice(api, stop="bc"), choice(api, stop="bc", min_tokens=3)
    assert (early["text"], early["finish_reason"]) == ("a", "stop")
    assert (late["text"], late["finish_reason"], late["stop_reason"]) == ("abca", "stop", "bc")


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_may_stand_in_the_text(api: Api, streams: bool) -> None:
    response = api.complete(prompt="x", stop="bc", include_stop_str_in_output=True, stream=streams)
    parts = chunks(response.text) if streams else [response.json()]
    assert [part["choices"][0]["text"] for part in parts] == (["a", "b", "c"] if streams else ["abc"])
    assert parts[-1]["choices"][0]["stop_reason"] == "bc"


def test_a_stop_token_may_stand_in_the_text(api: Api) -> None:
    fields = {"stop_token_ids": [98], "include_stop_str_in_output": True}
    assert (choice(api, **fields)["text"], choice(api, **fields)["stop_reason"]) == ("ab", 98)


def test_token_ids_come_with_the_text(api: Api) -> None:
    body = api.complete(prompt=["x", "yz"], n=2, max_tokens=2, return_token_ids=True).json()
    Completion.model_validate(body, strict=True, extra="forbid")
    assert [entry["token_ids"] for entry in body["choices"]] == [[97, 98]] * 4
    assert [entry["prompt_token_ids"] for entry in body["choices"]] == [[120]] * 2 + [[121, 122]] * 2
    assert (choice(api)["token_ids"], choice(api)["prompt_token_ids"]) == (None, None)


def test_token_ids_come_with_every_chunk_even_without_text(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(say("é!")))
    parts = chunks(api.complete(prompt="xy", max_tokens=3, return_token_ids=True, stream=True).text)
    for part in parts:
        Completion.model_validate(part, strict=True, extra="forbid")
    [first, *rest] = [part["choices"][0] for part in parts]
    assert (first["text"], first["token_ids"], first["prompt_token_ids"]) == ("", [0xC3], [120, 121])
    assert [(part["text"], part["token_ids"]) for part in rest] == [("é", [0xA9]), ("!", [33])]
    assert all("prompt_token_ids" not in part for part in rest)


@pytest.mark.parametrize("streams", [False, True])
def test_token_ids_of_a_chat_stand_where_vllm_has_them(api: Api, streams: bool) -> None:
    response = api.chat("hi", max_tokens=2, return_token_ids=True, stream=streams)
    parts = chunks(response.text) if streams else [response.json()]
    for part in parts:
        (ChatCompletionChunk if streams else ChatCompletion).model_validate(part, strict=True, extra="forbid")
    [prompt] = [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part]
    assert prompt == list(api.engine.submitted[0].prompt_token_ids)
    ids = [part["choices"][0].get("token_ids", []) for part in parts]
    assert [token_id for found in ids for token_id in found] == [97, 98]


def test_the_ids_of_prompts_that_are_held_are_bounded(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), max_tokens_held=10)
    body = {"prompt": "x" * 129, "max_tokens": 1, "n": 2}
    assert api.complete(**body).status_code == 200
    assert api.complete(**{**body, "n": 1}, return_token_ids=True).status_code == 200
    error = api.complete(**body, return_token_ids=True).json()["error"]
    message = "n times the prompts' tokens may be at most 256 with return_token_ids, got 258"
    assert (error["param"], error["message"]) == ("return_token_ids", message)


def test_logprobs_may_name_tokens_by_their_ids(api: Api) -> None:
    found = choice(api, max_tokens=1, logprobs=1, echo=True, return_tokens_as_token_ids=True)["logprobs"]
    assert found["tokens"] == ["token_id:120", "token_id:97"]
    assert found["top_logprobs"][1] == {"token_id:0": 0.0, "token_id:97": -97 / 8}
    body = api.chat(max_tokens=1, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True).json()
    [token] = body["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("token_id:97", list(b"token_id:97"))
    assert token["top_logprobs"][0]["token"] == "token_id:0"


@pytest.mark.parametrize("spaces", [None, True, False])
def test_no_spaces_stand_between_special_tokens(make_api: MakeApi, spaces: bool | None) -> None:
    api = make_api(FakeEngineClient(say([EOS, EOS, 97]), info=replace(INFO, eos_token_ids=())))
    fields = {"max_tokens": 3, "ignore_eos": True, "skip_special_tokens": False}
    assert choice(api, **fields, spaces_between_special_tokens=spaces)["text"] == "<|endoftext|><|endoftext|>a"


def test_a_client_may_choose_the_id(api: Api) -> None:
    for _ in range(2):
        assert api.complete(prompt="x", request_id="mine").json()["id"] == "cmpl-mine"
    parts = chunks(api.complete(prompt="x", request_id="mine", stream=True).text)
    assert {part["id"] for part in parts} == {"cmpl-mine"}
    assert api.chat(request_id="é").json()["id"] == "chatcmpl-é"
    ids = [request.request_id for request in api.engine.submitted]
    assert len(set(ids)) == len(ids), "the engine's ids are the server's"


@pytest.mark.parametrize("how", [{"json": {"background": True}}, {"headers": {"Idempotency-Key": "k"}}])
def test_the_id_of_a_background_completion_cannot_be_chosen(api: Api, how: dict[str, Any]) -> None:
    body = {"prompt": "x", "request_id": "mine", **how.get("json", {})}
    response = api.request("POST", "/v1/completions", json=body, headers=how.get("headers", {}))
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "request_id may not be given with background or an Idempotency-Key, as others could guess the id"
    )


def test_a_prompt_may_be_cut_to_its_last_tokens(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), tokenizer=ByteTokenizer(begin=[BOS]))
    cuts = [({"prompt": "abcd"}, b"\x07abcd"), ({"prompt": "abcd", "truncate_prompt_tokens": 3}, b"bcd")]
    cuts += [({"prompt": [*b"abcd"], "truncate_prompt_tokens": n}, b"abcd"[-n:]) for n in (1, 4, 9)]
    cuts += [({"prompt": "x" * 400 + "y", "truncate_prompt_tokens": -1, "max_tokens": 250}, b"xxxxxy")]
    cuts += [({"prompt": "x" * 2**20, "truncate_prompt_tokens": 2}, b"xx")]
    for body, expected in cuts:
        assert api.complete(**body).status_code == 200, body
        assert bytes(api.engine.submitted[-1].prompt_token_ids) == expected
    assert choice(api, prompt="abcd", truncate_prompt_tokens=2, echo=True, max_tokens=1)["text"] == "cda"


def test_a_conversation_may_be_cut_to_its_last_tokens(api: Api) -> None:
    for fields, expected in (
        ({"truncate_prompt_tokens": 3}, [105, EOS, 62]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 254}, [EOS, 62]),
    ):
        assert api.chat("x" * 5000 + "hi", **fields).status_code == 200
        assert list(api.engine.submitted[-1].prompt_token_ids) == expected
    assert api.chat("x" * 5000, truncate_prompt_tokens=-1).json()["usage"]["total_tokens"] == INFO.max_model_len
    assert len(api.engine.submitted[-1].prompt_token_ids) == INFO.max_model_len - 1


@pytest.mark.parametrize(("side", "kept"), [("left", "cd"), ("right", "ab"), (None, "cd")])
def test_a_prompt_may_be_cut_from_either_side(api: Api, side: str | None, kept: str) -> None:
    cut = {"truncate_prompt_tokens": 2, "truncation_side": side}
    for prompt in ("abcd", [*b"abcd"]):
        assert choice(api, prompt=prompt, **cut, echo=True, max_tokens=1)["text"] == f"{kept}a"
    assert choice(api, prompt="abcd", truncation_side=side, echo=True, max_tokens=1)["text"] == "abcda"
    assert api.chat("abcd", truncation_side=side, truncate_prompt_tokens=7, max_tokens=1).status_code == 200
    shown = [*b"[user]abcd", EOS, *b">"]
    assert list(api.engine.submitted[-1].prompt_token_ids) == (shown[:7] if side == "right" else shown[-7:])


def test_the_tokenizers_own_tokens_can_be_left_out_and_asked_for(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), tokenizer=ByteTokenizer(begin=[BOS]))
    for add, of_text, of_chat in ((None, True, False), (True, True, True), (False, False, False)):
        api.complete(prompt="x", add_special_tokens=add)
        api.chat(add_special_tokens=add)
        text, chat = (request.prompt_token_ids[0] for request in api.engine.submitted[-2:])
        assert (text == BOS, chat == BOS) == (of_text, of_chat)


def test_bad_words_are_tokens_with_and_without_a_space(make_api: MakeApi) -> None:
    class Merging(ByteTokenizer):
        """A space and a letter are one token, that of the capital letter."""

        def encode_with_special(self, text: str, *, template: bool = False) -> list[int]:
            return super().encode_with_special(text.replace(" c", "C"), template=template)

    api = make_api(FakeEngineClient(), tokenizer=Merging())
    words = ["ab", " c", "<|endoftext|>", "cd"]
    api.complete(prompt="x", bad_words=words)
    api.chat(bad_words=words)
    expected = ((*b"ab",), (*b"c",), (*b"C",), (EOS,), (*b"cd",), (*b"Cd",))
    assert [request.params.bad_words for request in api.engine.submitted] == [expected] * 2


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_the_scores_of_a_prompt_come_in_a_stream_too(api: Api, route: str) -> None:
    fields: dict[str, Any] = {"prompt": "abc"} if route == "complete" else {"content": "abc"}
    fields |= {"max_tokens": 3, "prompt_logprobs": 1, "n": 2}
    whole, parts = getattr(api, route)(**fields).json(), chunks(getattr(api, route)(**fields, stream=True).text)
    if route == "chat":
        assert [part["prompt_logprobs"] for part in parts if "prompt_logprobs" in part] == [whole["prompt_logprobs"]]
        return
    for expected in whole["choices"]:
        found = [c for part in parts for c in part["choices"] if c["index"] == expected["index"]]
        assert [c.get("prompt_logprobs") for c in found] == [expected["prompt_logprobs"], None, None]


SHARED_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("frequency_penalty", "logit_bias", "presence_penalty", "seed", "stream_options", "temperature")),
    **dict.fromkeys(
        ("top_p", "user", "top_k", "min_p", "repetition_penalty", "watermarking", "truncate_prompt_tokens")
    ),
    **dict.fromkeys(("truncation_side", "allowed_token_ids", "prompt_logprobs", "logprob_token_ids", "session_id")),
    **dict.fromkeys(("response_format", "structured_outputs", "return_tokens_as_token_ids", "return_token_ids")),
    **dict.fromkeys(("cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection")),
    **dict.fromkeys(("thinking_token_budget", "stream_interval", "model")),
    **dict.fromkeys(("echo", "stream", "use_beam_search", "include_stop_str_in_output", "ignore_eos"), False),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "return_mm_kwargs"), True),
    **{"n": 1, "stop": [], "length_penalty": 1.0, "stop_token_ids": [], "min_tokens": 0, "bad_words": []},
    **{"priority": 0, "request_id": "mine", "routed_experts_prompt_start": 0, "return_token_offsets": False},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "complete": {
        **SHARED_DEFAULTS,
        **{"prompt": "x", "logprobs": None, "max_tokens": 16, "suffix": None, "prompt_embeds": None},
        "add_special_tokens": True,
    },
    "chat": {
        **SHARED_DEFAULTS,
        **{"logprobs": False, "top_logprobs": 0, "max_tokens": None, "max_completion_tokens": None, "tools": None},
        **{"tool_choice": "none", "reasoning_effort": None, "include_reasoning": True, "parallel_tool_calls": True},
        **{"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False},
        **dict.fromkeys(
            ("documents", "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs")
        ),
        "return_prompt_text": None,
    },
}
"""vLLM's own values of all fields that its request models have."""


@pytest.mark.parametrize("values", ["defaults", "nulls"])
@pytest.mark.parametrize("route", ["complete", "chat"])
def test_all_fields_of_vllm_may_be_sent_with_what_asks_for_nothing(api: Api, route: str, values: str) -> None:
    given = {"prompt": "x"} if route == "complete" else {}
    defaults = DEFAULTS[route] if values == "defaults" else {**dict.fromkeys(DEFAULTS[route]), **given}
    plain, full = (getattr(api, route)(**body, **{"strange": None}) for body in (given, defaults))
    assert (plain.status_code, full.status_code) == (200, 200), full.json()
    assert "x-gptserve-ignored" not in full.headers
    ours, theirs = api.engine.submitted
    assert ours == replace(theirs, request_id=ours.request_id, seed=ours.seed)


def test_a_limit_of_the_reasoning_is_refused_in_words(api: Api) -> None:
    message = "thinking_token_budget may not be given: the chat template of this model marks no reasoning by tokens"
    error = api.chat(thinking_token_budget=5).json()["error"]
    assert (error["param"], error["code"], error["message"]) == (
        *("thinking_token_budget", "unsupported_parameter"),
        message,
    )
    assert api.chat(thinking_token_budget=-1).status_code == 200
    message = "thinking_token_budget: input should be greater than or equal to -1, got -2"
    error = api.chat(thinking_token_budget=-2).json()["error"]
    assert (error["code"], error["message"]) == ("invalid_value", message)
    error = api.complete(prompt="x", thinking_token_budget=5).json()["error"]
    assert (error["code"], error["message"]) == ("invalid_value", "thinking_token_budget may be given in a chat only")
    assert api.complete(prompt="x", thinking_token_budget=-1).status_code == 200


RULES = (NO_INTEGER, NO_BOOLEAN, NO_STRING)
REFUSED = [
    ({"min_tokens": 17, "max_tokens": 16}, "min_tokens", "min_tokens must be at most max_tokens, which is 16, got 17"),
    ({"min_tokens": -1}, "min_tokens", "min_tokens must be at least 0, got -1"),
    ({"min_tokens": 1.5}, "min_tokens", f"min_tokens: {NO_INTEGER}, got 1.5"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output",
     f"include_stop_str_in_output: {NO_BOOLEAN}, got 1"),
    ({"bad_words": "ab"}, "bad_words", "bad_words: input should be an array, got 'ab'"),
    ({"bad_words": [1]}, "bad_words", f"bad_words[0]: {NO_STRING}, got 1"),
    ({"bad_words": ["a", ""]}, "bad_words", "bad_words[1]: string should have at least 1 character, got ''"),
    ({"bad_words": ["a", " "]}, "bad_words", "bad_words must each have a token, got ' '"),
    ({"bad_words": ["a" * 101]}, "bad_words",
     f"bad_words[0]: string should have at most 100 characters, got '{'a' * 27}...{'a' * 28}'"),
    ({"bad_words": ["a"] * 65}, "bad_words",
     "bad_words: list should have at most 64 items, not 65, got ['a', 'a', 'a', 'a', ...]"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids must hold a token id, got []"),
    ({"allowed_token_ids": [257]}, "allowed_token_ids", "allowed_token_ids: token ids must be in [0, 257), got 257"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids", f"allowed_token_ids[0]: {NO_INTEGER}, got 'a'"),
    ({"allowed_token_ids": [0] * 1025}, "allowed_token_ids",
     "allowed_token_ids may have at most 1024 entries, got 1025"),
    ({"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids",
     "allowed_token_ids must hold a token that bad_words and min_tokens leave, got [97]"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens",
     "truncate_prompt_tokens must be -1 or in [1, 240], got 0"),
    ({"truncate_prompt_tokens": 241}, "truncate_prompt_tokens",
     "truncate_prompt_tokens must be -1 or in [1, 240], got 241"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens",
     "truncate_prompt_tokens must be -1 or in [1, 240], got -2"),
    ({"truncate_prompt_tokens": 1, "truncation_side": "middle"}, "truncation_side",
     "truncation_side: input should be 'left' or 'right', got 'middle'"),
    ({"add_special_tokens": "no"}, "add_special_tokens", f"add_special_tokens: {NO_BOOLEAN}, got 'no'"),
    ({"return_token_ids": 1}, "return_token_ids", f"return_token_ids: {NO_BOOLEAN}, got 1"),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids",
     f"return_tokens_as_token_ids: {NO_BOOLEAN}, got 1"),
    ({"spaces_between_special_tokens": 1}, "spaces_between_special_tokens",
     f"spaces_between_special_tokens: {NO_BOOLEAN}, got 1"),
    ({"request_id": ""}, "request_id", "request_id: string should have at least 1 character, got ''"),
    ({"request_id": "i" * 257}, "request_id",
     f"request_id: string should have at most 256 characters, got '{'i' * 27}...{'i' * 28}'"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
@pytest.mark.parametrize("route", ["complete", "chat"])
def test_what_is_refused(refusing_api: Api, route: str, fields: dict[str, Any], param: str, message: str) -> None:
    body = {"max_tokens": 16, **({"prompt": "x"} if route == "complete" else {}), **fields}
    response = getattr(refusing_api, route)(**body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["message"]) == (400, param, message)
    assert error["code"] == (
        "invalid_type" if any(rule in message for rule in (*RULES, "an array")) else "invalid_value"
    )
    assert refusing_api.engine.submitted == []


def test_a_limit_that_does_not_fit_is_told_before_a_cut(api: Api) -> None:
    error = api.complete(prompt="x", max_tokens=256, truncate_prompt_tokens=-1).json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
