"""The loading bar: what it tells, and that it leaves no thread behind."""

from __future__ import annotations

import threading

import pytest

from gptserve.engine.model import loading_bar
from gptserve.engine.model.loading_bar import LoadingBar


def test_the_bar_shows_bytes_of_all_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = loading_bar._Bar(
        desc="loading weights", unit="B", unit_scale=True, unit_divisor=1024, disable=False, mininterval=0
    )
    monkeypatch.setattr(loading_bar, "_Bar", lambda **options: shown)
    with LoadingBar() as bar:
        bar.update(512 * 1024, 2 * 2**20)
        bar.update(2 * 2**20, 2 * 2**20)
    assert "100%" in capsys.readouterr().err.split("\r")[-1]


def test_nothing_is_drawn_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadingBar() as bar:
        bar.update(1, 2)
    assert capsys.readouterr().err == ""


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    with LoadingBar() as bar:
        bar.update(1, 2)
    assert threading.active_count() == before
