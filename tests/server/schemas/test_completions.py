from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

import pytest
from pydantic import ValidationError

from gptserve.engine.request import SamplingParams
from gptserve.server.schemas.completions import ChatRequest, CompletionRequest
from tests.server.conftest import Api


def parse(**fields: object) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps({"prompt": "x", **fields}))


def params_of(request: CompletionRequest) -> SamplingParams:
    return request.sampling_params({}, bad_words=())


def test_the_defaults_are_the_engines() -> None:
    assert params_of(parse()) == SamplingParams()


def test_the_models_defaults_are_for_what_is_left_out() -> None:
    defaults = {"temperature": 0.7, "top_k": 5}
    assert parse(top_k=9, min_p=None).sampling_params(defaults, bad_words=()) == SamplingParams(
        temperature=0.7, top_k=9
    )


@pytest.mark.parametrize("name", sorted(set(CompletionRequest.model_fields) - {"prompt"}))
def test_null_is_the_default(name: str) -> None:
    assert params_of(parse(**{name: None})) == SamplingParams()
    assert getattr(parse(**{name: None}), name) == getattr(parse(), name)


def other_value(schema: dict[str, Any]) -> object:
    """Return a value of a field that is nobody's default, from its JSON schema."""
    [kind] = [option for option in schema["anyOf"] if option["type"] != "null"]
    match kind["type"]:
        case "array":
            return [1] if kind["items"]["type"] == "integer" else ["a"]
        case "object":
            return {"1": 0.5}
        case kind_of_value:
            return {"integer": 1, "number": 0.5, "boolean": True}[kind_of_value]


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_every_sampling_parameter_reaches_the_engine(api: Api, route: str) -> None:
    """The fields are those of SamplingParams, their values from the schema: nothing here is kept by hand."""
    model, given = (CompletionRequest, {"prompt": "x"}) if route == "complete" else (ChatRequest, {})
    properties = model.model_json_schema()["properties"]
    names = [field.name for field in fields(SamplingParams) if field.name != "grammar"]  # several fields ask for one
    assert getattr(api, route)(**given).status_code == 200
    for name in names:
        assert getattr(api, route)(**given, **{name: other_value(properties[name])}).status_code == 200, name
    plain, *changed = [asdict(request.params) for request in api.engine.submitted]
    for name, params in zip(names, changed, strict=True):
        assert [other for other in params if params[other] != plain[other]] == [name]
        if properties[name].get("anyOf", [{}])[0].get("type") in ("integer", "number"):
            assert params[name] == other_value(properties[name])


def test_lists_and_objects_take_the_engines_form() -> None:
    params = params_of(parse(logit_bias={"5": -100, "0": 1.5}, stop_token_ids=[1, 2], allowed_token_ids=[3, 5]))
    assert params == SamplingParams(logit_bias={5: -100.0, 0: 1.5}, stop_token_ids=(1, 2), allowed_token_ids=(3, 5))


def test_top_k_may_be_switched_off_as_vllm_does() -> None:
    assert params_of(parse(top_k=-1)).top_k == 0


def test_an_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    assert params_of(parse(echo=True, logprobs=4)).prompt_logprobs == 4
    assert params_of(parse(echo=True)).prompt_logprobs is None
    assert params_of(parse(logprobs=2)).prompt_logprobs is None


@pytest.mark.parametrize("prompt", ["x", ["x", "y"], [1, 2], [[1], [2, 3]], [], ""])
def test_a_prompt_keeps_its_form(prompt: object) -> None:
    assert parse(prompt=prompt).prompt == prompt


@pytest.mark.parametrize("stop", ["x", ["x", "y"], []])
def test_a_stop_keeps_its_form(stop: object) -> None:
    assert parse(stop=stop).stop == stop


@pytest.mark.parametrize(("stop", "texts"), [("", []), ([""], []), (["", "x", ""], ["x"])])
def test_an_empty_stop_string_asks_for_nothing(stop: object, texts: list[str]) -> None:
    assert parse(stop=stop).stop == texts


@pytest.mark.parametrize("name", ["max_tokens", "seed", "n", "logprobs", "temperature", "echo", "stream"])
@pytest.mark.parametrize("value", ["1", [1], {}])
def test_a_value_of_another_type_is_not_converted(name: str, value: object) -> None:
    with pytest.raises(ValidationError):
        parse(**{name: value})


def test_a_request_is_frozen() -> None:
    with pytest.raises(ValidationError):
        parse().n = 2
