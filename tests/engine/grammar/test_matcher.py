"""Masks of known tokens and of drafts, when the end is held back, and what is left when llguidance gives up."""

from __future__ import annotations

import functools
import json
import random
from concurrent.futures import ThreadPoolExecutor
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
FIRST = 2030


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


@pytest.mark.parametrize(
    "grammar",
    ["start: /[a-z ]+/", "start: a /[0-9]+/\na[max_tokens=3]: /[a-z ]+/", 'start: a /[0-9]+/\na[stop=" "]: /[a-z]+/'],
)
def test_a_draft_changes_nothing_where_llguidance_takes_no_token_back(grammar: str) -> None:
    chosen, path, masks = random.Random(1), list[int](), list[set[int]]()
    for _ in range(8):
        [mask] = matcher("lark", grammar).masks(path, (), 0)
        masks.append(allowed(mask))
        path.append(chosen.choice(sorted(masks[-1] - ENDS)))
    follower = matcher("lark", grammar)
    for num_known in range(len(path)):
        rows = follower.masks(path[:num_known], path[num_known:-1], 0)
        assert [allowed(row) for row in rows] == masks[num_known:]
    assert len({frozenset(mask) for mask in masks}) > 1
    assert not follower.fault


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


def test_a_sequence_that_reaches_a_limit_harms_no_other_of_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiler.LIMITS, "max_lexer_states", 60)
    monkeypatch.setattr(compiler, "NUM_TRIED", 2)
    compiled, rng = matcher("regex", "(a|b)*a(a|b){14}"), random.Random(1)
    greedy, others = compiled.copy(), [compiled.copy() for _ in range(3)]
    known = rng.choices(tokenizer().encode("ba"), k=200)
    assert compiled.works()
    for num_known in range(len(known)):
        greedy.masks(known[:num_known], (), 0)
    assert greedy.fault.startswith("lexer error: too many states: 60 >= 60")
    assert not compiled.works()
    for num_known, other in enumerate(others):
        row, after = other.masks(known[:num_known], known[num_known : num_known + 1], 0)
        assert (allowed(row), allowed(after)) != (set(), set())
        assert other.fault == ""


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
    assert tokenizer().decode(follower.forced(token_ids, 99)) == forced
    fresh = matcher("json", json.dumps(schema))
    assert allowed(follower.masks(token_ids, (), 0)[0]) == allowed(fresh.masks(token_ids, (), 0)[0])


def test_a_text_that_ends_within_a_character_is_forced_as_far_as_it_is_one() -> None:
    assert tokenizer().decode(matcher("choice", '["naïve é", "naïve è"]').forced((), 99)) == "naïve "


@pytest.fixture(scope="module")
def with_marks(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """The storyteller's vocabulary with three more special tokens, from FIRST on."""
    folder = tmp_path_factory.mktemp("vocabulary")
    saved = json.loads((STORYTELLER / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((STORYTELLER / "config.json").read_text(encoding="utf-8"))
    saved["added_tokens"] += [{"id": FIRST + i, "content": f"<|{i}|>", "special": True} for i in range(3)]
    (folder / "tokenizer.json").write_text(json.dumps(saved), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": FIRST + 3}), encoding="utf-8")
    return Compiler(folder)


FORCING_SPECIAL = [
    'start: "x" <[2030]>',
    'start: <[2030]> "final" <[2031]> "{" /[0-9]{1,2}/ <[2032]>',
    'start: (<[2030]> "so" <[2031]> /[a-z ]*/ <[2032]>)* <[2030]> "end" <[2031]> /[0-9]+/',
    'start: "a" <[2030-2031]> "bc" <[2032]> <[2032]>',
    'start: a | b\na: "xy" <[2030]> "a"\nb: "xy" <[2031]> "b"',
    'start: "k" before <[2030]> "x"\nbefore[lazy]: /(?s:.*)/ "é"',  # llguidance panics when it computes a forced text
]


@pytest.mark.some(3)
@pytest.mark.parametrize("text", FORCING_SPECIAL)
def test_a_forced_text_changes_no_mask(with_marks: Compiler, text: str) -> None:
    compiled = with_marks.compile(Grammar("lark", text))
    for seed in range(8):
        rng, known, asked, silent = random.Random(seed), list[int](), compiled.copy(), compiled.copy()
        for _ in range(30):
            forced = asked.forced(known, 4)
            row, *_ = asked.masks(known, forced, 0)
            assert allowed(row) == allowed(silent.masks(known, (), 0)[0])
            assert allowed(row), asked.fault
            if allowed(row) & ENDS:
                break
            short = sorted(allowed(row), key=lambda token_id: (token_id not in forced, rng.random()))
            known.append(short[0])


def test_special_tokens_are_forced_as_tokens(with_marks: Compiler) -> None:
    compiled = with_marks.compile(Grammar("lark", FORCING_SPECIAL[1]))
    known: list[int] = []
    for _ in range(3):
        forced = compiled.forced(known, 99)
        assert (forced[0], forced[-2:]) == (FIRST, [FIRST + 1, *tokenizer().encode("{")]) or known
        rows = compiled.masks(known, forced, 0)
        assert all(token_id in allowed(row) for token_id, row in zip(forced, rows, strict=False))
        assert compiled.forced(known, 2) == forced[:2]
        known.append(forced[0])
    assert compiled.forced([FIRST, *tokenizer().encode("final"), FIRST + 1, *tokenizer().encode("{1")], 9) == []
    compiled = with_marks.compile(Grammar("lark", FORCING_SPECIAL[3]))
    a, bc = tokenizer().encode("a"), tokenizer().encode("bc")
    assert (compiled.forced([], 9), compiled.forced(a, 9)) == (a, []), "one of two marks is not forced"
    assert compiled.forced([*a, FIRST + 1], 9) == [*bc, FIRST + 2, FIRST + 2]


def test_a_forced_text_is_asked_for_while_masks_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, fill = Event(), Event(), Matcher._fill

    def slowly(*args: Any, **kwargs: Any) -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)
        fill(*args, **kwargs)

    monkeypatch.setattr(Matcher, "_fill", slowly)
    follower = matcher("regex", "abc")
    with ThreadPoolExecutor(1) as thread:
        masks = thread.submit(follower.masks, (), tokenizer().encode("ab"), 0)
        assert begun.wait(LIMIT_S)
        assert tokenizer().decode(follower.forced((), 9)) == "abc"
        go_on.set()
        assert [len(allowed(row)) > 0 for row in masks.result(LIMIT_S)] == [True, True, True]
