"""Masks of known tokens and of drafts, when the end is held back, and what is left when llguidance gives up."""

from __future__ import annotations

import functools
import json
import random
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from gptserve.engine.grammar import compiler
from gptserve.engine.grammar.compiler import Compiler
from gptserve.engine.grammar.grammar import Grammar
from gptserve.engine.grammar.matcher import Mask, Matcher
from gptserve.weights.tokenizers.tokenizer import Tokenizer

STORYTELLER = Path(__file__).parents[3] / "weights" / "storyteller"
LIMIT_S = 60.0
ENDS = {0, 2029}  # of a text, and of a turn


@functools.cache
def of_storyteller() -> Compiler:
    return Compiler(STORYTELLER)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.open(STORYTELLER)


def matcher(kind: str, text: str) -> Matcher:
    return of_storyteller().compile(Grammar(kind, text))  # type: ignore[arg-type]


def allowed(mask: Mask) -> set[int]:
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def test_a_draft_is_masked_token_by_token_and_rolled_back() -> None:
    known, draft = tokenizer().encode('{"a":'), tokenizer().encode('[1,"x"]}')
    follower = matcher("json", '{"type":"object"}')
    rows = follower.masks(known, draft, 0)
    for num_accepted in range(len(draft) + 1):
        fresh = matcher("json", '{"type":"object"}').masks([*known, *draft[:num_accepted]], (), 0)
        assert allowed(rows[num_accepted]) == allowed(fresh[0]), num_accepted
    again = follower.masks([*known, *draft[:2]], (), 0)
    assert allowed(again[0]) == allowed(rows[2])


@pytest.mark.parametrize("wrong", [7, *ENDS])
def test_after_a_token_that_may_not_come_nothing_may(wrong: int) -> None:
    [one] = tokenizer().encode("1")
    rows = matcher("regex", "[0-9]{3}").masks([], (one, wrong, one), 0)
    assert [len(allowed(row)) > 0 for row in rows] == [True, True, False, False]


def test_the_end_waits_where_the_grammar_goes_on_and_nowhere_else() -> None:
    [a] = tokenizer().encode("a")
    follower = matcher("regex", "a{1,3}")
    assert not allowed(follower.masks([], (), 0)[0]) & ENDS
    assert allowed(follower.masks([a], (), 1)[0]) > ENDS
    assert not allowed(follower.masks([a, a], (), 9)[0]) & ENDS
    assert allowed(follower.masks([a, a, a], (), 9)[0]) == ENDS


def test_a_draft_ends_no_sooner_than_its_tokens() -> None:
    [a] = tokenizer().encode("a")
    rows = matcher("regex", "a{1,9}").masks([a], (a, a), 3)
    assert [allowed(row) >= ENDS for row in rows] == [False, False, True]


def test_past_a_limit_nothing_may_come_and_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiler.LIMITS, "max_lexer_states", 60)
    monkeypatch.setattr(compiler, "NUM_TRIED", 2)
    follower, known = matcher("regex", "(a|b)*a(a|b){14}"), random.Random(1).choices(tokenizer().encode("ba"), k=200)
    assert follower.fault == ""
    for num_known in range(1, len(known)):
        [row] = follower.masks(known[:num_known], (), 0)
        if follower.fault:
            break
    assert allowed(row) == set()
    assert follower.fault.startswith("lexer error: too many states: 60 >= 60")
    assert allowed(follower.masks(known, (known[0],), 0)[1]) == set()


@pytest.mark.parametrize(
    ("known", "forced"),
    [("", '{"colour":"'), ('{"co', 'lour":"'), ('{"colour":"', ""), ('{"colour":"r', 'ed","size":'), ("}", "")],
)
def test_the_only_text_that_may_come_is_known(known: str, forced: str) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "size": {"type": "integer"}},
        "required": ["colour", "size"],
        "additionalProperties": False,
    }
    follower = matcher("json", json.dumps(schema))
    token_ids = tokenizer().encode(known)
    assert tokenizer().decode(follower.forced(token_ids)) == forced
    fresh = matcher("json", json.dumps(schema))
    assert allowed(follower.masks(token_ids, (), 0)[0]) == allowed(fresh.masks(token_ids, (), 0)[0])


def test_a_text_that_ends_within_a_character_is_forced_as_far_as_it_is_one() -> None:
    assert tokenizer().decode(matcher("choice", '["naïve é", "naïve è"]').forced(())) == "naïve "


def test_two_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, fill = Event(), Event(), Matcher._fill

    def slowly(*args: Any, **kwargs: Any) -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)
        fill(*args, **kwargs)

    monkeypatch.setattr(Matcher, "_fill", slowly)
    follower = matcher("regex", "abc")
    with ThreadPoolExecutor(2) as threads:
        masks = threads.submit(follower.masks, (), tokenizer().encode("ab"), 0)
        assert begun.wait(LIMIT_S)
        forced = threads.submit(follower.forced, ())
        assert not wait([forced], 0.1).done
        go_on.set()
        assert tokenizer().decode(forced.result(LIMIT_S)) == "abc"
        assert [len(allowed(row)) > 0 for row in masks.result(LIMIT_S)] == [True, True, True]
