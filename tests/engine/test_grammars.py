"""Completions that follow random JSON Schemas: every finished one validates, whatever happens to it meanwhile."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from jsonschema import ValidationError

from gptserve.engine.engine import Engine
from gptserve.engine.grammar.grammar import ANY_WHITESPACE, Grammar
from gptserve.engine.request import FinishReason, Request, TokenOutput
from gptserve.engine.scheduling.drafter import Drafter
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.engine.client_harness import LIMIT_S
from tests.engine.grammar.schemas import Schema, assert_valid, schemas
from tests.engine.runs import OutputsById, make_config, make_engine, make_request, run, token_ids

STORYTELLER = Path(__file__).parents[2] / "weights" / "storyteller"
TOKENIZER = Tokenizer.open(STORYTELLER)
ENDS = {0, 2029}  # of a text, and of a turn
NUM_TOKENS = 160
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "born": {"type": "string", "format": "date"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["name", "children"],
            "additionalProperties": False,
        }
    },
}
FLAT = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 40},
        "code": {"type": "string", "pattern": "^[A-C]{2}-[0-9]{3}$"},
    },
    "required": ["colour", "size", "code"],
    "additionalProperties": False,
}
LOADS: dict[str, dict[str, Any]] = {
    "a batch of 32": {"max_num_seqs": 32},
    "drafts": {"speculative_ngram": 2, "max_num_seqs": 2},
    "preempted": {"num_blocks": 8, "max_num_seqs": 8, "enable_prefix_caching": False, "max_model_len": 120},
}


def grammar_of(schema: Schema, whitespace: str = "") -> Grammar:
    return Grammar("json", json.dumps(schema), whitespace)


def asked(request_id: str, grammar: Grammar | None, **params: Any) -> Request:
    prompt = TOKENIZER.encode(random.Random(request_id).choice(["Once upon a time", "The fox said: {", "Mia has"]))
    given = {"max_tokens": NUM_TOKENS, "temperature": 1.5, "ignore_eos": False, "grammar": grammar, **params}
    return make_request(request_id, prompt, seed=len(request_id), **given)


def ragged() -> list[Request]:
    """Return requests with all kinds of grammars, and some with none."""
    grammars = [
        grammar_of(FLAT),
        grammar_of(TREE),
        None,
        grammar_of({"type": "object"}, ANY_WHITESPACE),
        Grammar("regex", r"([a-z]{1,9} ){3}\d\."),
        Grammar("choice", json.dumps(["red", "red, of course", "rather blue"])),
        Grammar("lark", 'start: WORD ("," WORD)* "."\nWORD: /[a-z]{2,6}/'),
        replace(grammar_of(FLAT), frame='start: call | framed\ncall: "<call>" /[a-z]{1,9}/'),
    ]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"logprobs": 2, "top_p": 0.9},
        {"bad_words": ((13,), (16,))},
    ]
    return [
        replace(asked(f"{i}", grammars[i % 8], max_tokens=30, **kinds[i % 4]), seed=i, choice_index=i % 3)
        for i in range(16)
    ]


def text_of(outputs: OutputsById, request: Request) -> str:
    return TOKENIZER.decode(token for token in token_ids(outputs[request.request_id]) if token not in ENDS)


def finished(outputs: OutputsById, requests: Sequence[Request]) -> list[Request]:
    """Return the requests that ended by themselves; none has failed."""
    reasons = {request.request_id: outputs[request.request_id][-1].finish_reason for request in requests}
    assert set(reasons.values()) <= {FinishReason.STOP, FinishReason.LENGTH}, reasons
    return [request for request in requests if reasons[request.request_id] is FinishReason.STOP]


@pytest.fixture(scope="module")
def engine() -> Any:
    return make_engine(STORYTELLER, max_num_seqs=32, kv_cache_bytes=2**26)


@settings(max_examples=5, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(schema=schemas())
def test_what_follows_a_random_schema_validates(engine: Any, schema: Schema) -> None:
    requests = [asked("x" * i, grammar_of(schema)) for i in range(1, 9)]
    outputs = run(engine, requests)
    for request in finished(outputs, requests):
        assert_valid(text_of(outputs, request), schema)


def drawn(number: int) -> list[Schema]:
    """Return so many random schemas, the same at each call."""
    found: list[Schema] = []

    @settings(max_examples=number, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(schema=schemas())
    def draw(schema: Schema) -> None:
        found.append(schema)

    draw()
    return found


@pytest.mark.slow
def test_a_thousand_of_thirty_schemas_validate_and_finish(engine: Any) -> None:
    num_each, num_finished, chosen = 34, 0, drawn(30)
    for seed, schema in enumerate(chosen):
        requests = [replace(asked(f"{i}", grammar_of(schema)), seed=seed * num_each + i) for i in range(num_each)]
        outputs = run(engine, requests)
        ended = finished(outputs, requests)
        num_finished += len(ended)
        for request in ended:
            assert_valid(text_of(outputs, request), schema)

    assert num_finished > 0.8 * len(chosen) * num_each


def test_without_the_grammar_nothing_would_validate(engine: Any) -> None:
    requests = [asked("x" * i, None) for i in range(1, 9)]
    outputs = run(engine, requests)
    for request in requests:
        with pytest.raises((ValueError, ValidationError)):
            assert_valid(text_of(outputs, request), FLAT)


@pytest.fixture(scope="module")
def alone() -> OutputsById:
    engine = Engine(make_config(STORYTELLER, enable_prefix_caching=False), drafter=Drafter())
    return {request.request_id: run(engine, [request])[request.request_id] for request in ragged()}


def plain(outputs: OutputsById) -> dict[str, Any]:
    return {
        i: (token_ids(made), [e for o in made for e in o.logprobs], made[-1].finish_reason)
        for i, made in outputs.items()
    }


def after_grammars(engine: Engine) -> Callable[[], list[TokenOutput]]:
    """Return a step that begins when all grammars are compiled, so that requests wait for room and nothing else."""
    step = engine.step

    def step_later() -> list[TokenOutput]:
        wait([waiting.future for waiting in engine._grammar_queue._waiting.values()], LIMIT_S)
        return step()

    return step_later


@pytest.mark.some(1)
@pytest.mark.parametrize("load", LOADS)
def test_no_bit_depends_on_the_load(load: str, alone: OutputsById) -> None:
    engine = make_engine(STORYTELLER, **LOADS[load])
    engine.step = after_grammars(engine)  # type: ignore[method-assign]
    assert plain(run(engine, ragged())) == plain(alone)
    assert engine.stats.num_preemptions > 0 or load != "preempted"
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens or load != "drafts"


def test_forced_texts_are_drafts_without_being_asked_for(alone: OutputsById) -> None:
    engine, request = make_engine(STORYTELLER), ragged()[0]
    assert plain(run(engine, [request])) == plain({request.request_id: alone[request.request_id]})
    assert 10 < engine.stats.num_accepted_tokens <= engine.stats.num_draft_tokens


def test_a_replay_goes_on_with_the_same_tokens(alone: OutputsById) -> None:
    engine = make_engine(STORYTELLER)
    requests = {request.request_id: request for request in ragged()}
    rests = []
    for request_id, request in requests.items():
        tokens = token_ids(alone[request_id])
        rests += [
            replace(request, request_id=f"{request_id}.{n}", generated_token_ids=tuple(tokens[:n]))
            for n in range(1, len(tokens), 13)
        ]
    outputs = run(engine, rests)
    for rest in rests:
        tokens = token_ids(alone[rest.request_id.partition(".")[0]])
        assert token_ids(outputs[rest.request_id]) == tokens[len(rest.generated_token_ids) :]


def test_another_grammar_gives_other_tokens(alone: OutputsById) -> None:
    changed = [replace(r, params=replace(r.params, grammar=Grammar("regex", "[x-z]{40}"))) for r in ragged()]
    outputs = run(make_engine(STORYTELLER), changed)
    assert all(token_ids(outputs[i]) != token_ids(alone[i]) for i in outputs)


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 30}])
def test_the_end_is_held_back_only_where_the_text_may_go_on(engine: Any, fields: dict[str, Any]) -> None:
    open_ended, closed = Grammar("regex", "(a|b)*"), Grammar("regex", "(a|b){3}")
    requests = [asked("open", open_ended, max_tokens=40, **fields), asked("closed", closed, max_tokens=40, **fields)]
    outputs = run(engine, requests)
    assert len(token_ids(outputs["open"])) >= 30
    assert (len(text_of(outputs, requests[1])), outputs["closed"][-1].finish_reason) == (3, FinishReason.STOP)


def test_a_text_that_is_cut_short_ends_by_its_length(engine: Any) -> None:
    request = asked("r", grammar_of(FLAT), max_tokens=5)
    outputs = run(engine, [request])
    assert (len(token_ids(outputs["r"])), outputs["r"][-1].finish_reason) == (5, FinishReason.LENGTH)


def test_masks_that_leave_nothing_fail_that_request_alone(engine: Any) -> None:
    stuck = asked("stuck", Grammar("regex", "abc"), allowed_token_ids=(70, 71))
    other = asked("other", grammar_of(FLAT))
    outputs = run(engine, [stuck, other])
    [output] = outputs["stuck"]
    assert output.finish_reason is FinishReason.ERROR
    assert str(output.error).startswith("allowed_token_ids, bad_words, grammar and min_tokens left no token, or ")
    assert_valid(text_of(outputs, other), FLAT)


def test_a_grammar_that_meets_a_limit_on_its_way_fails_that_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gptserve.engine.grammar.compiler.LIMITS", {"max_lexer_states": 60})
    monkeypatch.setattr("gptserve.engine.grammar.compiler.NUM_TRIED", 2)
    many = asked("many", Grammar("regex", "(a|b)*a(a|b){60}c"), ignore_eos=True)
    other = asked("other", Grammar("regex", "[0-9]{4}"))
    outputs = run(make_engine(STORYTELLER), [many, other])
    last = outputs["many"][-1]
    assert (last.finish_reason, str(last.error)) == (
        FinishReason.ERROR,
        "the grammar: lexer error: too many states: 60 >= 60",
    )
    assert len(text_of(outputs, other)) == 4
