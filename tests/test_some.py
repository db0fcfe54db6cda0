"""Of many cases some run always: so many as the mark says, with all pairs of values that fit into these."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.some import chosen

ROOT = Path(__file__).parents[1]
LIMIT_S = 60
FILE = """
import pytest

@pytest.mark.some(2)
@pytest.mark.parametrize("letter", ["a", "b", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", range(2))
def test_cases(number, letter):
    pass

@pytest.mark.some(1, "8", "9")
@pytest.mark.parametrize("number", range(10))
def test_named(number):
    pass

def test_alone():
    pass
"""


def product_of(*sizes: int) -> dict[str, dict[str, int]]:
    return {str(case): dict(zip("abcdef", case, strict=False)) for case in product(*map(range, sizes))}


def test_as_many_are_chosen_as_are_asked_for() -> None:
    cases = product_of(9)

    assert len(chosen(cases, 4)) == 4
    assert chosen(cases, 4) < chosen(cases, 5)
    assert chosen(cases, 20) == set(cases)


def test_values_meet_in_pairs_before_any_pair_meets_again() -> None:
    cases = product_of(4, 3, 2)

    kept = [cases[name] for name in chosen(cases, 12)]

    for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
        met = {(case[one], case[other]) for case in kept}
        assert met == {(case[one], case[other]) for case in cases.values()}


def test_a_case_stays_chosen_while_others_go() -> None:
    cases = product_of(40)
    kept = chosen(cases, 10)
    fewer = {name: case for name, case in cases.items() if name in kept or int(case["a"]) % 2}

    assert chosen(fewer, 10) == kept


@pytest.mark.slow
def test_the_cases_beyond_those_are_slow(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(FILE)
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "--collect-only", "--import-mode=prepend", "-q")
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path), "-m"]
    gate, slow = (
        [
            line.partition("::")[2]
            for line in subprocess.check_output([*command, mark], cwd=ROOT, text=True, timeout=LIMIT_S).splitlines()
            if "::" in line
        ]
        for mark in ("not slow", "slow")
    )

    assert gate[-1] == "test_alone"
    named = [name for name in gate if "test_named" in name]
    assert {"test_named[8]", "test_named[9]"} < set(named)
    assert len(named) == 3
    assert len(gate) == 6
    assert len(slow) == 11
    assert {name[-2] for name in gate[:2]} == {"a", "b"}
    assert {name[len("test_cases[")] for name in gate[:2]} == {"0", "1"}
