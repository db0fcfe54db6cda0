"""API keys and the names of their owners, from options and from a file that is read again when it changes.

Knows no HTTP. `settings.py` checks keys with it; `auth.py` looks up the key of every request.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

KEY_RULE = "one or more printable ASCII characters without a space"
LINE_RULE = "a # comment or NAME: KEY, a name of 1 to 64 letters, digits and ._@+- and a key without a space"
MAX_FILE_BYTES = 2**17  # some 2,000 keys; the event loop reads them in a few milliseconds
NAME_DIGITS = 12  # no two keys have the same; a guess at a weak key can be checked with fewer, too
CHECK_INTERVAL_S = 1.0  # a key that is removed from the file stays valid for so long

_KEY = re.compile(r"[!-~]+")
_LINE = re.compile(r"([\w.@+-]{1,64}):[ \t]*([!-~]+)", re.ASCII)

logger = logging.getLogger(__name__)


class KeyFileError(Exception):
    """The file of keys is not usable; the message says why and holds no key."""


def is_key(text: str) -> bool:
    """Return whether `text` can be a key: KEY_RULE."""
    return _KEY.fullmatch(text) is not None


def option_name(key: str) -> str:
    """Return the name of the owner of a key that an option gives."""
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:NAME_DIGITS]}"


def read_key_file(path: Path) -> dict[str, str]:
    """Return the owner's name by key. Several keys may have one owner. Raises KeyFileError."""
    try:
        text = _read(path).decode("utf-8-sig")
    except OSError as error:
        raise KeyFileError(f"api-key-file must be a file that can be read, got {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise KeyFileError(f"api-key-file must be UTF-8, got something else at byte {error.start} of {path}") from None
    names: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise KeyFileError(f"api-key-file: line {number} of {path} must be {LINE_RULE}")
        name, key = match.groups()
        if names.setdefault(key, name) != name:
            raise KeyFileError(f"api-key-file: line {number} of {path} gives {name} a key that {names[key]} has")
    if not names:
        raise KeyFileError(f"api-key-file must hold at least one key, got none in {path}")
    return names


class ApiKeys:
    """The valid keys. It holds their SHA-256 digests only.

    Keys of options are named by their digests, as `option_name` says, so that a key keeps its name when another is
    taken away; the file names its own. A lookup checks the file for changes, at most every CHECK_INTERVAL_S. While the
    file is not usable, the keys read last stay valid.
    """

    def __init__(
        self, keys: Sequence[str] = (), file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the file, which may raise KeyFileError."""
        self._names = self._of_options = _by_digest({key: option_name(key) for key in keys})
        self.positions = {f"key-{number}": option_name(key) for number, key in enumerate(keys, 1)}
        """The names of the keys of options by those that they had in earlier versions."""
        self._file = file
        self._clock = clock
        self._check_at = clock() + CHECK_INTERVAL_S
        self._version: object = None
        if file is not None:
            self._version = file_version(file)
            self._names = self._of_options | _by_digest(read_key_file(file))

    @property
    def owners(self) -> set[str]:
        """The names of the keys read last."""
        return set(self._names.values())

    def name_of(self, key: bytes) -> str | None:
        """Return the name of the key's owner, or None for a key that is not valid."""
        self._follow_file()
        # Nobody can choose the digest of a guessed key, so the time of this lookup tells nothing about other keys.
        return self._names.get(hashlib.sha256(key).digest())

    def _follow_file(self) -> None:
        if self._file is None or self._clock() < self._check_at:
            return
        self._check_at = self._clock() + CHECK_INTERVAL_S
        version = file_version(self._file)  # taken before reading, so that a later change is noticed
        if version == self._version:
            return
        self._version = version
        try:
            names = read_key_file(self._file)
        except KeyFileError as error:
            logger.error("%s; the keys read before stay valid", error)
            return
        self._names = self._of_options | _by_digest(names)
        logger.info("read %d keys from %s, which has changed", len(names), self._file)


def _by_digest(names: Mapping[str, str]) -> dict[bytes, str]:
    return {hashlib.sha256(key.encode()).digest(): name for key, name in names.items()}


def file_version(path: Path) -> object:
    """Return a value that changes when the file is written, replaced or removed."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: Path) -> bytes:
    """Return the content of a regular file. Opening a pipe would wait for its writer. Raises KeyFileError, OSError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise KeyFileError(f"api-key-file must be a regular file, got {path}")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise KeyFileError(f"api-key-file may have at most {MAX_FILE_BYTES} bytes, got more in {path}")
    return content
