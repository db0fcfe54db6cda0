"""Importing without collections leaves the collector as it was, and what was imported out of its sight."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import gc
from gptserve.engine.process.garbage import COLLECT_AFTER, without_collections
{first}
before, num_frozen, kept = gc.isenabled(), gc.get_freeze_count(), [[]]
assert any(value is kept[0] for value in gc.get_objects())
with without_collections():
    assert not gc.isenabled()
assert gc.isenabled() is before
assert num_frozen < gc.get_freeze_count()
assert gc.get_threshold()[0] == COLLECT_AFTER
assert not any(value is kept[0] for value in gc.get_objects())
"""


@pytest.mark.parametrize("first", ["", "gc.disable()"])
def test_nothing_is_collected_meanwhile_nor_looked_at_afterwards_and_new_objects_are_looked_at_seldom(
    first: str,
) -> None:
    subprocess.run([sys.executable, "-c", CODE.format(first=first)], check=True, timeout=60)
