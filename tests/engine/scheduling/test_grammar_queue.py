"""A request whose grammar is being compiled holds up nobody, and leaves the queue once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gptserve.engine.engine import Engine
from gptserve.engine.grammar import compiling
from gptserve.engine.grammar.compiler import Compiler
from gptserve.engine.grammar.grammar import Grammar
from gptserve.engine.grammar.matcher import Matcher
from gptserve.engine.request import FinishReason, TokenOutput
from gptserve.engine.scheduling import grammar_queue as queue
from tests.conftest import MakeGPT2
from tests.engine.client_harness import LIMIT_S
from tests.engine.runs import make_engine, make_request, run, token_ids

STORYTELLER = Path(__file__).parents[3] / "weights" / "storyteller"
DIGITS = Grammar("regex", "[0-9]{9}")


class Gate:
    """Holds every compilation until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()
        self.is_for: Grammar | None = None
        """The grammar that it holds; None for all."""
        compile_one = Compiler.compile

        def held(compiler: Compiler, grammar: Grammar) -> Matcher:
            self.begun.set()
            assert self.is_for not in (None, grammar) or self.opened.wait(LIMIT_S)
            return compile_one(compiler, grammar)

        monkeypatch.setattr(Compiler, "compile", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


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


def test_one_that_is_compiled_counts_as_waiting(engine: Engine, gate: Gate) -> None:
    for request_id in ("begun", "queued"):
        engine.add(make_request(request_id, [5], max_tokens=20, grammar=DIGITS))
    assert engine.stats.num_waiting == 2
    engine.abort("queued")
    assert engine.stats.num_waiting == 1
    gate.opened.set()
    finish(engine)
    assert engine.stats.num_waiting == 0


@pytest.mark.parametrize("is_busy", [False, True])
def test_one_whose_grammar_never_compiles_fails_alone(
    engine: Engine, gate: Gate, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    engine.add(make_request("stuck", [5], max_tokens=20, grammar=DIGITS))
    assert gate.begun.wait(LIMIT_S)
    if is_busy:
        engine.add(make_request("other", [5], max_tokens=40))
    monkeypatch.setattr(compiling, "LIMIT_S", 0)
    outputs = engine.step()
    monkeypatch.setattr(compiling, "LIMIT_S", LIMIT_S)
    [end] = [output for output in outputs if output.request_id == "stuck"]
    assert (end.finish_reason, end.error) == (
        FinishReason.ERROR,
        "the grammar cannot be compiled: it took more than 0 s",
    )
    assert engine.has_work == is_busy
    gate.opened.set()
    engine.add(make_request("next", [5], max_tokens=20, grammar=DIGITS))
    assert sum(output.request_id == "next" for output in finish(engine)) > 1


def test_one_that_was_aborted_holds_up_no_other_either(
    engine: Engine, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add(make_request("stuck", [5], max_tokens=20, grammar=Grammar("regex", "gone")))
    assert gate.begun.wait(LIMIT_S)
    engine.abort("stuck")
    gate.is_for = DIGITS
    engine.add(make_request("next", [5], max_tokens=20, grammar=Grammar("regex", "[a-f]{9}")))
    monkeypatch.setattr(compiling, "LIMIT_S", 0)
    engine.step()
    monkeypatch.setattr(compiling, "LIMIT_S", LIMIT_S)
    assert finish(engine)[-1].finish_reason is FinishReason.STOP


def test_who_waits_too_long_for_a_grammar_is_not_admitted_any_more(gate: Gate) -> None:
    engine = make_engine(STORYTELLER, max_queue_time_s=1e-9)
    begun = make_request("begun-before", [5], max_tokens=20, grammar=DIGITS)
    engine.add(make_request("late", [5], max_tokens=20, grammar=DIGITS))
    engine.add(replace(begun, generated_token_ids=(5,)))
    engine.add(replace(begun, request_id="filler", is_filler=True))
    engine.add(replace(begun, request_id="given", generated_token_ids=(5,), num_given_tokens=1))
    outputs = engine.step()
    error = "the request was not admitted within 1e-09 s"
    assert [(output.request_id, output.finish_reason, output.error) for output in outputs] == [
        (request_id, FinishReason.QUEUE_TIMEOUT, error) for request_id in ("late", "given")
    ]
    assert engine.stats.num_waiting == 2
    gate.opened.set()
    finish(engine)


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
