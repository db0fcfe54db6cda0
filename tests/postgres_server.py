"""A PostgreSQL of the tests' own: in a temporary folder, on a socket in it, started and ended by them.

The programs are those of Debian's packages, or those on the PATH. PostgreSQL refuses root, which so runs it as another.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psycopg

LIMIT_S = 60.0


def find_programs() -> Path | None:
    """Return the folder of initdb and postgres, the newest."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    found = installed[-1] if installed else shutil.which("initdb")
    return None if found is None else Path(found).resolve().parent


class PostgresServer:
    """One database server; `start` it before use, `close` it at last. It does not sync, as no test cuts the power."""

    def __init__(self) -> None:
        programs = find_programs()
        assert programs is not None
        self._programs = programs
        self._user = _user()
        self.folder = Path(
            tempfile.mkdtemp(prefix="gptserve-pg-")
        )  # short, as it has a socket, and not in pytest's 0700
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self._process: subprocess.Popen[bytes] | None = None
        self._names = map("test{}".format, itertools.count())
        options = ("--username=postgres", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C")
        self._run("initdb", f"--pgdata={self.folder / 'data'}", *options)

    @property
    def pid(self) -> int:
        """The process that starts all others."""
        assert self._process is not None
        return self._process.pid

    def url(self, database: str = "postgres") -> str:
        """Return the URL of a database."""
        return f"postgresql://postgres@/{database}?host={self.folder}"

    def empty_database(self, encoding: str = "UTF8") -> str:
        """Make a database; return its URL."""
        name = next(self._names)
        options = f"TEMPLATE template0 ENCODING '{encoding}' STRATEGY wal_log"
        self.execute(f"CREATE DATABASE {name} {options}", autocommit=True)
        return self.url(name)

    def execute(self, statement: str, url: str | None = None, *, autocommit: bool = False) -> list[tuple[object, ...]]:
        """Execute a statement as any client; return its rows."""
        return self.execute_at(url or self.url(), statement, autocommit=autocommit)

    @staticmethod
    def execute_at(url: str, statement: str, *, autocommit: bool = False) -> list[tuple[object, ...]]:
        """Execute a statement in a database."""
        with psycopg.connect(url, autocommit=autocommit) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def start(self) -> None:
        """Start it unless it runs, and wait until it takes connections."""
        if self._process is not None:
            return
        options = ("-c", "listen_addresses=", "-c", f"unix_socket_directories={self.folder}", "-c", "fsync=off")
        self._process = self._popen("postgres", "-D", str(self.folder / "data"), "-c", "max_connections=60", *options)
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                psycopg.connect(self.url()).close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None, "see its log"
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: by SIGINT in order, by SIGQUIT as if it crashed. Its clients lose their connections."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(LIMIT_S)
            self._process = None

    def close(self) -> None:
        """End it and delete all its files."""
        self.stop()
        shutil.rmtree(self.folder)

    def _run(self, *command: str) -> None:
        process = self._popen(*command)
        assert process.wait(LIMIT_S) == 0, (self.folder / "log").read_text()

    def _popen(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command: Sequence[str] = (str(self._programs / name), *arguments)
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=self.folder, user=self._user, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )


def _user() -> str | None:
    """Return the user to run it as, if not the one of the tests."""
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in names)
