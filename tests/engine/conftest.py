"""Fixtures of all tests of the engine."""

from __future__ import annotations

import pytest

from gptserve.engine.scheduling.draft_gain import DraftGain


@pytest.fixture(autouse=True)
def drafts_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft in every step, whatever it costs here: what drafts could break is seen only where there are many."""
    monkeypatch.setattr(DraftGain, "max_tokens", lambda *_: 1000)
    monkeypatch.setattr(DraftGain, "wants_plain", lambda *_: False)
