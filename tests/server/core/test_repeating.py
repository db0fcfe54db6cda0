from __future__ import annotations

import asyncio

import pytest

from gptserve.server.core import repeating
from gptserve.server.core.errors import ServiceError
from gptserve.server.core.repeating import repeat

UNTOLD, TOLD = ServiceError("away", "it is away"), ServiceError("full", "it is full")


def logged(errors: list[Exception | None], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Let a work that is repeated raise these one after another; return what was logged."""

    async def test() -> None:
        left, is_over = list(errors), asyncio.Event()

        async def work() -> None:
            if not left:
                is_over.set()
            elif (error := left.pop(0)) is not None:
                raise error

        loop = asyncio.create_task(repeat(work, 0.0, 0.0, untold="away"))
        await asyncio.wait_for(is_over.wait(), 20)
        loop.cancel()
        await asyncio.wait([loop])
        assert loop.cancelled()

    asyncio.run(test())
    return [record.getMessage() for record in caplog.records]


def test_an_error_that_nobody_foresaw_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert logged([ValueError("x"), None], caplog) == ["unexpected: ValueError('x')"]
    assert caplog.records[0].exc_info


def test_an_error_is_told_once_in_a_while(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [TOLD, TOLD, None, TOLD, KeyError(1), KeyError(1), TOLD]
    assert logged(errors, caplog) == ["it is full", "unexpected: KeyError(1)"]
    caplog.clear()
    monkeypatch.setattr(repeating, "TOLD_AGAIN_S", 0.0)
    assert logged([TOLD, None, TOLD], caplog) == ["it is full", "it is full"]


def test_an_error_of_which_others_tell_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    assert logged([UNTOLD, TOLD, UNTOLD], caplog) == ["it is full"]
