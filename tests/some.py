"""Which cases of a test run always where its mark `some(n)` says that n of them are enough; the others are slow.

Cases whose ids the mark names after n run always, too: `some(3, "GPT-2")`.

Each case adds as many pairs of values as it can to those before it, as most faults show in two values that meet. Of
cases that add as many, the hash of the id decides, so that a case stays chosen while others come and go.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations_with_replacement

import pytest


def leave_some(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the cases beyond those that run always."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("some") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        num, *named = of_test[0].get_closest_marker("some").args  # type: ignore[union-attr]
        always = [item for item in of_test if item.get_closest_marker("slow") is None]
        kept = chosen({item.nodeid: _values(item) for item in always}, num)
        for item in always:
            if item.nodeid not in kept and vars(item)["callspec"].id not in named:
                item.add_marker(pytest.mark.slow)


def chosen(cases: Mapping[str, Mapping[str, int]], num: int) -> set[str]:
    """Return the names of `num` cases, or of all. A case is a number for the value that each parameter has."""
    pairs = {name: set(combinations_with_replacement(sorted(case.items()), 2)) for name, case in cases.items()}
    left = sorted(pairs, key=lambda name: zlib.crc32(name.encode()))
    seen: set[object] = set()
    kept: set[str] = set()
    while left and len(kept) < num:
        best = max(left, key=lambda name: len(pairs[name] - seen))
        left.remove(best)
        kept.add(best)
        seen |= pairs[best]
    return kept


def _values(item: pytest.Item) -> dict[str, int]:
    """Return a case. Those of a product share the values themselves."""
    return {name: id(value) for name, value in vars(item)["callspec"].params.items()}
