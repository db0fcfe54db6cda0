"""A stand-in hub on 127.0.0.1: serves repositories from memory and keeps a list of what was asked for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class Hub:
    """repositories: id -> revision -> files; `locked` ids answer as gated, `broken` makes every answer a 500.

    The bodies of files of the name `held` wait for the gate.
    """

    repositories: dict[str, dict[str, Files]] = field(default_factory=dict)
    locked: set[str] = field(default_factory=set)
    broken: bool = False
    held: str = ""
    gate: threading.Event = field(default_factory=threading.Event)
    paths: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def files_asked_for(self) -> set[str]:
        return {path.rpartition("/resolve/")[2].partition("/")[2] for path in self.paths if "/resolve/" in path}

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for a GET or HEAD."""
        self.paths.append(path)
        if self.broken:
            return 500, {}, b"{}"
        repo_id, _, rest = path.removeprefix("/api/models/").lstrip("/").partition("/")
        if repo_id not in self.repositories:
            name, _, rest = rest.partition("/")
            repo_id = f"{repo_id}/{name}"
        if repo_id not in self.repositories:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if repo_id in self.locked:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        kind, _, rest = (rest or "revision/main").partition("/")
        revision, _, name = rest.partition("/")
        revisions = self.repositories[repo_id]
        by_commit = {commit_of(known): files for known, files in revisions.items()}
        files = revisions.get(revision, by_commit.get(revision))
        if files is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        commit = revision if revision in by_commit else commit_of(revision)
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            return 200, {}, json.dumps({"id": repo_id, "sha": commit, "siblings": siblings}).encode()
        if kind == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return 200, {}, json.dumps(entries).encode()
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"', "X-Repo-Commit": commit}, files[name]


@contextmanager
def serve_hub(hub: Hub) -> Iterator[Hub]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(unquote(urlsplit(self.path).path))
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                **headers,
                "Content-Length": str(len(body)),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                if hub.held and self.path.endswith(f"/{hub.held}"):
                    hub.gate.wait()
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that has gone
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        hub.gate.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
