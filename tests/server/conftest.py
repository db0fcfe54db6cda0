"""The application over a FakeEngineClient: called directly for JSON, behind a real uvicorn for what needs a socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import fastapi.dependencies.models
import fastapi.routing
import httpx
import prometheus_client.validation
import pytest
import uvloop

import gptserve.version
from gptserve.server.batches.folder import FolderBatchStore
from gptserve.server.files.folder import FolderFileStore
from gptserve.server.http.connections import Connections
from gptserve.server.http.protocol import BoundedHttpProtocol
from gptserve.server.http.server import HttpServer
from gptserve.server.http.tls import Tls
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from gptserve.weights.chat.template import ChatTemplate
from tests.server.app_options import make_app
from tests.server.fake_engine import ByteTokenizer, FakeEngineClient

# Hundreds of applications have the same routes, whose parts FastAPI takes longer to make than most tests do to run.
_make_route = fastapi.routing.APIRoute.__init__
_made: dict[tuple[str, CodeType], tuple[dict[str, Any], fastapi.routing.APIRoute]] = {}


def _copy_route(route: fastapi.routing.APIRoute, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
    """Make a route, of the parts of one that has the same options and whose endpoint has the same code."""
    code = (endpoint.func if isinstance(endpoint, functools.partial) else endpoint).__code__
    known = _made.get((path, code))
    if known is None or known[0] != options:
        _make_route(route, path, endpoint, **options)
        _made[path, code] = options, route
        return
    vars(route).update(vars(known[1]), endpoint=endpoint)
    route.dependant = dataclasses.replace(route.dependant, call=endpoint)
    route.app = fastapi.routing.request_response(route.get_route_handler())


fastapi.routing.APIRoute.__init__ = _copy_route  # type: ignore[method-assign, assignment]

# A cache of what endpoints are would keep the last 80 applications, which each collection of garbage looks at again.
fastapi.dependencies.models._is_coroutine_callable_cached = (  # type: ignore[assignment]
    fastapi.dependencies.models._is_coroutine_callable_cached.__wrapped__
)
# The names of labels are the same each time, too, and so is the version, which stands in a file.
prometheus_client.validation._validate_labelname = functools.cache(prometheus_client.validation._validate_labelname)
gptserve.version.version = functools.cache(gptserve.version.version)

MODEL = "test-model"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
SAID: dict[str, Any] = {"role": "assistant", "refusal": None, "reasoning": None, "reasoning_content": None}
"""What every message of a whole answer has, beside its content."""
OPENING = {"role": "assistant", "content": "", "refusal": None}
"""The first delta of a choice."""
NO_IDS: dict[str, None] = {"token_ids": None}
OF_PROMPT: dict[str, None] = {"prompt_logprobs": None, "prompt_token_ids": None}
"""What a whole answer has beside its text unless it is asked for more."""


_templates: dict[str, ChatTemplate] = {}


def shared_template(source: str) -> ChatTemplate:
    """Return one for all tests of a file, or of all files: its worker is a process, which takes longer to start."""
    if source not in _templates:
        _templates[source] = ChatTemplate(source, {"eos_token": "<|endoftext|>"})
    return _templates[source]


@pytest.fixture(scope="session", autouse=True)
def close_all_templates(_leaves_nothing_behind: None) -> Iterator[None]:
    yield
    _close(list(_templates))


@pytest.fixture(scope="module", autouse=True)
def close_templates(close_all_templates: None) -> Iterator[None]:
    yield
    _close([source for source in _templates if source != TEMPLATE])


def _close(sources: list[str]) -> None:
    for source in sources:
        _templates.pop(source).close()


class Api:
    """An application and its fake engine, called without a socket."""

    def __init__(
        self,
        engine: FakeEngineClient,
        tokenizer: ByteTokenizer | None = None,
        template: str | None = TEMPLATE,
        state_dir: Path | None = None,
        **options: Any,
    ) -> None:
        self.engine = engine
        self.store = SqliteJobStore(state_dir)
        self.file_store = FolderFileStore(None if state_dir is None else state_dir / "files")
        self.batch_store = FolderBatchStore(None if state_dir is None else state_dir / "batches")
        options = {"chat_template": None if template is None else shared_template(template), **options}
        stores = self.store, self.file_store, self.batch_store
        self.app = make_app(engine, tokenizer or ByteTokenizer(), MODEL, *stores, **options)

    def close(self) -> None:
        """End the thread of the journal; all event loops are closed already."""
        self.store._thread.submit(self.store._disconnect)
        self.store._thread.shutdown()
        self.file_store._folder.close()
        self.batch_store._thread.submit(self.batch_store._folder.close)
        self.batch_store._thread.shutdown()

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Send one request on an event loop of its own."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **arguments)

        return asyncio.run(asyncio.wait_for(send(), 20))

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return self.request("GET", path, **arguments)

    def complete(self, **body: Any) -> httpx.Response:
        return self.request("POST", "/v1/completions", json=body)

    def chat(self, content: str = "hi", **body: Any) -> httpx.Response:
        """Send one message, or the `messages` given."""
        body = {"messages": [{"role": "user", "content": content}], **body}
        return self.request("POST", "/v1/chat/completions", json=body)

    def post_raw(self, content: bytes) -> httpx.Response:
        return self.request("POST", "/v1/completions", content=content, headers={"content-type": "application/json"})


class _QuickServer(HttpServer):
    """Ends when it is told, where uvicorn looks ten times a second and then sleeps as long."""

    told: asyncio.Event

    async def main_loop(self) -> None:
        loop, told = asyncio.create_task(super().main_loop()), asyncio.create_task(self.told.wait())
        await asyncio.wait([loop, told], return_when=asyncio.FIRST_COMPLETED)
        for task in (loop, told):
            task.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in (*self.servers, *(sockets or [])):
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()


class LiveServer(Api):
    """The same behind our HttpServer, as the command line runs it, in a thread."""

    def __init__(
        self,
        engine: FakeEngineClient,
        protocol: type[BoundedHttpProtocol] = BoundedHttpProtocol,
        max_connections: int = 1024,
        write_limit_s: float = 3600.0,
        tls: Tls | None = None,
        **options: Any,
    ) -> None:
        super().__init__(engine, **options)
        self.connections = Connections(max_connections)
        self.app.state.metrics.connections = self.connections
        self.server = _QuickServer(
            self.app,
            lambda: None,
            self.connections,
            write_limit_s=write_limit_s,
            stop_limit_s=20,
            tls=tls,
            protocol=protocol,
        )
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._listening = threading.Event()  # or it never will, as starting it has failed
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def wait_until_idle(self) -> None:
        """Block until no completion is in flight, which is all that a drain waits for."""
        asyncio.run_coroutine_threadsafe(self.app.state.lifecycle.wait_idle(), self._loop).result(20)

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels of its own."""
        lines = httpx.get(self.url + "/metrics", timeout=20, headers={"connection": "close"}).text.splitlines()
        [line] = [line for line in lines if line.startswith(f"{name}{{")]
        return float(line.split()[-1])

    @contextlib.contextmanager
    def running(self) -> Iterator[LiveServer]:
        self._thread.start()
        assert self._listening.wait(20), "uvicorn did not start"
        if self._failure is not None:
            self._thread.join(20)
            self._socket.close()
            self.close()
            raise self._failure
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self.server.told.set)
            self._thread.join(20)
            assert not self._thread.is_alive(), "uvicorn did not stop"

    def _run(self) -> None:
        async def serve() -> None:
            self._loop, self.server.told = asyncio.get_running_loop(), asyncio.Event()
            startup = self.server.startup

            async def announce(*arguments: Any, **options: Any) -> None:
                await startup(*arguments, **options)
                self._listening.set()

            self.server.startup = announce  # type: ignore[method-assign]
            try:
                await self.app.state.files.start()
                await self.app.state.jobs.start()
                await self.app.state.batches.start()
            except BaseException as error:
                self._failure = error
                self._listening.set()
                return
            await self.server.serve([self._socket])
            await self.engine.close()
            await self.app.state.jobs.settle()
            await self.app.state.batches.suspend()
            await self.app.state.files.close()
            await self.file_store.close()
            await self.batch_store.close()
            await self.store.close()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())


@pytest.fixture
def api(make_api: Callable[..., Api]) -> Api:
    return make_api(FakeEngineClient())


@pytest.fixture(scope="module")
def refusing_api() -> Iterator[Api]:
    """One for all requests of a file that are refused before they reach the engine, as they leave nothing behind."""
    made = Api(FakeEngineClient())
    yield made
    made.close()
    assert made.engine.submitted == [], "a request was not refused"


@pytest.fixture
def make_api() -> Iterator[Callable[..., Api]]:
    """Make applications whose journals are closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(*arguments: Any, **options: Any) -> Api:
            made = Api(*arguments, **options)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def serve() -> Iterator[Callable[..., LiveServer]]:
    """Start live servers that end with the test."""
    with contextlib.ExitStack() as stack:

        def start(engine: FakeEngineClient, **options: Any) -> LiveServer:
            return stack.enter_context(LiveServer(engine, **options).running())

        yield start
