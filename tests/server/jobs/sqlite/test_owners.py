"""Owners of a journal that an earlier version wrote: keys of options had the names of their positions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptserve.server.core.keys import option_name
from gptserve.server.jobs.sqlite.database import FILE_NAME
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from gptserve.server.jobs.store import FormerOwners
from tests.server.conftest import Api
from tests.server.fake_engine import FakeEngineClient
from tests.server.jobs.sqlite.test_store import use
from tests.server.jobs.test_store import END, OUTPUTS, RECORD

MakeApi = Callable[..., Api]
LOGGER = "gptserve.server.jobs.sqlite.owners"


def write_old(folder: Path, *owners: str | None) -> None:
    """Write the journal of an earlier version, with a completion of each owner, of which it is the id."""

    is_new = not (folder / FILE_NAME).exists()
    write_rows(folder, *owners)
    if is_new:
        with contextlib.closing(sqlite3.connect(folder / FILE_NAME)) as connection:
            connection.execute("DROP TABLE renamed_owners")  # earlier versions had none


def write_rows(folder: Path, *owners: str | None) -> None:
    """Write a completion of each owner, of which it is the id."""

    async def write(journal: SqliteJobStore) -> None:
        for owner in owners:
            completion_id = str(owner)
            await journal.add(replace(RECORD, completion_id=completion_id, owner=owner))
            await journal.append(completion_id, 0, OUTPUTS)
            await journal.end(completion_id, END)

    use(folder, write)


def owners_after(folder: Path, former: FormerOwners) -> dict[str, str | None]:
    """Start with these names; return the owners by id. Every row is read back, with its checksum."""
    found: dict[str, str | None] = {}

    async def load(journal: SqliteJobStore) -> None:
        found.update({row.record.completion_id: row.record.owner for row in await journal.load(former)})
        for completion_id, owner in found.items():
            record = await journal.read_record(completion_id)
            assert record == replace(RECORD, completion_id=completion_id, owner=owner)
            assert await journal.batches(completion_id, 0, 9) == [OUTPUTS]

    use(folder, load)
    return found


def test_the_first_start_renames_and_later_ones_do_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    write_old(tmp_path, "key-1", "key-2", "alice", "key-012345678901", None)
    two = FormerOwners({"key-1": "key-aa", "key-2": "key-bb", "key-3": "key-cc"})
    same = {"alice": "alice", "key-012345678901": "key-012345678901", "None": None}

    assert owners_after(tmp_path, two) == {"key-1": "key-aa", "key-2": "key-bb", **same}
    assert [record.getMessage() for record in caplog.records if record.name == LOGGER] == [
        f"the completions of {position} now belong to {name}, the key in its place"
        for position, name in (("key-1", "key-aa"), ("key-2", "key-bb"))
    ]
    caplog.clear()
    write_old(tmp_path, "key-3")
    for former in (two, FormerOwners({"key-1": "key-bb"}), FormerOwners()):
        assert owners_after(tmp_path, former) == {"key-1": "key-aa", "key-2": "key-bb", "key-3": "key-3", **same}
    assert not [record for record in caplog.records if record.name == LOGGER]


def test_fewer_keys_than_before_get_nothing_until_all_are_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_old(tmp_path, "key-1", "key-2")
    assert owners_after(tmp_path, FormerOwners({"key-1": "key-bb"})) == {"key-1": "key-1", "key-2": "key-2"}
    assert [record.getMessage() for record in caplog.records if record.name == LOGGER] == [
        "the journal has completions of key-2, and there are 1 keys of --api-key: as these are not the same keys as "
        "before, nobody finds the completions of key-1, key-2"
    ]
    both = FormerOwners({"key-1": "key-aa", "key-2": "key-bb"})
    assert owners_after(tmp_path, both) == {"key-1": "key-aa", "key-2": "key-bb"}


def test_a_start_without_keys_of_options_renames_nothing_and_leaves_it_to_the_next(tmp_path: Path) -> None:
    write_old(tmp_path, "key-1")
    assert owners_after(tmp_path, FormerOwners()) == {"key-1": "key-1"}
    assert owners_after(tmp_path, FormerOwners({"key-1": "key-aa"})) == {"key-1": "key-aa"}


def test_a_journal_of_this_version_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_rows(tmp_path, "key-1")  # as a file named a key
    for former in (FormerOwners(others=frozenset({"key-1"})), FormerOwners({"key-1": "key-aa"}), FormerOwners()):
        assert owners_after(tmp_path, former) == {"key-1": "key-1"}
    assert not [record for record in caplog.records if record.name == LOGGER]


@pytest.mark.parametrize("names", [{}, {"key-1": "key-aa"}])
def test_once_a_file_gives_the_name_of_a_position_nothing_is_renamed_any_more(
    tmp_path: Path, names: dict[str, str]
) -> None:
    write_old(tmp_path, "key-2", "key-3")
    assert owners_after(tmp_path, FormerOwners(names, frozenset({"key-2"}))) == {"key-2": "key-2", "key-3": "key-3"}
    later = FormerOwners({"key-1": "key-aa", "key-2": "key-bb", "key-3": "key-cc"})
    assert owners_after(tmp_path, later) == {"key-2": "key-2", "key-3": "key-3"}


def test_a_name_that_a_file_gives_is_no_position(tmp_path: Path) -> None:
    write_old(tmp_path, "key-1", "key-2")
    former = FormerOwners({"key-1": "key-aa"}, others=frozenset({"key-2"}))
    assert owners_after(tmp_path, former) == {"key-1": "key-aa", "key-2": "key-2"}


@pytest.mark.parametrize("later", [("bob",), ("alice",), ("bob", "alice"), ("carol", "alice", "bob")])
def test_a_key_finds_its_own_and_nobody_elses_whichever_keys_are_taken_away(
    make_api: MakeApi, tmp_path: Path, later: tuple[str, ...]
) -> None:
    def ask(api: Api, key: str, method: str, path: str, **arguments: Any) -> Any:
        return api.request(method, path, headers={"authorization": f"Bearer {key}"}, **arguments).json()

    def start(make: MakeApi, *keys: str) -> Api:
        api = make(FakeEngineClient(), state_dir=tmp_path, api_keys=keys)
        asyncio.run(api.app.state.jobs.start())
        return api

    first = start(Api, "alice", "bob")
    body = {"input": "hi", "max_output_tokens": 2}
    ids = {key: ask(first, key, "POST", "/v1/responses", json=body)["id"] for key in ("alice", "bob")}
    first.close()
    second = start(make_api, *later)
    for key in later:
        listed = ask(second, key, "GET", "/v1/completions")["data"]
        assert [entry["id"] for entry in listed] == [ids[key] for _ in range(key in ids)]
        assert {entry["key_name"] for entry in listed} <= {option_name(key)}
        for owner, response_id in ids.items():
            answer = ask(second, key, "GET", f"/v1/responses/{response_id}")
            assert ("error" in answer and answer["error"] is not None) == (owner != key)


def test_an_operator_who_is_named_by_a_position_is_told(make_api: MakeApi, caplog: pytest.LogCaptureFixture) -> None:
    make_api(FakeEngineClient(), api_keys=("a", "b"), operators=("key-2", "later"))
    assert [record.getMessage() for record in caplog.records if record.name == "gptserve.server.app"] == [
        f"--operator key-2 names no key any more: that key is now {option_name('b')}"
    ]
