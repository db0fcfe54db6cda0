"""What a rank beyond the first warns of reaches the log, with its number; what the first one said is not repeated."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.parallel import ranks, worker
from gptserve.engine.parallel.kept_warnings import KeptWarnings
from gptserve.engine.runner import setup
from tests.engine.runs import make_engine

logger = logging.getLogger("gptserve.engine.somewhere")


def warn_first(choose: Any, warnings: tuple[str, ...], *arguments: Any) -> Any:
    """Stand in for a choice that warns."""
    for warning in warnings:
        logger.warning("%s: slower", warning)
    return choose(*arguments)


def run_warning_rank(*arguments: Any) -> None:
    """Run a rank of which two kernels fail."""
    setup.choose_operations = partial(warn_first, setup.choose_operations, ("gate", "normalize"))
    worker.run_rank(*arguments)


@pytest.mark.slow
def test_a_rank_warns_of_what_the_first_one_has_not(
    tiny_gpt2: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ranks, "run_rank", run_warning_rank)
    monkeypatch.setattr(setup, "choose_operations", partial(warn_first, setup.choose_operations, ("gate",)))
    make_engine(tiny_gpt2, tensor_parallel_size=2)
    messages = [message for message in caplog.messages if not message.startswith("decoder: ")]  # ranks run no programs
    assert messages == ["gate: slower", "rank 1: normalize: slower"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert "slower" not in capfd.readouterr().err, "the rank itself prints none"


@pytest.mark.parametrize("owner", ["", "gptserve", None])
def test_warnings_that_are_kept_still_reach_who_else_gets_them(
    owner: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # None: as in a program that configures no logging
    if owner is not None:
        monkeypatch.setattr(logging.getLogger(owner), "handlers", [caplog.handler])
    with KeptWarnings() as kept:
        logger.warning("a kernel %s", "fails")
        logger.info("no warning")
    logger.warning("later")
    assert kept.messages == ["a kernel fails"]
    assert caplog.messages == ([] if owner is None else ["a kernel fails", "later"])
    assert capsys.readouterr().err == ("a kernel fails\nlater\n" if owner is None else "")
