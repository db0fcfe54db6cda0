"""The thread that compiles: what it keeps, and how others go on when a grammar never compiles."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptserve.engine.errors import EngineError
from gptserve.engine.grammar import compiler, compiling
from gptserve.engine.grammar.compiler import Compiler, GrammarError
from gptserve.engine.grammar.compiling import MAX_COMPILED, MAX_STUCK, CompilingThread
from gptserve.engine.grammar.grammar import Grammar
from gptserve.engine.grammar.matcher import Matcher
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.engine.client_harness import LIMIT_S

STORYTELLER = Path(__file__).parents[3] / "weights" / "storyteller"


class Endless:
    """Grammars whose text begins with "endless" compile when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.opened = threading.Event()
        compile_one = Compiler.compile

        def held(compiler: Compiler, grammar: Grammar) -> Matcher:
            if grammar.text.startswith("endless"):
                self.begun.release()
                assert self.opened.wait(LIMIT_S)
            return compile_one(compiler, grammar)

        monkeypatch.setattr(Compiler, "compile", held)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endless]:
    made = Endless(monkeypatch)
    yield made
    made.opened.set()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "gptserve-grammar"}


def end_of(before: set[threading.Thread]) -> None:
    """Wait for the end of the threads that were not there before."""
    for thread in threads() - before:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_tokens_are_opened_with_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, open_one = list[Path](), Compiler.__init__

    def counting(self: Compiler, folder: Path) -> None:
        opened.append(folder)
        open_one(self, folder)

    monkeypatch.setattr(Compiler, "__init__", counting)
    thread = CompilingThread(STORYTELLER)
    assert opened == []
    for text in ("a", "b"):
        thread.compile(Grammar("regex", text)).result(LIMIT_S)
    assert opened == [STORYTELLER]


def test_grammars_are_compiled_once_and_the_oldest_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, compiled, compile_one = CompilingThread(STORYTELLER), list[str](), Compiler.compile

    def counting(self: Compiler, grammar: Grammar) -> object:
        compiled.append(grammar.text)
        return compile_one(self, grammar)

    monkeypatch.setattr(Compiler, "compile", counting)
    texts = [str(n) for n in range(MAX_COMPILED)]
    for text in (*texts, *texts, "0", "new", "0", "1"):
        thread.compile(Grammar("regex", text)).result(LIMIT_S)
    assert compiled == [*texts, "new", "1"]


def test_one_that_never_compiles_fails_alone_and_the_next_ones_compile(
    endless: Endless, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, thread = threads(), CompilingThread(STORYTELLER)
    stuck, first, second = (thread.compile(Grammar("regex", text)) for text in ("endless", "a", "b"))
    assert endless.begun.acquire(timeout=LIMIT_S)
    thread.replace_if_stuck()
    assert not stuck.done(), "its time is not over"
    monkeypatch.setattr(compiling, "LIMIT_S", 0)
    thread.replace_if_stuck()
    monkeypatch.undo()
    with pytest.raises(GrammarError, match=r"^it took more than 0 s$"):
        stuck.result(LIMIT_S)
    assert first.result(LIMIT_S)
    assert second.result(LIMIT_S)
    endless.opened.set()
    end_of(before)
    assert thread.compile(Grammar("regex", "c")).result(LIMIT_S)
    thread.replace_if_stuck()
    end_of(before)


def test_a_thread_that_comes_back_too_late_counts_no_more(endless: Endless, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "LIMIT_S", 0)
    before, thread = threads(), CompilingThread(STORYTELLER)
    for _ in range(MAX_STUCK + 1):
        thread.compile(Grammar("regex", "endless"))
        assert endless.begun.acquire(timeout=LIMIT_S)
        thread.replace_if_stuck()
    with pytest.raises(EngineError, match=r"^3 threads are stuck in grammars that never compile$"):
        thread.replace_if_stuck()
    endless.opened.set()
    end_of(before)
    thread.replace_if_stuck()


def test_there_is_no_thread_without_a_grammar_to_compile() -> None:
    before, thread = threads(), CompilingThread(STORYTELLER)
    for text in ("a", "b"):
        assert thread.compile(Grammar("regex", text)).result(LIMIT_S)
        end_of(before)


def test_a_kept_grammar_that_has_reached_a_limit_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiler.LIMITS, "max_lexer_states", 60)
    monkeypatch.setattr(compiler, "NUM_TRIED", 2)
    thread, grammar = CompilingThread(STORYTELLER), Grammar("regex", "(a|b)*a(a|b){14}")
    tokenizer = Tokenizer.open(STORYTELLER)
    first = thread.compile(grammar).result(LIMIT_S)
    known = random.Random(1).choices(tokenizer.encode("ba"), k=60)
    for num_known in range(len(known)):
        first.masks(known[:num_known], (), 0)
    assert not first.works()
    assert thread.compile(grammar).result(LIMIT_S).works()
