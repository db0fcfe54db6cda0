"""`gptserve state`: what it prints and refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gptserve.server.core.settings_checks import DATABASE_RULE
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from tests.server.jobs.test_store import END, RECORD


def test_completions_are_moved_there_and_back(
    run: Any, monkeypatch: pytest.MonkeyPatch, postgres_url: str, tmp_path: Path
) -> None:
    async def fill() -> None:
        store = SqliteJobStore(tmp_path)
        await store.add(RECORD)
        await store.end(RECORD.completion_id, END)
        await store.close()

    asyncio.run(fill())
    line = "imported 1 completions, 0 of them to go on\n"
    assert run("state", "import", str(tmp_path), "--state-url", postgres_url) == (0, line, "")
    monkeypatch.setenv("GPTSERVE_STATE_URL", postgres_url)
    assert run("state", "export", str(tmp_path / "to")) == (0, line.replace("imp", "exp"), "")
    assert run("state", "export", str(tmp_path / "to")) == (
        1,
        "",
        f"gptserve: {tmp_path / 'to'} has a journal already; name another folder\n",
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "state import needs --state-url or GPTSERVE_STATE_URL"),
        (("--state-url", "sqlite://x"), f"state-url must be {DATABASE_RULE}, got ***"),
    ],
)
def test_a_database_must_be_named(
    run: Any, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], message: str
) -> None:
    monkeypatch.delenv("GPTSERVE_STATE_URL", raising=False)
    assert run("state", "import", "folder", *flags) == (2, "", f"gptserve state: {message}\n")
