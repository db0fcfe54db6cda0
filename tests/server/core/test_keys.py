"""API keys with names, and the file of keys that is followed while the server runs."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from gptserve.server.core.keys import (
    CHECK_INTERVAL_S,
    MAX_FILE_BYTES,
    ApiKeys,
    KeyFileError,
    is_key,
    read_key_file,
)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "keys", "alice: first")


def written(path: Path, text: str) -> Path:
    """Replace the file, as editors and orchestrators do: the new one has another inode."""
    new = path.with_suffix(".new")
    new.write_bytes(text.encode())
    return new.replace(path)


def message(path: Path) -> str:
    with pytest.raises(KeyFileError) as raised:
        read_key_file(path)
    return str(raised.value)


@pytest.mark.parametrize("key", ["a", "a,b", "name:key", "#key", "sk-" + "~" * 500])
def test_printable_ascii_is_a_key(key: str) -> None:
    assert is_key(key)


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "\ta", "schlüssel", "a\x7f"])
def test_anything_else_is_no_key(key: str) -> None:
    assert not is_key(key)


def test_keys_of_options_are_named_by_their_digests() -> None:
    keys = ApiKeys(("first", "second,third"))

    assert [keys.name_of(key) for key in (b"first", b"second,third")] == ["key-a7937b64b8ca", "key-2117ce061572"]
    assert keys.owners == {"key-a7937b64b8ca", "key-2117ce061572"}
    assert ApiKeys(("second,third",)).name_of(b"second,third") == keys.name_of(b"second,third")
    assert [keys.name_of(key) for key in (b"second", b"third", b"", b"fir", b"first ", b"\xff")] == [None] * 6


def test_without_keys_none_is_valid() -> None:
    assert ApiKeys().name_of(b"") is None


def test_a_file_holds_names_and_keys_comments_and_blank_lines(path: Path) -> None:
    text = "\ufeff# of the team\r\n\r\nalice: one\r\n  # indented\n\tbob@example.org:two:2#2  \nalice:\tthree"

    assert read_key_file(written(path, text)) == {"one": "alice", "two:2#2": "bob@example.org", "three": "alice"}


def test_two_keys_of_one_owner_both_open_during_a_rotation(path: Path) -> None:
    keys = ApiKeys((), written(path, "alice: old\nalice: new"))

    assert keys.name_of(b"old") == keys.name_of(b"new") == "alice"


def test_keys_of_options_and_of_a_file_open_side_by_side(path: Path) -> None:
    keys = ApiKeys(("mine",), path)

    assert (keys.name_of(b"mine"), keys.name_of(b"first")) == ("key-3fd30542fe3f", "alice")


@pytest.mark.parametrize(
    "line", ["s3cret", "a b: s3cret", ": s3cret", "alice:", "alice: s3 cret", "é: s3cret", "a: s3crét"]
)
def test_a_wrong_line_is_named_by_its_number_and_not_shown(path: Path, line: str) -> None:
    text = message(written(path, f"bob: hunter2\n{line}\n"))

    assert text.startswith(f"api-key-file: line 2 of {path} must be a # comment or NAME: KEY")
    assert "s3" not in text
    assert "hunter2" not in text


def test_a_key_has_one_owner(path: Path) -> None:
    assert (
        message(written(path, "alice: k3y\nbob: k3y"))
        == f"api-key-file: line 2 of {path} gives bob a key that alice has"
    )
    assert read_key_file(written(path, "alice: k3y\nalice: k3y")) == {"k3y": "alice"}


@pytest.mark.parametrize("text", ["", "# nobody\n"])
def test_a_file_without_keys_is_refused(path: Path, text: str) -> None:
    assert message(written(path, text)) == f"api-key-file must hold at least one key, got none in {path}"


def test_what_is_no_file_of_text_is_refused(path: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    path.write_bytes(b"a: b\n\xff")

    assert message(path) == f"api-key-file must be UTF-8, got something else at byte 5 of {path}"
    assert message(tmp_path / "pipe") == f"api-key-file must be a regular file, got {tmp_path / 'pipe'}"
    assert message(tmp_path).startswith("api-key-file must be a ")
    assert message(tmp_path / "no") == (
        f"api-key-file must be a file that can be read, got {tmp_path / 'no'}: No such file or directory"
    )


def test_a_file_is_read_up_to_a_limit(path: Path) -> None:
    most = "a: " + "k" * (MAX_FILE_BYTES - 3)

    assert len(read_key_file(written(path, most))) == 1
    assert (
        message(written(path, most + "k"))
        == f"api-key-file may have at most {MAX_FILE_BYTES} bytes, got more in {path}"
    )


def test_a_server_does_not_start_on_a_broken_file(path: Path) -> None:
    with pytest.raises(KeyFileError):
        ApiKeys(("a",), written(path, "broken"))


def test_a_changed_file_is_read_again(path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gptserve.server.core.keys")
    keys = ApiKeys((), path, clock)
    written(path, "bob: second")
    clock.now += CHECK_INTERVAL_S

    assert keys.name_of(b"second") == "bob"
    assert keys.name_of(b"first") is None, "a key that was taken out opens no more"
    assert [record.getMessage() for record in caplog.records] == [f"read 1 keys from {path}, which has changed"]


def test_a_file_that_is_written_in_place_is_read_again(path: Path, clock: Clock) -> None:
    keys = ApiKeys((), path, clock)
    before = path.stat()
    path.write_text("alice: other")  # as many bytes, in the same inode
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    clock.now += CHECK_INTERVAL_S

    assert path.stat()[:7] == before[:7]
    assert keys.name_of(b"other") == "alice"


def test_the_file_is_looked_at_once_in_a_while(path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    look = Path.stat
    keys = ApiKeys((), path, clock)
    monkeypatch.setattr(Path, "stat", lambda self, **options: looks.append(self) or look(self, **options))

    for now in (0, CHECK_INTERVAL_S / 2, CHECK_INTERVAL_S, CHECK_INTERVAL_S * 1.9, CHECK_INTERVAL_S * 2.1):
        clock.now = now
        assert keys.name_of(b"first") == "alice"

    assert looks == [path, path]


@pytest.mark.parametrize("broken", ["", "bob second", None])
def test_a_file_that_breaks_leaves_the_keys_as_they_were(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    keys = ApiKeys((), path, clock)
    if broken is None:
        path.unlink()
    else:
        written(path, broken)

    for _ in range(3):
        clock.now += CHECK_INTERVAL_S
        assert keys.name_of(b"first") == "alice"
        assert keys.name_of(b"second") is None

    [record] = caplog.records  # said once, not at every look
    assert (record.levelname, record.name) == ("ERROR", "gptserve.server.core.keys")
    assert record.getMessage().endswith("; the keys read before stay valid")
    assert "second" not in record.getMessage()

    written(path, "bob: second")
    clock.now += CHECK_INTERVAL_S
    assert keys.name_of(b"second") == "bob", "a mended file is followed again"


def test_no_key_is_in_what_is_held(path: Path) -> None:
    keys = ApiKeys(("open-sesame",), written(path, "alice: s3cret"))

    assert "open-sesame" not in repr(vars(keys))
    assert "s3cret" not in repr(vars(keys))
