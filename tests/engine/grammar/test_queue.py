"""A request whose grammar is being compiled holds up nobody, and leaves the queue once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gptserve.engine.engine import Engine
from gptserve.engine.grammar import queue
from gptserve.engine.grammar.compiler import Compiler
from gptserve.engine.grammar.grammar import Grammar
from gptserve.engine.grammar.matcher import Matcher
from gptserve.engine.request import FinishReason, TokenOutput
from tests.conftest import MakeGPT2
from tests.engine.client_harness import LIMIT_S
from tests.engine.runs import make_engine, make_request, run, token_ids

STORYTELLER = Path(__file__).parents[3] / "weights" / "storyteller"
DIGITS = Grammar("regex", "[0-9]{9}")


class Gate:
    """Holds every compilation until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()
        compile_one = Compiler.compile

        def held(compiler: Compiler, grammar: Grammar) -> Matcher:
            self.begun.set()
            assert self.opened.wait(LIMIT_S)
            return compile_one(compiler, grammar)

        monkeypatch.setattr(Compiler, "compile", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def engine() -> Engine:
    return make_engine(STORYTELLER)


def finish(engine: Engine) -> list[TokenOutput]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def test_others_go_on_while_a_grammar_is_compiled(engine: Engine, gate: Gate) -> None:
    engine.add(make_request("held", [5], max_tokens=20, grammar=DIGITS))
    assert gate.begun.wait(LIMIT_S)
    engine.add(make_request("other", [5], max_tokens=3))
    outputs: list[TokenOutput] = []
    while not any(output.finish_reason for output in outputs):
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"other"}
    assert engine.has_work
    assert engine.step() == []
    gate.opened.set()
    outputs = finish(engine)
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert len(token_ids(outputs)) > 3


def test_one_that_is_aborted_while_it_is_compiled_never_runs(engine: Engine, gate: Gate) -> None:
    for request_id in ("begun", "queued"):
        engine.add(make_request(request_id, [5], max_tokens=20, grammar=DIGITS))
    assert gate.begun.wait(LIMIT_S)
    for request_id in ("begun", "queued"):
        engine.abort(request_id)
    assert not engine.has_work
    gate.opened.set()
    assert len(run(engine, [make_request("next", [5], max_tokens=20, grammar=DIGITS)])["next"]) > 1


def test_a_grammar_that_is_none_fails_that_request_alone(engine: Engine) -> None:
    outputs = run(
        engine,
        [
            make_request("wrong", [5], max_tokens=20, grammar=Grammar("regex", "(")),
            make_request("right", [5], max_tokens=20, grammar=DIGITS),
        ],
    )
    assert [(output.finish_reason, output.error) for output in outputs["wrong"]] == [
        (
            FinishReason.ERROR,
            'the grammar cannot be compiled: invalid regex "(" (in regex): '
            "regex parse error: ( ^ error: unclosed group",
        )
    ]
    assert outputs["right"][-1].finish_reason is FinishReason.STOP


def test_a_crash_of_the_compiler_fails_that_request_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(compiler: Compiler, grammar: Grammar) -> Matcher:
        raise BaseException("index out of bounds")  # as PanicException

    logged: list[object] = []
    monkeypatch.setattr(Compiler, "compile", panic)
    monkeypatch.setattr(queue.logger, "error", lambda message, **details: logged.append(message))
    [output] = run(engine, [make_request("r", [5], max_tokens=20, grammar=DIGITS)])["r"]
    assert output.error == "the grammar cannot be compiled: BaseException: index out of bounds"
    assert logged == ["a grammar could not be compiled"]


def test_a_model_without_a_tokenizer_says_so(make_gpt2: MakeGPT2) -> None:
    folder = make_gpt2(eos_token_id=7)
    [output] = run(make_engine(folder), [make_request("r", [5], max_tokens=20, grammar=DIGITS)])["r"]
    assert output.finish_reason is FinishReason.ERROR
    assert str(output.error).startswith(f"the grammar cannot be compiled: {folder} must hold tokenizer.json, or ")
