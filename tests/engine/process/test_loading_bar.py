"""The loading bar: what it tells, and that it leaves no thread behind."""

from __future__ import annotations

import threading

import pytest

from gptserve.engine.process.loading_bar import LoadingBar


def test_the_bar_shows_bytes_of_all_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadingBar(disable=False) as bar:
        bar.show(512 * 1024, 2 * 2**20)
        bar.show(2 * 2**20, 2 * 2**20)
    assert "100%" in capsys.readouterr().err.split("\r")[-1]


def test_nothing_is_drawn_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadingBar() as bar:
        bar.show(1, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_bar_that_is_not_drawn_logs_every_ten_seconds(is_drawn: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now = 0.0
    with LoadingBar(disable=not is_drawn, clock=lambda: now) as bar:
        for now in (5.0, 10.0, 19.0, 20.0, 40.0):
            bar.show(int(now * 2**26), 40 * 2**26)
    lines = ["loading: 25% of 2.5 GiB of weights are read", "loading: 50% of 2.5 GiB of weights are read"]
    assert [record.message for record in caplog.records] == ([] if is_drawn else lines)


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    with LoadingBar() as bar:
        bar.show(1, 2)
    assert threading.active_count() == before
