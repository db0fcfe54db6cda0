"""Importing without collections leaves the collector as it was, and what was imported out of its sight."""

from __future__ import annotations

import gc

import pytest

from gptserve.engine.process.imports import without_collections


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_meanwhile_nor_looked_at_afterwards(enabled: bool) -> None:
    was_enabled, kept = gc.isenabled(), []
    (gc.enable if enabled else gc.disable)()
    try:
        with without_collections():
            assert not gc.isenabled()
            kept.append([])
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() > 0
        assert not any(value is kept[0] for value in gc.get_objects())
    finally:
        gc.unfreeze()
        (gc.enable if was_enabled else gc.disable)()
