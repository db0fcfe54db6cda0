"""Fixtures of the tests of clients: each test leaves nothing, and a gate for the fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.client_harness import Gate
from tests.leaks import freeze, holdings, wait_until_gone


@pytest.fixture(scope="module", autouse=True)
def _modules_are_no_leaks() -> None:
    """What a test may leave is sought twice a test: not among half a million objects of modules."""
    freeze()


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    before = holdings()
    yield
    assert not wait_until_gone(before)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    opened = Gate(tmp_path / "gate")
    yield opened
    opened.close()
